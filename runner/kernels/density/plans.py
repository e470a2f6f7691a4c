"""The renumbered graph, its parts, and the kernel of each op: what ``density_adaptive`` decides for one program.

Legend: N nodes, E edges, F features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Protocol

import torch
from torch import Tensor

from runner.kernels.adjacency import Adjacency
from runner.kernels.density.autograd import SpMMFunction
from runner.kernels.density.calibration import cost_model
from runner.kernels.density.candidates import CPU, Allowed, Candidates, cut
from runner.kernels.density.choices import key_of, recall, remember
from runner.kernels.density.cost import CostModel
from runner.kernels.density.partition import Partition
from runner.kernels.density.portrait import Portrait, portray
from runner.kernels.density.select import Choice, Rule, assemble, choose
from runner.kernels.dropout import dropout_kernel
from runner.kernels.formats import Factory, Part, num_bytes_of
from runner.kernels.lower import Kernel, Resolve
from runner.kernels.opgraph import Aggregate, Call, Op, OpGraph, Ref
from runner.kernels.seeds import is_dropout
from runner.kernels.strategy import Stopwatch, inverse

_NUM_BINS = 10  # of communities by density, from 0 to 1


class PlanOptions(Protocol):
    """The options of the strategy that a plan reads."""

    @property
    def min_intra_fraction(self) -> float: ...
    @property
    def min_gain(self) -> float: ...
    @property
    def selector(self) -> str: ...
    @property
    def num_trials(self) -> int: ...
    @property
    def keep_choices(self) -> bool: ...
    @property
    def matrix_units(self) -> str: ...
    @property
    def atomics(self) -> bool: ...
    @property
    def on_calibration(self) -> Callable[[], None]: ...
    @property
    def replay(self) -> Sequence[dict[str, Any]]: ...


@dataclass(eq=False)
class Matrix:
    """One weighting of the renumbered graph: its candidates and choices in both directions."""

    number: int
    weight: Tensor | None
    forward: Candidates
    backward: Candidates
    is_symmetric: bool
    choices: dict[tuple[int, str], Choice] = field(default_factory=dict)


class Plans:
    """The renumbered graph, its parts, and the kernels chosen so far."""

    def __init__(
        self,
        options: PlanOptions,
        library_kernels: Sequence[Factory],
        adjacency: Adjacency,
        parts: Partition,
        watch: Stopwatch,
        device: torch.device = CPU,
        between_bytes: int = 0,
    ) -> None:
        self.options, self.library_kernels, self.parts, self.watch = options, library_kernels, parts, watch
        self.between_bytes = between_bytes
        self.device, self.allowed = device, Allowed(options.matrix_units, options.atomics)
        self.order, self.rank = parts.order.to(device), inverse(parts.order).to(device)
        self.adjacency: Adjacency = watch.measure("build", lambda: adjacency.permuted(parts.order))
        whole = Part(self.adjacency, self.adjacency.values(None), parts.part_ptr)
        self.num_intra = int(whole.inside.sum())
        edges = torch.bincount(whole.community[self.adjacency.rows][whole.inside], minlength=parts.part_ptr.numel() - 1)
        self.densities = edges / parts.part_ptr.diff().double().square()
        self.intra_fraction = self.num_intra / max(self.adjacency.num_edges, 1)
        self.is_split = self.intra_fraction >= options.min_intra_fraction and self.num_intra < self.adjacency.num_edges
        degree = self.adjacency.in_degrees.clamp(min=1).float()
        self.inverse_degree = (1 / degree).unsqueeze(1).to(device)
        self._matrices: list[Matrix] = []
        self.calibration_s = 0.0  # paid once a machine, not once a graph: in no phase of the preparation

    def constants(self, graph: OpGraph) -> dict[int, Tensor]:
        """The graph's constants, those with a row a node renumbered."""
        return graph.renumbered(self.adjacency, self.order).constants

    def lower(self, graph: OpGraph, op: Op) -> Kernel | None:
        """Return the kernel of an op that this strategy has one for."""
        if isinstance(op, Aggregate):
            return self._lower_spmm(graph, op)
        if is_dropout(op):
            assert isinstance(op, Call)
            if graph.values[op.outputs[0].index].space == "node":
                return dropout_kernel(op, self.rank)
        return None

    def products(self, graph: OpGraph) -> Iterator[tuple[Matrix, int, tuple[str, ...]]]:
        """Yield (matrix, width, directions) of each sum of an op graph, as a training step has them."""
        for op in graph.ops:
            if isinstance(op, Aggregate):
                matrix, width, source = self._product(graph, op)
                yield matrix, width, ("forward", "backward") if source.index in graph.trainable else ("forward",)

    def chosen(self, matrix: Matrix, width: int, direction: str) -> Choice:
        """Return what a product runs on; chosen at the first call."""
        if direction == "backward" and matrix.is_symmetric:
            direction = "forward"  # the transposed matrix is the same one
        if (width, direction) not in matrix.choices:
            matrix.choices[width, direction] = self._select(matrix, width, direction)
        return matrix.choices[width, direction]

    def _product(self, graph: OpGraph, op: Aggregate) -> tuple[Matrix, int, Ref]:
        source = next(operand.ref for operand in op.operands if operand.target == "u")
        weight = next((graph.constants[operand.ref.index] for operand in op.operands if operand.target == "e"), None)
        return self.matrix(weight), math.prod(graph.values[source.index].shape[1:]), source

    def _lower_spmm(self, graph: OpGraph, op: Aggregate) -> Kernel:
        matrix, width, source = self._product(graph, op)
        forward = self.chosen(matrix, width, "forward")
        backward = self.chosen(matrix, width, "backward") if source.index in graph.trainable else None
        scale = self.inverse_degree if op.reduce == "mean" else None

        def run(resolve: Resolve) -> Tensor:
            x = resolve(source)
            flat = x.reshape(x.shape[0], -1)
            y: Tensor = SpMMFunction.apply(flat, forward.run, backward.run if backward else None)
            y = y if scale is None else y * scale
            return y.reshape(y.shape[0], *x.shape[1:])

        return run

    def matrix(self, weight: Tensor | None) -> Matrix:
        """Return the matrix with these weights, float [E] by edge id; None: 1."""
        weight = None if weight is None else weight.cpu()
        if weight is not None and bool((weight == 1).all()):
            weight = None  # ones, as APPNP's undropped edges: the same matrix as an unweighted sum
        known = next((matrix for matrix in self._matrices if _same(matrix.weight, weight)), None)
        if known is None:
            known = self.watch.measure("build", lambda: self._build(weight))
            self._matrices.append(known)
        return known

    def _build(self, weight: Tensor | None) -> Matrix:
        is_symmetric = self.adjacency.is_symmetric(weight)
        forward = self._candidates(self.adjacency, weight)
        backward = forward if is_symmetric else self._candidates(self.adjacency.transposed, weight)
        return Matrix(len(self._matrices), weight, forward, backward, is_symmetric)

    def _candidates(self, adjacency: Adjacency, weight: Tensor | None) -> Candidates:
        values = adjacency.values(weight)
        if self.is_split:
            return cut(adjacency, values, self.parts.part_ptr, self.library_kernels, self.allowed, self.device)
        is_cut = self.intra_fraction >= self.options.min_intra_fraction and self.parts.part_ptr.numel() > 2
        whole = Part(adjacency, values, self.parts.part_ptr if is_cut else None, self.device)
        return Candidates(whole, None, None, self.library_kernels, self.allowed)

    def _select(self, matrix: Matrix, width: int, direction: str) -> Choice:
        candidates = matrix.forward if direction == "forward" else matrix.backward
        for earlier in self.options.replay:
            if (earlier["matrix"], earlier["num_features"], earlier["direction"]) == (matrix.number, width, direction):
                choice = self.watch.measure("build", partial(assemble, candidates, earlier["kernels"]))
                if choice is not None:
                    return choice
        rule = Rule(self.options.selector, self.options.num_trials, self.options.min_gain, self.between_bytes)
        key = (
            self.watch.measure("select", partial(key_of, candidates, width, rule)) if self.options.keep_choices else ""
        )
        known: Choice | None = self.watch.measure("build", partial(recall, key, candidates)) if key else None
        if known is None:
            model = self.cost_model
            known = self.watch.measure("select", partial(choose, candidates, width, rule, model))
            if key:
                remember(key, known)
        return known

    @cached_property
    def cost_model(self) -> CostModel:
        """The model of this machine; measured where it isn't kept."""
        watch = Stopwatch()
        model: CostModel = watch.measure(
            "all", partial(cost_model, self.library_kernels, self.device, self.allowed, self.options.on_calibration)
        )
        self.calibration_s = watch.seconds["all"]
        return model

    def forget_unchosen(self) -> None:
        """Free every kernel that was built and not chosen."""
        for matrix in self._matrices:
            chosen = [kernel for choice in matrix.choices.values() for kernel in choice.kernels]
            for candidates in (matrix.forward, matrix.backward):
                candidates.forget_all_but(chosen)

    def report(self) -> dict[str, Any]:
        """What was found and decided, for the result file."""
        sizes = self.parts.part_ptr.diff().float()
        return {
            "partition_s": self.parts.seconds,
            "partition_bytes": self.parts.peak_bytes,
            "partition_kept": self.parts.is_kept,
            "calibration_s": self.calibration_s,
            "num_parts": int(sizes.numel()),
            "mean_part_size": float(sizes.mean()),
            "intra_fraction": self.intra_fraction,
            "intra_density": self.num_intra / float((sizes * sizes).sum()),
            "density_histogram": torch.histc(self.densities.clamp(max=1), bins=_NUM_BINS, min=0, max=1).long().tolist(),
            "split": self.is_split,
            "choices": self._all_choices(),
        }

    def _all_choices(self) -> list[dict[str, Any]]:
        """A record for each matrix, width and direction."""
        return [
            {
                "matrix": matrix.number,
                "weighted": matrix.weight is not None,
                "num_features": width,
                "direction": direction,
                "is_symmetric": matrix.is_symmetric,
                "kernels": list(choice.names),
                "reason": choice.reason,
                "tried_s": choice.tried,
                "predicted_s": choice.predicted,
            }
            for matrix in self._matrices
            for (width, direction), choice in matrix.choices.items()
        ]

    @property
    def unit(self) -> str:
        """The coarsest that a chosen kernel rounds its factors to: fp32, tf32 or bf16."""
        units = {
            kernel.unit for matrix in self._matrices for choice in matrix.choices.values() for kernel in choice.kernels
        }
        return next((unit for unit in ("bf16", "tf32") if unit in units), "fp32")

    def portrait(self, own_order: Adjacency) -> Portrait:
        """What a picture of this decomposition shows."""
        whole = Part(self.adjacency, self.adjacency.values(None), self.parts.part_ptr)
        chosen = [
            (f"width {width} {direction}" + (" and backward" if matrix.is_symmetric else ""), choice.names)
            for matrix in self._matrices
            for (width, direction), choice in matrix.choices.items()
        ]
        return portray(own_order, whole, self.densities, chosen)

    def resident_bytes(self) -> int:
        """Memory of the order of the nodes and of the chosen kernels, each counted once."""
        chosen = {
            id(kernel): kernel.num_bytes
            for matrix in self._matrices
            for choice in matrix.choices.values()
            for kernel in choice.kernels
        }
        return num_bytes_of(self.order, self.rank, self.inverse_degree) + sum(chosen.values())


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one.flatten(), other.flatten())
