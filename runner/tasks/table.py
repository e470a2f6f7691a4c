"""Tables over graphs × models: each row is kept as it is measured, and a run that was stopped is taken up with ``task.resume``."""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from runner.errors import ConfigError, suggestion
from runner.gnn.data import files
from runner.gnn.data.graph_data import GraphData
from runner.gnn.data.load import load
from runner.gnn.data.named import stems_of
from runner.progress import Bar
from runner.results import code_version, cpu_name, fingerprint, plain, read_result
from runner.schema import TABLE_DATASET_OPTIONS, Config, DatasetConfig, parse_model
from runner.tasks.context import Context, check_against_data

Row = dict[str, Any]
Section = tuple[str, str, list[str], list[list[str]]]  # name, title, columns, cells
Measure = Callable[[Config, GraphData, Callable[[str], None]], list[Row]]
_KEY_OPTIONS = ("dataset", "model", "kernel")
_FREE = {"dataset": ("root", "path", "download"), "model": (), "kernel": ("name", "fallback", "explain", "picture")}


def measure_rows(
    context: Context, options: Sequence[str], measure: Measure, tell: Callable[[Row, bool], None]
) -> list[Row]:
    """Measure every graph with every model, but what a resumed run has already.

    Args:
        context: the run; its ``task.datasets`` and ``task.models`` are the table's.
        options: of the task, that a row depends on.
        measure: returns the rows of one graph and model; told the config with both, the graph, and how to speak.
        tell: says what a row came to; told whether it was measured in the run resumed.

    Raises:
        ConfigError: for a device, graph, model or folder that can't be used.
    """
    config = context.config
    if config.device == "cuda":
        raise ConfigError("device=cuda: the table compares kernels of the CPU; use device=cpu")
    context.folder.update(fingerprint=fingerprint(config, ""), device="cpu")
    known = _earlier_rows(config.task.resume, config.task.name)
    rows: list[Row] = []
    datasets = _datasets(context)
    with Bar(context.console, "rows", len(datasets) * len(config.task.models)) as bar:
        for name, dataset in datasets.items():
            data = load(dataset)
            for model in config.task.models:
                row_config = _row_config(config, dataset, model)
                check_against_data(row_config, data)
                key = _key(row_config, data, options)
                made = known.get(key) or [
                    {"key": key, "dataset": name, **_model_of(row_config), **row}
                    for row in measure(row_config, data, context.say)
                ]
                for row in made:
                    tell(row, key in known)
                rows += made
                context.folder.update(rows=rows)
                bar.step(f"{name} {model}")
                gc.collect()
    return rows


def geomean(values: Sequence[float]) -> float:
    """Return the geometric mean of positive numbers."""
    return math.exp(sum(map(math.log, values)) / len(values))


def row_name(row: Row) -> list[str]:
    """Return a row's first two cells: the graph and the model."""
    return [row["dataset"], f"{row['model']} {row['num_layers']}×{row['hidden']}"]


def show_sections(context: Context, sections: Sequence[Section], summary: dict[str, Any]) -> None:
    """Print a table's parts, one below the other, and give them to the sinks with the summary's geometric means and worst cases."""
    for name, title, columns, cells in sections:
        table = Table(*columns, title=title)
        for cell in cells:
            table.add_row(*cell)
        context.show(table)
        context.sinks.table(name, columns, cells)
    context.sinks.summary(
        {f"{name}/{key}": entry[key] for name, entry in summary.items() for key in ("geomean", "worst")}
    )


def _datasets(context: Context) -> dict[str, DatasetConfig]:
    """The graphs of the table, each with its own options; ``root``, ``features`` and ``labels`` of ``dataset`` go before theirs."""
    config, default = context.config, DatasetConfig()
    wanted = list(config.task.graphs)
    for name in wanted:
        if name not in config.task.datasets:
            raise ConfigError(f"task.graphs={name}: {suggestion(name, list(config.task.datasets))}")
    given = {
        option: value
        for option in TABLE_DATASET_OPTIONS
        if (value := getattr(config.dataset, option)) != getattr(default, option)
    }
    if "features" in given:
        given["normalize"] = "none"  # the file's own features are what a row sum is for
    all_of_them = {name: dataclasses.replace(own, **given) for name, own in config.task.datasets.items()}
    found = {name: all_of_them[name] for name in wanted} or {
        name: dataset for name, dataset in all_of_them.items() if _is_at_hand(dataset)
    }
    if not found:
        raise ConfigError("task.datasets is empty: +dataset@task.datasets.NAME=CHOICE adds a graph")
    missing = [] if wanted else [name for name in all_of_them if name not in found]
    if missing:
        context.say(f"left out, no file at hand: {', '.join(missing)}; dataset.root=FOLDER says where graphs are")
    return found


def _is_at_hand(dataset: DatasetConfig) -> bool:
    if dataset.name == "planted" or dataset.path is not None:
        return True
    return dataset.root is not None and files.find(Path(dataset.root), stems_of(dataset.name)) is not None


def _row_config(config: Config, dataset: DatasetConfig, model: str) -> Config:
    name, num_layers, hidden = parse_model(model, config.task.name)
    own = dataclasses.replace(config.model, name=name, num_layers=num_layers, hidden=hidden)
    return dataclasses.replace(config, dataset=dataset, model=own)


def _model_of(config: Config) -> dict[str, Any]:
    model = config.model
    return {"model": model.name, "num_layers": model.num_layers, "hidden": model.hidden, "dropout": model.dropout}


def _key(config: Config, data: GraphData, options: Sequence[str]) -> str:
    """Name what a row depends on: data, options, code, processor, threads."""
    told = {group: dataclasses.asdict(getattr(config, group)) for group in _KEY_OPTIONS}
    told = {group: {name: told[group][name] for name in told[group] if name not in _FREE[group]} for group in told}
    told["train"] = {
        name: getattr(config.train, name) for name in ("optimizer", "lr", "weight_decay", "momentum", "seed")
    }
    task = {name: getattr(config.task, name) for name in options}
    text = json.dumps(
        plain([told, task, data.content_hash, code_version(), cpu_name(), torch.get_num_threads(), torch.__version__]),
        sort_keys=True,
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _earlier_rows(folder: str | None, task: str) -> dict[str, list[Row]]:
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
    if record.get("task") != task:
        raise ConfigError(f"task.resume={folder}: a run of task={record.get('task')}, not {task}")
    found: dict[str, list[Row]] = {}
    for row in record.get("rows", []):
        if "key" in row:
            found.setdefault(row["key"], []).append(row)
    return found
