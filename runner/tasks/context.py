"""What every task is given, and how every task begins: data, checks, device, model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from runner.errors import ConfigError
from runner.gnn.data.graph_data import GraphData
from runner.gnn.data.load import load
from runner.gnn.dgl_compat import has_cuda, import_dgl
from runner.gnn.metrics import check_metric
from runner.gnn.models import build_model
from runner.results import RunFolder, fingerprint
from runner.schema import Config
from runner.tracking import Sinks


@dataclass(frozen=True)
class Context:
    """One run: its config, where its results go, and how it speaks.

    Attributes:
        console: for progress bars.
        say: prints a line, and logs it.
        show: prints a table, and logs it.
    """

    config: Config
    folder: RunFolder
    sinks: Sinks
    console: Console
    say: Callable[[str], None]
    show: Callable[[Table], None]

    @property
    def path(self) -> Path:
        """The run folder."""
        return self.folder.path


def pick_device(config: Config) -> torch.device:
    """Return the device to run on.

    Raises:
        ConfigError: where cuda was asked for and something is missing; the line says what.
    """
    if config.device == "cuda":
        if not torch.cuda.is_available():
            built = (
                f"torch {torch.__version__} is a CPU build"
                if torch.version.cuda is None
                else "torch sees no GPU (driver or device missing)"
            )
            raise ConfigError(f"device=cuda: {built}; use device=cpu or device=auto")
        if not has_cuda() and not _is_one_graph(config):
            raise ConfigError(
                f"device=cuda: DGL {import_dgl().__version__} is a CPU build, and only training on one whole graph goes without; install "
                "a CUDA build from DGL's own site, or use device=cpu"
            )
        return torch.device("cuda")
    can_use_gpu = torch.cuda.is_available() and (_is_one_graph(config) or has_cuda())
    return torch.device("cuda" if config.device == "auto" and can_use_gpu else "cpu")


def _is_one_graph(config: Config) -> bool:
    """Whether the model sees one whole graph, so that its op graph can be captured once."""
    return config.dataset.task == "node" and config.train.sampling == "full"


def begin(context: Context) -> tuple[GraphData, torch.device]:
    """Load the graph, check the config against it, pick the device, and put all three on record.

    Raises:
        UserError: where the data can't be used, or an option can't work with it or on this machine.
    """
    config = context.config
    data = load(config.dataset)
    check_against_data(config, data)
    device = pick_device(config)
    for line in data.report:
        context.say(f"data: {line}")
    context.folder.update(
        dataset=describe(data), device=str(device), fingerprint=fingerprint(config, data.content_hash)
    )
    return data, device


def check_against_data(config: Config, data: GraphData) -> None:
    """Check what only the data can tell.

    Raises:
        ConfigError: where an option can't work with this graph.
    """
    check_metric(config.train.metric, data.num_classes)
    if config.train.metric == "roc_auc" and not config.train.folds:
        for part in ("val", "test"):
            labels = data.labels[getattr(data.split, part)]
            if labels.numel() and labels.unique().numel() < 2:
                raise ConfigError(f"train.metric=roc_auc: the {part} split of {data.name} has one class only")
    seeds = data.split.train.numel() if config.train.sampling == "neighbor" else data.num_nodes
    if config.model.norm == "batch" and seeds == 1:
        raise ConfigError(
            f"model.norm=batch: {data.name} leaves a single row to normalise over; use model.norm=layer or none"
        )
    if config.model.edge_weight and data.edge_weight is None:
        raise ConfigError(f"model.edge_weight=true: {data.name} has no edge weights")
    needs_positive = config.model.edge_weight and config.model.name in ("sgc", "appnp")
    if needs_positive and data.edge_weight is not None and bool((data.edge_weight <= 0).any()):
        edge = int((data.edge_weight <= 0).nonzero()[0])
        raise ConfigError(
            f"model.edge_weight=true: edge {edge} of {data.name} has weight {float(data.edge_weight[edge]):g}; the symmetric "
            f"normalisation of model={config.model.name} needs positive weights"
        )
    if (
        not config.train.folds
        and not data.split.val.numel()
        and (config.train.select != "last" or config.train.patience)
    ):
        raise ConfigError(
            "the validation split is empty: nothing to select an epoch by; use train.select=last train.patience=0, "
            "or a dataset.val_fraction above 0"
        )


def fresh_module(config: Config, data: GraphData, device: torch.device, seed: int) -> nn.Module:
    """Build the model with the initial weights of a seed."""
    torch.manual_seed(seed)
    return build_model(config.model, data.num_features, data.num_classes, data.task).to(device)


def describe(data: GraphData) -> dict[str, Any]:
    """Return what the result file says of a graph."""
    return {
        "name": data.name,
        "num_nodes": data.num_nodes,
        "num_edges": data.num_edges,
        "num_features": data.num_features,
        "num_classes": data.num_classes,
        "feature_format": data.feature_format,
        "feature_density": data.feature_density,
        "content_hash": data.content_hash,
        "report": list(data.report),
    }
