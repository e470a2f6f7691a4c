"""The renumbered graph, its parts, and the kernel of each op: what ``density_adaptive`` decides for one program.

Legend: N nodes, E edges, F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from runner.kernels.adjacency import Adjacency
from runner.kernels.density.autograd import DropoutFunction, SpMMFunction
from runner.kernels.density.formats import Part, num_bytes_of
from runner.kernels.density.partition import Partition
from runner.kernels.density.select import Candidates, Choice, Factory, assemble, choose
from runner.kernels.lower import Kernel, Resolve, dropout_arguments, fill, is_dropout
from runner.kernels.opgraph import Aggregate, Call, Op, OpGraph
from runner.kernels.strategy import Stopwatch, inverse


class PlanOptions(Protocol):
    """The options of the strategy that a plan reads."""

    @property
    def min_intra_fraction(self) -> float: ...
    @property
    def min_gain(self) -> float: ...
    @property
    def num_trials(self) -> int: ...
    @property
    def replay(self) -> Sequence[dict[str, Any]]: ...


@dataclass
class _Matrix:
    """One weighting of the renumbered graph: its candidates and choices in both directions."""

    number: int
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
    ) -> None:
        self.options, self.library_kernels, self.parts, self.watch = options, library_kernels, parts, watch
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
            y: Tensor = SpMMFunction.apply(flat, forward.run, backward.run if backward else None)
            y = y if scale is None else y * scale
            return y.reshape(y.shape[0], *x.shape[1:])

        return run

    def _lower_dropout(self, op: Call) -> Kernel:
        probability, _ = dropout_arguments(op)

        def run(resolve: Resolve) -> Tensor:
            x = fill(op.args, resolve)[0] if op.args else resolve(op.kwargs["input"])
            mask = torch.empty(x.shape, dtype=torch.bool).bernoulli_(1 - probability)
            dropped: Tensor = DropoutFunction.apply(x, mask.index_select(0, self.order), 1 / (1 - probability))
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
        return _Matrix(
            len(self._matrices), forward, forward if is_symmetric else self._candidates(turned, weight), is_symmetric
        )

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
            choice = self.watch.measure("select", lambda: self._select(matrix, width, direction))
            matrix.choices[width, direction] = choice
        return matrix.choices[width, direction]

    def _select(self, matrix: _Matrix, width: int, direction: str) -> Choice:
        candidates = matrix.forward if direction == "forward" else matrix.backward
        for earlier in self.options.replay:
            if (earlier["matrix"], earlier["num_features"], earlier["direction"]) == (matrix.number, width, direction):
                choice = assemble(candidates, earlier["kernels"], self.library_kernels)
                if choice is not None:
                    return choice
        options = self.options
        return choose(candidates, width, options.num_trials, options.min_gain, self.library_kernels)

    def all_choices(self) -> list[dict[str, Any]]:
        """A record for each matrix, width and direction."""
        return [
            {
                "matrix": matrix.number,
                "weighted": key is not None,
                "num_features": width,
                "direction": direction,
                "is_symmetric": matrix.is_symmetric,
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
