"""What task ``algebra`` shows: steps against the peers, memory, and what each family of rules is worth."""

from __future__ import annotations

from typing import Any

from runner.tasks.context import Context
from runner.tasks.table import Row, Section, geomean, row_name, show_sections
from runner.units import format_bytes

_SHOWN = ("baseline", "pyg", "pyg_compiled")


def summarize(rows: list[Row]) -> dict[str, Any]:
    """Geometric mean, worst and best of the ratios, by mode, over all models and for each."""
    found: dict[str, Any] = {}
    for mode in dict.fromkeys(row["mode"] for row in rows):
        chosen = [row for row in rows if row["mode"] == mode]
        groups = {"all": chosen} | {
            model: [row for row in chosen if row["model"] == model]
            for model in dict.fromkeys(row["model"] for row in chosen)
        }
        for group, members in groups.items():
            for name in (
                "speedup_vs_best_peer",
                "auto_speedup_vs_best_peer",
                "speedup_vs_dgl",
                "peak_memory_ratio_vs_dgl",
            ):
                values = [row[name] for row in members if row[name]]
                if values:
                    entry = {
                        "geomean": geomean(values),
                        "worst": min(values),
                        "best": max(values),
                        "num_rows": len(values),
                    }
                    found[f"{mode}/{group}/{name}"] = entry
    return found


def show(context: Context, rows: list[Row], summary: dict[str, Any]) -> None:
    """Print the tables and give them to the sinks."""
    sections = [_steps(rows, summary, mode) for mode in dict.fromkeys(row["mode"] for row in rows)]
    sections += [_ablation(rows)] if any(row["slowdown_without"] for row in rows) else []
    sections += [_regret(rows)] if any(row["regret"] for row in rows) else []
    show_sections(context, sections, summary)


def _steps(rows: list[Row], summary: dict[str, Any], mode: str) -> Section:
    columns = [
        "dataset", "model", "DGL ms", "PyG ms", "compiled ms", "fused ms", "quartiles", "vs best peer", "auto", "memory", "of DGL's",
        "error", "program",
    ]  # fmt: skip
    cells = []
    for row in (row for row in rows if row["mode"] == mode):
        ours = row["step_ms"]["fused"]
        peers = [f"{row['step_ms'][name]['median']:.2f}" if name in row["step_ms"] else "–" for name in _SHOWN]
        auto = row["auto_speedup_vs_best_peer"]
        cells.append(
            [
                *row_name(row), *peers, f"{ours['median']:.2f}", f"{ours['q1']:.2f} – {ours['q3']:.2f}",
                f"{row['speedup_vs_best_peer']:.2f}×", "–" if auto is None else f"{auto:.2f}× {row['auto_kept']}",
                format_bytes(row["peak_memory_bytes"]["fused"]), f"{row['peak_memory_ratio_vs_dgl']:.2f}", f"{row['max_error']:.0e}",
                "baseline" if row["kept"] == "baseline" else row["plan"],
            ]
        )  # fmt: skip
    for what in ("geomean", "worst"):
        ratio = summary[f"{mode}/all/speedup_vs_best_peer"][what]
        memory = summary[f"{mode}/all/peak_memory_ratio_vs_dgl"]["geomean" if what == "geomean" else "best"]
        cells.append([what, "", "", "", "", "", "", f"{ratio:.2f}×", "", "", f"{memory:.2f}", "", ""])
    return f"steps_{mode}", f"{'training steps' if mode == 'train' else 'inference'}", columns, cells


def _ablation(rows: list[Row]) -> Section:
    chosen = [row for row in rows if row["slowdown_without"] and row["mode"] == "train"]
    families = list(dict.fromkeys(family for row in chosen for family in row["slowdown_without"]))
    cells = [[*row_name(row), *(f"{row['slowdown_without'][family]:.2f}×" for family in families)] for row in chosen]
    if chosen:
        cells.append(
            [
                "geomean",
                "",
                *(f"{geomean([row['slowdown_without'][family] for row in chosen]):.2f}×" for family in families),
            ]
        )
    return (
        "ablation",
        "training steps take so many times as long without a family of rules",
        ["dataset", "model", *families],
        cells,
    )


def _regret(rows: list[Row]) -> Section:
    chosen = [row for row in rows if row["regret"] and row["mode"] == "train"]
    columns = ["dataset", "model", "programs", "cost model's regret", "choice's regret"]
    cells = [
        [
            *row_name(row),
            str(row["regret"]["num_programs"]),
            f"{row['regret']['of_cost_model']:.1%}",
            "–" if row["regret"]["of_choice"] is None else f"{row['regret']['of_choice']:.1%}",
        ]
        for row in chosen
    ]
    return "regret", "how much slower than the fastest of all programs", columns, cells
