"""What every task is given, and the steps that tasks share: device, data, model, strategy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from runner.errors import ConfigError, UserError, VerificationError
from runner.gnn.batches import FullGraph, to_dgl
from runner.gnn.capture import capture
from runner.gnn.data.graph_data import GraphData, Split
from runner.gnn.data.load import load
from runner.gnn.dgl_compat import has_cuda, import_dgl
from runner.gnn.library_kernels import csr_dgl
from runner.gnn.metrics import check_metric
from runner.gnn.models import build_model
from runner.kernels.adjacency import Adjacency
from runner.kernels.density.strategy import DensityAdaptive
from runner.kernels.opgraph import OpGraph
from runner.kernels.strategy import Baseline, Prepared, Program, Strategy
from runner.kernels.verify import (
    OUTPUT_TOLERANCE,
    Agreement,
    answer,
    answer_in_fp64,
    evaluation,
    first_difference,
    other_weights,
    relative_difference,
    require,
    worse_of,
)
from runner.results import RunFolder, fingerprint
from runner.schema import Config, KernelConfig, used_strategies
from runner.tracking import Sinks

_VERIFY_SEED = 20_231_130  # any: baseline and strategy get the same


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
    needs_cpu = "density_adaptive" in used_strategies(config)
    if config.device == "cuda":
        if not torch.cuda.is_available():
            built = (
                f"torch {torch.__version__} is a CPU build"
                if torch.version.cuda is None
                else "torch sees no GPU (driver or device missing)"
            )
            raise ConfigError(f"device=cuda: {built}; use device=cpu or device=auto")
        if not has_cuda():
            raise ConfigError(
                f"device=cuda: DGL {import_dgl().__version__} is a CPU build; install a CUDA build from DGL's own site, "
                "or use device=cpu"
            )
        if needs_cpu:
            raise ConfigError(
                "device=cuda: the kernels of density_adaptive run on the CPU; use device=cpu, or kernel=baseline"
            )
        return torch.device("cuda")
    return torch.device("cuda" if config.device == "auto" and not needs_cpu and has_cuda() else "cpu")


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


def make_strategy(name: str, kernel: KernelConfig, replay: Sequence[dict[str, Any]] = ()) -> Strategy:
    """Return a configured strategy; ``replay`` has the choices of a run that is resumed."""
    if name == "baseline":
        return Baseline()
    return DensityAdaptive(
        partition=kernel.partition,
        block_size=kernel.block_size,
        min_intra_fraction=kernel.min_intra_fraction,
        min_gain=kernel.min_gain,
        num_trials=kernel.num_trials,
        replay=replay,
    )


class FullGraphExperiment:
    """A model on one whole graph: what the strategies are prepared for, verified against and timed on.

    Args:
        config: the experiment.
        data: its graph.
        device: where it runs.
    """

    def __init__(self, config: Config, data: GraphData, device: torch.device) -> None:
        self.config, self.data, self.device = config, data, device
        self.graph = to_dgl(data, device)
        self.module = self.fresh_module(config.train.seed)
        self.labels = data.labels.to(device)

    def fresh_module(self, seed: int) -> nn.Module:
        """Build the model with the initial weights of a seed."""
        torch.manual_seed(seed)
        return build_model(self.config.model, self.data.num_features, self.data.num_classes, self.data.task).to(
            self.device
        )

    def reset(self, seed: int) -> None:
        """Give the module the initial weights of a seed."""
        self.module.load_state_dict(self.fresh_module(seed).state_dict())

    @cached_property
    def features(self) -> Tensor:
        """float32 [N, F], dense, in the graph's own order."""
        return self.data.dense_features().to(self.device)

    @cached_property
    def adjacency(self) -> Adjacency:
        return Adjacency.from_edges(self.data.src, self.data.dst, self.data.num_nodes, self.data.num_nodes)

    @cached_property
    def program(self) -> Program:
        return Program(
            forward=lambda features: self.module(self.graph, features),
            capture=self._capture,
            adjacency=lambda: self.adjacency,
            library_kernels=(csr_dgl,),
        )

    def _capture(self, training: bool) -> OpGraph:
        before = self.module.training
        self.module.train(training)
        try:
            return capture(self.module, self.graph, self.features, self.adjacency)
        finally:
            self.module.train(before)

    def source_for(self, prepared: Prepared) -> FullGraph:
        """The graph as training batches under a strategy: features, labels and split in its order of nodes."""
        split = self.data.split
        return FullGraph(
            lambda features: prepared(features, self.module.training),
            prepared.place(self.features),
            prepared.place(self.labels),
            Split(train=prepared.locate(split.train), val=prepared.locate(split.val), test=prepared.locate(split.test)),
        )

    def verify(self, prepared: Prepared) -> Agreement:
        """Compare a strategy with baseline: output, loss, every gradient and buffer, dropout on, and the output in evaluation mode;
        on the weights that the module has and on others, that the strategy hasn't seen.

        Raises:
            VerificationError: past tolerance, naming the op.
        """
        agreement = self._verify_step(prepared, _VERIFY_SEED)
        with other_weights(self.module, _VERIFY_SEED):
            agreement = worse_of(agreement, self._verify_step(prepared, _VERIFY_SEED + 1))
            self._verify_evaluation(prepared)
        return agreement

    def _verify_step(self, prepared: Prepared, seed: int) -> Agreement:
        rows = self.data.split.train

        def loss(output: Tensor) -> Tensor:
            return F.cross_entropy(output[rows], self.labels[rows])

        expected = answer(self.module, lambda: self.program.forward(self.features), loss, seed)
        placed = prepared.place(self.features)
        found = answer(self.module, lambda: prepared.restore(prepared(placed, True)), loss, seed)
        lowered = prepared.lowered()
        if lowered is None:
            return require(prepared.name, expected, found, lambda: expected, lambda: "its second call: it keeps state")
        graph, executable = lowered
        return require(
            prepared.name,
            expected,
            found,
            lambda: answer_in_fp64(graph, self.features, loss, seed, expected),
            lambda: first_difference(graph, executable, self.features, prepared.place, prepared.restore, seed),
        )

    def _verify_evaluation(self, prepared: Prepared) -> None:
        expected = evaluation(self.module, lambda: self.program.forward(self.features))
        placed = prepared.place(self.features)
        found = evaluation(self.module, lambda: prepared.restore(prepared(placed, False)))
        difference = relative_difference(expected, found)
        if difference > OUTPUT_TOLERANCE:
            raise VerificationError(
                f"{prepared.name} differs from baseline in evaluation mode: output by {difference:.1e} of its largest entry "
                f"(allowed {OUTPUT_TOLERANCE:.0e})"
            )


def prepare_strategy(
    context: Context, experiment: FullGraphExperiment, name: str, replay: Sequence[dict[str, Any]] = ()
) -> Prepared:
    """Prepare a strategy; with ``kernel.fallback`` baseline takes the place of one that can't take the model.

    Raises:
        UserError: where the strategy can't take the model and no fallback was asked for.
    """
    kernel = context.config.kernel
    try:
        prepared = make_strategy(name, kernel, replay).prepare(experiment.program)
    except UserError as error:
        if not kernel.fallback:
            raise
        context.say(f"{name}: {error}; kernel.fallback=true, so baseline runs in its place")
        prepared = Baseline().prepare(experiment.program)
    if kernel.explain:
        context.say(f"--- {prepared.name} ---\n{prepared.explain()}")
    return prepared


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
