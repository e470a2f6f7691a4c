"""The strategy ``density_adaptive``: every sum and mean over neighbours runs on kernels chosen by the density of each part.

Nodes are renumbered once so that communities are contiguous; edges then fall inside diagonal blocks (intra) or outside (inter),
and intra + inter is the whole matrix. For each matrix, width and direction the fastest of several kernels is taken, for the
whole or for the two parts. Dropout masks are drawn in the graph's own order, so that a seed means the same masks as in baseline.

Legend: N nodes, E edges, F features.
Source: AdaptGear (arXiv 2305.17408), whose idea this is; the selection rule is our own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from runner.errors import UserError
from runner.kernels.adjacency import Adjacency
from runner.kernels.density.formats import Part, SpMM, num_bytes_of
from runner.kernels.density.partition import Partition, partition
from runner.kernels.density.select import Candidates, Choice, choose
from runner.kernels.lower import Executable, Kernel, Resolve, dropout_arguments, fill, is_dropout
from runner.kernels.opgraph import Aggregate, Call, Op, OpGraph
from runner.kernels.strategy import Prepared, Program, Stopwatch, inverse
from runner.units import format_seconds


@dataclass(frozen=True, kw_only=True)
class DensityAdaptive:
    """Options of the strategy; see ``conf/kernel`` for their meaning."""

    partition: str = "metis"
    block_size: int = 64
    min_intra_fraction: float = 0.1
    min_gain: float = 0.03
    num_trials: int = 7
    name: str = "density_adaptive"

    def prepare(self, program: Program) -> Prepared:
        """Capture, partition, build and choose.

        Raises:
            UserError: where the model has no sum or mean with fixed scalar weights, or has message passing of another kind.
        """
        watch = Stopwatch()
        adjacency: Adjacency = watch.measure("build", program.adjacency)
        graphs = {training: watch.measure("capture", partial(program.capture, training)) for training in (True, False)}
        for graph in graphs.values():
            _require_spmm(graph)
        parts: Partition = watch.measure("partition", lambda: partition(adjacency, self.partition, self.block_size))
        plans = _Plans(self, program, adjacency, parts, watch)
        lowered = {
            training: Executable(graph, plans.lower, plans.constants(graph)) for training, graph in graphs.items()
        }
        plans.release()
        return PreparedDensity(graphs, lowered, plans, watch.seconds)


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


@dataclass
class _Matrix:
    """One weighting of the renumbered graph: its candidates and choices in both directions."""

    forward: Candidates
    backward: Candidates
    is_symmetric: bool
    choices: dict[tuple[int, str], Choice] = field(default_factory=dict)


class _Plans:
    """The renumbered graph, its parts, and the kernels chosen so far."""

    def __init__(
        self, options: DensityAdaptive, program: Program, adjacency: Adjacency, parts: Partition, watch: Stopwatch
    ) -> None:
        self.options, self.program, self.parts, self.watch = options, program, parts, watch
        self.order, self.rank = parts.order, inverse(parts.order)
        self.adjacency: Adjacency = watch.measure("build", lambda: adjacency.permuted(parts.order))
        block = parts.part_of_row
        inside = block[self.adjacency.rows] == block[self.adjacency.indices]
        self.num_intra = int(inside.sum())
        self.intra_fraction = self.num_intra / max(inside.numel(), 1)
        self.is_split = self.intra_fraction >= options.min_intra_fraction and not bool(inside.all())
        degree = self.adjacency.in_degrees.clamp(min=1).float()
        self.inverse_degree = (1 / degree).unsqueeze(1)
        self._matrices: dict[int | None, _Matrix] = {}
        self._weights: list[Tensor] = []

    def constants(self, graph: OpGraph) -> dict[int, Tensor]:
        """The graph's constants, those with a row a node renumbered."""
        return {
            index: tensor[self.order] if graph.values[index].space == "node" else tensor
            for index, tensor in graph.constants.items()
        }

    def lower(self, graph: OpGraph, op: Op) -> Kernel | None:
        """Return the kernel of an op that this strategy has one for."""
        if isinstance(op, Aggregate):
            return self._lower_spmm(graph, op)
        if is_dropout(op):
            assert isinstance(op, Call)
            if graph.values[op.outputs[0].index].space == "node":
                return self._lower_dropout(op)
        return None

    def _lower_spmm(self, graph: OpGraph, op: Aggregate) -> Kernel:
        source = next(operand.ref for operand in op.operands if operand.target == "u")
        weight = next((graph.constants[operand.ref.index] for operand in op.operands if operand.target == "e"), None)
        shape = graph.values[source.index].shape
        width = 1
        for size in shape[1:]:
            width *= size
        matrix = self._matrix(weight)
        forward = self._choose(matrix, width, "forward")
        backward = self._choose(matrix, width, "backward") if source.index in graph.trainable else None
        scale = self.inverse_degree if op.reduce == "mean" else None

        def run(resolve: Resolve) -> Tensor:
            x = resolve(source)
            flat = x.reshape(x.shape[0], -1)
            y: Tensor = _SpMM.apply(flat, forward.run, backward.run if backward else None)
            y = y if scale is None else y * scale
            return y.reshape(y.shape[0], *x.shape[1:])

        return run

    def _lower_dropout(self, op: Call) -> Kernel:
        probability, _ = dropout_arguments(op)

        def run(resolve: Resolve) -> Tensor:
            x = fill(op.args, resolve)[0] if op.args else resolve(op.kwargs["input"])
            mask = torch.empty(x.shape, dtype=torch.bool).bernoulli_(1 - probability)
            dropped: Tensor = _Dropout.apply(x, mask.index_select(0, self.order), 1 / (1 - probability))
            return dropped

        return run

    def _matrix(self, weight: Tensor | None) -> _Matrix:
        if weight is not None and bool((weight == 1).all()):
            weight = None  # ones, as APPNP's undropped edges: the same matrix as an unweighted sum
        for known, kept in enumerate(self._weights):
            if weight is not None and torch.equal(kept.flatten(), weight.flatten()):
                return self._matrices[known]
        key = None if weight is None else len(self._weights)
        if key is not None:
            assert weight is not None
            self._weights.append(weight)
        if key not in self._matrices:
            self._matrices[key] = self.watch.measure("build", lambda: self._build(weight))
        return self._matrices[key]

    def _build(self, weight: Tensor | None) -> _Matrix:
        turned = self.adjacency.transposed
        is_symmetric = self.adjacency.is_symmetric(weight)
        forward = self._candidates(self.adjacency, weight)
        return _Matrix(forward, forward if is_symmetric else self._candidates(turned, weight), is_symmetric)

    def _candidates(self, adjacency: Adjacency, weight: Tensor | None) -> Candidates:
        whole = Part(adjacency, adjacency.values(weight))
        if not self.is_split:
            return Candidates(whole, None, None)
        block = self.parts.part_of_row
        inside = block[adjacency.rows] == block[adjacency.indices]
        intra, inter = adjacency.select(inside), adjacency.select(~inside)
        assert intra.num_edges + inter.num_edges == adjacency.num_edges
        return Candidates(
            whole, Part(intra, intra.values(weight), self.parts.part_ptr), Part(inter, inter.values(weight))
        )

    def _choose(self, matrix: _Matrix, width: int, direction: str) -> Choice:
        if direction == "backward" and matrix.is_symmetric:
            direction = "forward"  # the transposed matrix is the same one
        if (width, direction) not in matrix.choices:
            candidates = matrix.forward if direction == "forward" else matrix.backward
            options = self.options
            matrix.choices[width, direction] = self.watch.measure(
                "select",
                lambda: choose(candidates, width, options.num_trials, options.min_gain, self.program.library_kernels),
            )
        return matrix.choices[width, direction]

    def all_choices(self) -> list[dict[str, Any]]:
        """A record for each matrix, width and direction."""
        return [
            {
                "weighted": key is not None,
                "num_features": width,
                "direction": direction + (" (symmetric: both)" if matrix.is_symmetric else ""),
                "kernels": list(choice.names),
                "reason": choice.reason,
                "tried_s": choice.tried,
            }
            for key, matrix in self._matrices.items()
            for (width, direction), choice in matrix.choices.items()
        ]

    def release(self) -> None:
        """Let go of the kernels that were not chosen, and of the parts that only they need."""
        for matrix in self._matrices.values():
            for candidates in (matrix.forward, matrix.backward):
                candidates.kernels.clear()
            matrix.forward = matrix.backward = _nothing()

    def resident_bytes(self) -> int:
        """Memory of the order of the nodes and of the chosen kernels, each counted once."""
        chosen = {
            id(kernel): kernel.num_bytes
            for matrix in self._matrices.values()
            for choice in matrix.choices.values()
            for kernel in choice.kernels
        }
        return num_bytes_of(self.order, self.rank, self.inverse_degree) + sum(chosen.values())


