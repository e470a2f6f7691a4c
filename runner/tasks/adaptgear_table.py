"""Task ``adaptgear_table``: what density-adaptive kernels give, over graphs × models, step by step of the method.

Rows are kept as they are measured; a run that was stopped is taken up with ``task.resume``. Losses stay in the table.
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import json
import math
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from runner.errors import ConfigError, suggestion
from runner.gnn.data import files
from runner.gnn.data.graph_data import GraphData
from runner.gnn.data.load import load
from runner.gnn.data.named import stems_of
from runner.kernels.density.ablation import STEPS
from runner.results import fingerprint, plain, read_result
from runner.schema import Config, DatasetConfig, parse_model
from runner.tasks.context import Context, check_against_data
from runner.tasks.table_rows import measure_row
from runner.units import format_bytes


def run(context: Context) -> dict[str, Any]:
    """Run the task; returns its part of the result record."""
    config = context.config
    if config.device == "cuda":
        raise ConfigError("device=cuda: the table compares kernels of the CPU; use device=cpu")
    context.folder.update(fingerprint=fingerprint(config, ""), device="cpu")
    known = _earlier_rows(config.task.resume)
    rows: list[dict[str, Any]] = []
    for name, dataset in _datasets(context).items():
        data = load(dataset)
        for model in config.task.models:
            row_config = _row_config(config, dataset, model)
            check_against_data(row_config, data)
            key = _key(row_config, data)
            row = known.get(key)
            if row is None:
                row = {
                    "key": key,
                    "dataset": name,
                    **_model_of(row_config),
                    **measure_row(row_config, data, context.say),
                }
            rows.append(row)
            _tell(context, row, is_known=key in known)
            context.folder.update(rows=rows)
            gc.collect()
    summary = _summary(rows)
    _report(context, rows, summary)
    return {"rows": rows, "summary": summary}


def _datasets(context: Context) -> dict[str, DatasetConfig]:
    """The graphs of the table, each with its own options; ``root``, ``features`` and ``labels`` of ``dataset`` go before theirs."""
    config, default = context.config, DatasetConfig()
    wanted = list(config.task.graphs)
    for name in wanted:
        if name not in config.task.datasets:
            raise ConfigError(f"task.graphs={name}: {suggestion(name, list(config.task.datasets))}")
    given = {
        option: value
        for option in ("root", "features", "labels", "download")
        if (value := getattr(config.dataset, option)) != getattr(default, option)
    }
    if "features" in given:
        given["normalize"] = "none"  # the file's own features are what a row sum is for
    found = {}
    for name in wanted or config.task.datasets:
        dataset = dataclasses.replace(config.task.datasets[name], **given)
        if not wanted and not _is_at_hand(dataset):
            context.say(f"{name} is left out: no file of it; dataset.root=FOLDER says where graphs are")
            continue
        found[name] = dataset
    if not found:
        raise ConfigError("task.datasets is empty: +dataset@task.datasets.NAME=CHOICE adds a graph")
    return found


def _is_at_hand(dataset: DatasetConfig) -> bool:
    if dataset.name == "planted" or dataset.path is not None:
        return True
    return dataset.root is not None and files.find(Path(dataset.root), stems_of(dataset.name)) is not None


def _row_config(config: Config, dataset: DatasetConfig, model: str) -> Config:
    name, num_layers, hidden = parse_model(model)
    own = dataclasses.replace(config.model, name=name, num_layers=num_layers, hidden=hidden)
    return dataclasses.replace(config, dataset=dataset, model=own)


def _model_of(config: Config) -> dict[str, Any]:
    model = config.model
    return {"model": model.name, "num_layers": model.num_layers, "hidden": model.hidden, "dropout": model.dropout}


def _key(config: Config, data: GraphData) -> str:
    """Name what a row depends on: data, options, code, threads."""
    told = {group: dataclasses.asdict(getattr(config, group)) for group in ("dataset", "model", "kernel", "train")}
    for name in ("root", "path", "download"):
        told["dataset"].pop(name)
    task = {
        name: getattr(config.task, name)
        for name in ("num_warmup", "num_steps", "case_seconds", "step_seconds", "peers")
    }
    text = json.dumps(
        plain([told, task, data.content_hash, torch.get_num_threads(), torch.__version__]), sort_keys=True
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _earlier_rows(folder: str | None) -> dict[str, dict[str, Any]]:
    """Rows of a run that was stopped, by key.

    Raises:
        ConfigError: where the folder holds no such run.
    """
    if folder is None:
        return {}
    try:
        record = read_result(Path(folder))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"task.resume={folder}: no run folder ({type(error).__name__})") from error
    if record.get("task") != "adaptgear_table":
        raise ConfigError(f"task.resume={folder}: a run of task={record.get('task')}, not adaptgear_table")
    return {row["key"]: row for row in record.get("rows", []) if "key" in row}


def _tell(context: Context, row: dict[str, Any], is_known: bool) -> None:
    context.say(
        f"{row['dataset']}, {row['model']} {row['num_layers']}×{row['hidden']}: aggregation {row['aggregation_speedup_vs_dgl']:.2f}× "
        f"DGL's speed, step {row['step_speedup_vs_dgl']:.2f}×, {row['ratio_to_oracle']:.3f} of the oracle's"
        + (" (measured in the run resumed)" if is_known else "")
    )
    context.sinks.metrics(
        {
            name: row[name]
            for name in (
                "dataset", "model", "hidden", "aggregation_speedup_vs_dgl", "step_speedup_vs_dgl", "ratio_to_oracle",
                "speedup_vs_best_single",
            )
        }
    )  # fmt: skip


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
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
        name: {"geomean": _geomean(values), "worst": min(values), "best": max(values), "num_rows": len(values)}
        for name, values in ratios.items()
    }


def _geomean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def _report(context: Context, rows: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    for name, title, columns, cells in (
        _graphs(rows),
        _ablation(rows, summary),
        _whole_steps(rows, summary),
    ):
        table = Table(*columns, title=title)
        for cell in cells:
            table.add_row(*cell)
        context.show(table)
        context.sinks.table(name, columns, cells)
    context.sinks.summary(
        {f"{name}/{key}": entry[key] for name, entry in summary.items() for key in ("geomean", "worst")}
    )


_Section = tuple[str, str, list[str], list[list[str]]]


def _label(row: dict[str, Any]) -> list[str]:
    return [row["dataset"], f"{row['model']} {row['num_layers']}×{row['hidden']}"]


def _graphs(rows: list[dict[str, Any]]) -> _Section:
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
        "Δ output",
        "Δ gradient",
    ]
    cells = [
        [
            *_label(row),
            str(row["num_nodes"]),
            str(row["num_edges"]),
            f"{row['mean_degree']:.1f}",
            f"{row['degree_variation']:.1f}",
            str(row["num_features"]),
            f"{row['intra_fraction']:.0%}",
            f"{row['intra_density']:.2g}",
            "; ".join(row["kernels"]),
            f"{row['max_output_diff']:.0e}",
            f"{row['max_grad_diff']:.0e}",
        ]
        for row in rows
    ]
    return "graphs", "graphs, and what was chosen", columns, cells


def _ablation(rows: list[dict[str, Any]], summary: dict[str, Any]) -> _Section:
    steps = {
        "native": "our CSR", "reorder": "+ reorder", "split": "+ split", "fixed": "+ fixed kernels", "adaptive": "+ adaptive",
        "oracle": "oracle",
    }  # fmt: skip
    columns = ["dataset", "model", "DGL ms", *steps.values(), "vs best single", "of the oracle"]
    cells = [
        [
            *_label(row),
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


def _whole_steps(rows: list[dict[str, Any]], summary: dict[str, Any]) -> _Section:
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
                *_label(row),
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
