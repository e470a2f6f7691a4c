"""What task ``adaptgear_table`` shows: the graphs, the sparse products by step of the method, the whole training steps."""

from __future__ import annotations

from typing import Any

from runner.kernels.density.ablation import STEPS
from runner.tasks.context import Context
from runner.tasks.table import Section, geomean, row_name, show_sections
from runner.units import format_bytes


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Geometric means, and the worst and best row, of each ratio."""
    ratios = {
        "aggregation_speedup_vs_dgl": [row["aggregation_speedup_vs_dgl"] for row in rows],
        "step_speedup_vs_dgl": [row["step_speedup_vs_dgl"] for row in rows],
        "ratio_to_oracle": [row["ratio_to_oracle"] for row in rows],
        "speedup_vs_best_single": [row["speedup_vs_best_single"] for row in rows],
    }
    ratios |= {
        f"aggregation_{step}": [row["aggregation_speedups"][step] for row in rows] for step in (*STEPS, "oracle")
    }
    peers = dict.fromkeys(name for row in rows for name in row["step_speedups"])
    ratios |= {
        f"step_{name}": [row["step_speedups"][name] for row in rows if name in row["step_speedups"]] for name in peers
    }
    return {
        name: {"geomean": geomean(values), "worst": min(values), "best": max(values), "num_rows": len(values)}
        for name, values in ratios.items()
    }


def show(context: Context, rows: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    """Print the table's three parts, each row below the one before, and give them to the sinks."""
    show_sections(context, [_graphs(rows), _ablation(rows, summary), _whole_steps(rows, summary)], summary)


def _graphs(rows: list[dict[str, Any]]) -> Section:
    columns = [
        "dataset",
        "model",
        "N",
        "E",
        "degree",
        "its CV",
        "F",
        "inside",
        "density",
        "kernels",
        "partition, build, tune s",
        "Δ output",
        "Δ gradient",
    ]
    cells = [
        [
            *row_name(row),
            str(row["num_nodes"]),
            str(row["num_edges"]),
            f"{row['mean_degree']:.1f}",
            f"{row['degree_variation']:.1f}",
            str(row["num_features"]),
            f"{row['intra_fraction']:.0%}",
            f"{row['intra_density']:.2g}",
            "; ".join(row["kernels"]),
            ", ".join(f"{row[phase]:.2f}" for phase in ("partition_s", "build_s", "tune_s")),
            f"{row['max_output_diff']:.0e}",
            f"{row['max_grad_diff']:.0e}",
        ]
        for row in rows
    ]
    return "graphs", "graphs, and what was chosen", columns, cells


def _ablation(rows: list[dict[str, Any]], summary: dict[str, Any]) -> Section:
    steps = {
        "native": "our CSR", "reorder": "+ reorder", "split": "+ split", "fixed": "+ fixed kernels", "adaptive": "+ adaptive",
        "oracle": "oracle",
    }  # fmt: skip
    columns = ["dataset", "model", "DGL ms", *steps.values(), "vs best single", "of the oracle"]
    cells = [
        [
            *row_name(row),
            f"{row['aggregation_ms']['framework']:.3f}",
            *(f"{row['aggregation_speedups'][step]:.2f}×" for step in steps),
            f"{row['speedup_vs_best_single']:.2f}×",
            f"{row['ratio_to_oracle']:.3f}",
        ]
        for row in rows
    ]
    for what in ("geomean", "worst"):
        cells.append(
            [what, "", "", *(f"{summary[f'aggregation_{step}'][what]:.2f}×" for step in steps),
             f"{summary['speedup_vs_best_single'][what]:.2f}×", f"{summary['ratio_to_oracle'][what]:.3f}"]
        )  # fmt: skip
    return "aggregation", "all sparse products of a training step, both directions, against DGL", columns, cells


def _whole_steps(rows: list[dict[str, Any]], summary: dict[str, Any]) -> Section:
    names = [
        name.removeprefix("step_") for name in summary if name.startswith("step_") and name != "step_speedup_vs_dgl"
    ]
    columns = [
        "dataset", "model", "DGL ms", "ours ms", "quartiles", *names[1:], "preprocess s", "break-even", "peak memory",
    ]  # fmt: skip
    cells = []
    for row in rows:
        ours = row["step_ms"]["density_adaptive"]
        cells.append(
            [
                *row_name(row),
                f"{row['step_ms']['baseline']['median']:.2f}",
                f"{ours['median']:.2f}",
                f"{ours['q1']:.2f} – {ours['q3']:.2f}",
                *(f"{row['step_speedups'][name]:.2f}×" if name in row["step_speedups"] else "–" for name in names[1:]),
                f"{row['preprocess_s']:.2f}",
                "never" if row["break_even_epochs"] is None else f"{row['break_even_epochs']:.0f}",
                format_bytes(row["peak_memory_bytes"]["density_adaptive"] + row["resident_bytes"]),
            ]
        )
    for what in ("geomean", "worst"):
        cells.append(
            [what, "", "", "", "", *(f"{summary[f'step_{name}'][what]:.2f}×" for name in names[1:]), "", "", ""]
        )
    return "steps", "whole training steps against DGL", columns, cells
