"""Op graph → something that runs. Each op becomes one closure; a strategy replaces the closures it has kernels for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from runner.kernels import reference
from runner.kernels.opgraph import Aggregate, Call, EdgeApply, EdgeSoftmax, Op, OpGraph, Ref, replace_leaves
from runner.kernels.rewrite.ops import TypedOp
from runner.kernels.seeds import Seeds

Resolve = Callable[[Ref], Tensor]
Kernel = Callable[[Resolve], Any]
Lowering = Callable[[OpGraph, Op], Kernel | None]
Trace = Callable[[Op, tuple[Tensor, ...]], None]


class Executable:
    """An op graph that can be called: ``features [N, F] -> output``, differentiable like the module it came from.

    Args:
        graph: the op graph.
        lower: returns a strategy's own kernel for an op, or None for plain torch.
        constants: the graph's constants as this strategy wants them (renumbered, say); default: as captured.
        seeds: of the typed dropouts; kernels that compute masks themselves share it.
    """

    def __init__(
        self,
        graph: OpGraph,
        lower: Lowering = lambda _graph, _op: None,
        constants: dict[int, Tensor] | None = None,
        seeds: Seeds | None = None,
    ) -> None:
        self.graph = graph
        self._seeds = Seeds() if seeds is None else seeds
        self._draws = any(isinstance(op, TypedOp) and op.draws for op in graph.ops)
        self._constants = graph.constants if constants is None else constants
        self._steps = [
            (op, lower(graph, op) or plain(graph, op, self._seeds), dead)
            for op, dead in zip(graph.ops, _last_uses(graph), strict=True)
        ]

    def __call__(self, features: Tensor, trace: Trace | None = None) -> Tensor:
        """Run all ops.

        Args:
            features: float [N, F], in this strategy's order of nodes.
            trace: called after each op with its outputs.
        """
        if self._draws:
            self._seeds.draw()
        live: dict[int, Tensor] = {self.graph.features.index: features, **self.graph.leaves, **self._constants}
        for op, kernel, dead in self._steps:
            with nullcontext() if op.grad else torch.no_grad():
                result = kernel(lambda ref: live[ref.index])
            outputs = tuple(result) if len(op.outputs) > 1 else (result,)
            for ref, tensor in zip(op.outputs, outputs, strict=True):
                live[ref.index] = tensor
            if trace is not None:
                trace(op, outputs)
            for index in dead:
                live.pop(index, None)
        return live[self.graph.output.index]


def plain(graph: OpGraph, op: Op, seeds: Seeds | None = None) -> Kernel:
    """Return an op in plain torch; ``seeds`` is for typed dropouts."""
    adjacency = graph.adjacency_of(op)
    match op:
        case Call():
            return lambda resolve: op.function(*fill(op.args, resolve), **fill(op.kwargs, resolve))
        case EdgeSoftmax():
            return lambda resolve: reference.edge_softmax(adjacency, resolve(op.logits), op.norm_by)
        case EdgeApply():
            return lambda resolve: message(graph, op, resolve)
        case Aggregate() if _sums_neighbours(graph, op):
            return lambda resolve: reference.neighbour_sum(adjacency, resolve(op.operands[0].ref), op.reduce)
        case Aggregate():
            return lambda resolve: reference.aggregate(adjacency, message(graph, op, resolve), op.reduce)
        case TypedOp():
            return lambda resolve: op.plain(adjacency, seeds or Seeds(), *map(resolve, op.reads()))
    raise AssertionError(f"{op.label} can't be run")


def _sums_neighbours(graph: OpGraph, op: Aggregate) -> bool:
    """Whether an op is a sum or mean of the sources' rows, which needs no messages: of the features there may be far too many."""
    is_copy = op.operation == "copy" and op.operands[0].target == "u" and op.reduce in ("sum", "mean")
    return is_copy and len(graph.values[op.operands[0].ref.index].shape) == 2 and graph.adjacency_of(op).num_edges > 0


def fill(structure: Any, resolve: Resolve) -> Any:
    """Put tensors in the place of Refs."""
    return replace_leaves(structure, Ref, resolve)


def message(graph: OpGraph, op: EdgeApply | Aggregate, resolve: Resolve) -> Tensor:
    """Return an op's message at each edge, [E, …], in plain torch."""
    sides = [reference.gather(graph.adjacency_of(op), resolve(operand.ref), operand.target) for operand in op.operands]
    return reference.edge_apply(op.operation, sides[0], sides[1] if len(sides) > 1 else None)


def _last_uses(graph: OpGraph) -> list[list[int]]:
    """For each op, the values that nothing reads after it: freed at once, so that memory is what the module itself needs."""
    last: dict[int, int] = {}
    for position, op in enumerate(graph.ops):
        for ref in (*op.outputs, *op.reads()):
            last[ref.index] = position
    kept = {graph.output.index, graph.features.index, *graph.leaves, *graph.constants}
    dead: list[list[int]] = [[] for _ in graph.ops]
    for index, position in last.items():
        if index not in kept:
            dead[position].append(index)
    return dead