def _nothing() -> Candidates:
    empty = torch.empty(0, dtype=torch.int64)
    return Candidates(Part(Adjacency(torch.zeros(1, dtype=torch.int64), empty, empty, 0), torch.empty(0)), None, None)


class _SpMM(torch.autograd.Function):
    """``Y = A X`` with ``dX = Aᵀ dY``, each on the kernel chosen for it."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, run: SpMM, run_transposed: SpMM | None) -> Tensor:
        ctx.run_transposed = run_transposed  # type: ignore[attr-defined]
        return run(x.detach().contiguous())

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor | None, None, None]:
        if not ctx.needs_input_grad[0]:  # type: ignore[attr-defined]
            return None, None, None
        run = ctx.run_transposed  # type: ignore[attr-defined]
        assert run is not None, "a gradient reached features that no parameter precedes"
        return run(gradients[0].contiguous()), None, None


class _Dropout(torch.autograd.Function):
    """``x · mask · scale``; keeps the mask as bool, a quarter of the floats that torch's dropout keeps."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, mask: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.scale = scale  # type: ignore[attr-defined]
        return (x * mask).mul_(scale)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor | None, None, None]:
        if not ctx.needs_input_grad[0]:  # type: ignore[attr-defined]
            return None, None, None
        (mask,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return (gradients[0] * mask).mul_(ctx.scale), None, None  # type: ignore[attr-defined]


class PreparedDensity:
    """A program on density-adaptive kernels; see :class:`runner.kernels.strategy.Prepared`."""

    name = "density_adaptive"

    def __init__(
        self,
        graphs: dict[bool, OpGraph],
        lowered: dict[bool, Executable],
        plans: _Plans,
        preprocess_s: dict[str, float],
    ) -> None:
        self._graphs, self._lowered, self._plans, self.preprocess_s = graphs, lowered, plans, preprocess_s
        self.resident_bytes = plans.resident_bytes()
        sizes = plans.parts.part_ptr.diff().float()
        self.report: dict[str, Any] = {
            "num_parts": int(sizes.numel()),
            "mean_part_size": float(sizes.mean()),
            "intra_fraction": plans.intra_fraction,
            "intra_density": plans.num_intra / float((sizes * sizes).sum()),
            "split": plans.is_split,
            "choices": plans.all_choices(),
        }

    def __call__(self, features: Tensor, training: bool) -> Tensor:
        return self._lowered[training](features)

    def place(self, rows: Tensor) -> Tensor:
        return rows[self._plans.order]

    def restore(self, rows: Tensor) -> Tensor:
        return rows[self._plans.rank]

    def locate(self, nodes: Tensor) -> Tensor:
        return self._plans.rank[nodes]

    def lowered(self) -> tuple[OpGraph, Executable] | None:
        return self._graphs[True], self._lowered[True]

    def explain(self) -> str:
        report = self.report
        lines = ["op graph in training:", str(self._graphs[True]), ""]
        lines.append(
            f"{report['num_parts']} communities of {report['mean_part_size']:.1f} nodes, "
            f"{report['intra_fraction']:.1%} of the edges inside, density there {report['intra_density']:.3g}"
            + ("" if report["split"] else "; not split: too few edges inside, or all")
        )
        for choice in report["choices"]:
            lines.append(
                f"width {choice['num_features']}, {choice['direction']}{', weighted' if choice['weighted'] else ''}: {choice['reason']}"
            )
            lines += [
                f"    {name:32} {format_seconds(seconds)}"
                for name, seconds in sorted(choice["tried_s"].items(), key=lambda pair: pair[1])
            ]
        return "\n".join(lines)
