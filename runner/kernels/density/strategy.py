"""The strategy ``density_adaptive``: every sum and mean over neighbours runs on kernels chosen by the density of each part.

Nodes are renumbered once so that communities are contiguous; edges then fall inside diagonal blocks (intra) or outside (inter),
and intra + inter is the whole matrix. For each matrix, width and direction the fastest of several kernels is taken, for the
whole or for the two parts. Dropout masks are drawn in the graph's own order, so that a seed means the same masks as in baseline.

Legend: N nodes, E edges, F features.
Source: AdaptGear (arXiv 2305.17408), whose idea this is; the selection rule is our own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from runner.errors import UserError
from runner.kernels.adjacency import Adjacency
from runner.kernels.density.partition import Partition, Progress, partition
from runner.kernels.density.plans import Plans
from runner.kernels.density.portrait import Portrait
from runner.kernels.lower import Executable
from runner.kernels.opgraph import Aggregate, Call, Op, OpGraph
from runner.kernels.strategy import Prepared, Program, Stopwatch
from runner.units import format_bytes, format_seconds

_BRIEF_S = 0.1


def _nothing() -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class DensityAdaptive:
    """Options of the strategy; see ``conf/kernel`` for their meaning.

    ``replay`` holds the choices of an earlier run's report: what it names is taken, not measured again, so that a resumed run
    rounds as the first one did. ``on_progress`` is told the steps of the partition, done and in all; ``on_calibration`` is
    called before kernels are compiled and measured for the cost model, once a machine.
    """

    partition: str = "metis"
    block_size: int = 64
    min_intra_fraction: float = 0.1
    min_gain: float = 0.03
    selector: str = "measured"
    num_trials: int = 7
    keep_choices: bool = True
    matrix_units: str = "fp32"
    atomics: bool = False
    picture: bool = False
    replay: Sequence[dict[str, Any]] = ()
    on_progress: Progress | None = None
    on_calibration: Callable[[], None] = _nothing
    name: str = "density_adaptive"

    def prepare(self, program: Program) -> Prepared:
        """Capture, partition, build and choose.

        Raises:
            UserError: where the model has no sum or mean with fixed scalar weights, or has message passing of another kind.
        """
        return self.plan(program)[0]

    def plan(self, program: Program) -> tuple[PreparedDensity, Plans, OpGraph]:
        """As :meth:`prepare`; returns what was prepared, the plans with every kernel that was built, and the op graph of training."""
        watch = Stopwatch()
        there: Adjacency = watch.measure("build", program.adjacency)
        adjacency = there.to("cpu")
        graphs = {training: watch.measure("capture", partial(program.capture, training)) for training in (True, False)}
        for graph in graphs.values():
            _require_spmm(graph)
        parts: Partition = watch.measure(
            "partition", lambda: partition(adjacency, self.partition, self.block_size, self.on_progress)
        )
        plans = Plans(
            self, program.library_kernels, adjacency, parts, watch, there.device, _working_bytes(graphs[True])
        )
        lowered = {
            training: Executable(graph, plans.lower, plans.constants(graph)) for training, graph in graphs.items()
        }
        prepared = PreparedDensity(graphs, lowered, plans, watch.seconds)
        prepared.portrait = plans.portrait(adjacency) if self.picture else None
        return prepared, plans, graphs[True]


def spmm_reason(graph: OpGraph, op: Op) -> str | None:
    """Return why an op is not a sum or mean with fixed scalar weights; None where it is one, or no message passing at all."""
    if isinstance(op, Call):
        return None
    if not isinstance(op, Aggregate):
        return f"'{op.label}' ({op.where}) computes on edges"
    if op.reduce not in ("sum", "mean"):
        return f"'{op.label}' ({op.where}) is not a sum or mean"
    targets = [operand.target for operand in op.operands]
    dtype = graph.values[op.outputs[0].index].dtype
    if dtype != torch.float32:
        return f"'{op.label}' ({op.where}) is in {str(dtype).removeprefix('torch.')}, the kernels are for float32"
    if op.operation == "copy" and targets == ["u"]:
        return None
    if op.operation != "mul" or sorted(targets) != ["e", "u"]:
        return f"'{op.label}' ({op.where}) is not a weighted copy of the source"
    weight = op.operands[targets.index("e")].ref
    if weight.index not in graph.constants:
        return f"'{op.label}' ({op.where}) has edge weights that change with each step"
    if graph.constants[weight.index].numel() != graph.adjacency.num_edges:
        return f"'{op.label}' ({op.where}) has several weights an edge"
    return None


def _require_spmm(graph: OpGraph) -> None:
    reasons = [reason for op in graph.ops if (reason := spmm_reason(graph, op))]
    if reasons:
        raise UserError(
            f"density_adaptive is for sums and means with fixed scalar weights: {reasons[0]}; use kernel=baseline"
        )
    if not any(isinstance(op, Aggregate) for op in graph.ops):
        raise UserError("density_adaptive found no message passing in the model; use kernel=baseline")


class PreparedDensity:
    """A program on density-adaptive kernels; see :class:`runner.kernels.strategy.Prepared`. ``portrait`` is for a picture."""

    name = "density_adaptive"
    draws_by_seed = False
    portrait: Portrait | None

    def __init__(
        self,
        graphs: dict[bool, OpGraph],
        lowered: dict[bool, Executable],
        plans: Plans,
        preprocess_s: dict[str, float],
    ) -> None:
        self._graphs, self._lowered, self.preprocess_s = graphs, lowered, preprocess_s
        # nothing keeps the plans: the kernels that were not chosen go with them
        self._order, self._rank = plans.order, plans.rank
        self.resident_bytes = plans.resident_bytes()
        self.report = plans.report()
        self.rounding = {"fp32": 0.0, "tf32": 2.0**-11, "bf16": 2.0**-8}[plans.unit]

    def __call__(self, features: Tensor, training: bool) -> Tensor:
        return self._lowered[training](features)

    def place(self, rows: Tensor) -> Tensor:
        return rows[self._order]

    def restore(self, rows: Tensor) -> Tensor:
        return rows[self._rank]

    def locate(self, nodes: Tensor) -> Tensor:
        return self._rank[nodes]

    def mask_rows(self, num_rows: int) -> Tensor | None:  # noqa: ARG002
        return None

    def lowered(self) -> tuple[OpGraph, Executable] | None:
        return self._graphs[True], self._lowered[True]

    def _partition_cost(self) -> str:
        report = self.report
        memory = "" if report["partition_bytes"] is None else f", {format_bytes(report['partition_bytes'])}"
        return f"found in {format_seconds(report['partition_s'])}{memory}" + (
            ", kept since" if report["partition_kept"] else ""
        )

    def explain(self) -> str:
        report = self.report
        lines = ["op graph in training:", str(self._graphs[True]), ""]
        lines.append(
            f"{report['num_parts']} communities of {report['mean_part_size']:.1f} nodes, "
            f"{report['intra_fraction']:.1%} of the edges inside, density there {report['intra_density']:.3g}"
            + ("" if report["split"] else "; not split: too few edges inside, or all")
            + (f"; {self._partition_cost()}" if report["partition_s"] else "")
        )
        histogram = report["density_histogram"]
        shares = (f"{at / len(histogram):g}: {count}" for at, count in enumerate(histogram) if count)
        if report["calibration_s"] > _BRIEF_S:
            lines.append(
                f"kernels were compiled and calibrated on this machine, once, in {format_seconds(report['calibration_s'])}"
            )
        lines.append(f"communities by density, from {', from '.join(shares)}")
        for choice in report["choices"]:
            both = " and backward" if choice["is_symmetric"] else ""
            weighted = ", weighted" if choice["weighted"] else ""
            lines.append(f"width {choice['num_features']}, {choice['direction']}{both}{weighted}: {choice['reason']}")
            lines += _times(choice["tried_s"], choice["predicted_s"])
        return "\n".join(lines)


def _working_bytes(graph: OpGraph) -> int:
    """Return the bytes of all values that have a row a node or edge: what a step touches, and caches lose by that."""
    return sum(
        math.prod(value.shape) * value.dtype.itemsize for value in graph.values if value.space in ("node", "edge")
    )


def _times(tried: dict[str, float], predicted: dict[str, float]) -> list[str]:
    """A line a candidate: what it took, what the cost model said, and which were left out for that."""

    def by_time(times: dict[str, float]) -> list[tuple[str, float]]:
        return sorted(times.items(), key=lambda pair: pair[1])

    def of_model(name: str) -> str:
        return f"   ({format_seconds(predicted[name])} predicted)" if name in predicted else ""

    lines = [f"    {name:40} {format_seconds(time_s):>8}{of_model(name)}" for name, time_s in by_time(tried)]
    left_out = {name: time_s for name, time_s in predicted.items() if name not in tried}
    return lines + [f"    {name:40} not timed{of_model(name)}" for name, _ in by_time(left_out)]
