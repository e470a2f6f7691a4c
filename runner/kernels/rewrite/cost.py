"""What an op costs, by a roofline: the larger of operations over peak and bytes over bandwidth. It ranks plans; measurement decides.

Legend: N nodes, E edges, F features, H heads, C channels a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from runner.kernels.opgraph import Aggregate, EdgeApply, EdgeSoftmax, Op, Ref
from runner.kernels.rewrite.draft import Draft
from runner.kernels.rewrite.made import Attend, GraphLinear, Propagate, SparseProduct
from runner.kernels.rewrite.ops import Linear, View

Stored = Callable[[Draft, Ref], float]  # how many entries of a fixed value aren't 0


@dataclass(frozen=True)
class Machine:
    """Peaks of a device, measured; the default is of 2 cores of an AMD EPYC with AVX-512.

    Attributes:
        flops_per_s: of a matrix product.
        bytes_per_s: of a copy, read and written.
        gathered_bytes_per_s: of rows gathered by a sum over edges.
        op_s: an op's own time, however small its operands.
    """

    flops_per_s: float = 1.2e11
    bytes_per_s: float = 3e10
    gathered_bytes_per_s: float = 6e10
    op_s: float = 1.5e-5


def seconds(draft: Draft, machine: Machine, stored: Stored, training: bool) -> float:
    """Return the predicted seconds of a step (training: forward and backward), of all ops but the prologue's."""
    return sum(op_seconds(draft, op, machine, stored, training) for op in draft.ops)


def op_seconds(draft: Draft, op: Op, machine: Machine, stored: Stored, training: bool) -> float:
    """Return the predicted seconds of an op, with its backward where a gradient passes."""
    output = draft.value(op.outputs[0])
    if output.space == "dense":
        return machine.op_s
    grads = [ref for ref in op.reads() if draft.is_trainable(ref)] if training else []
    passes = 1 + len(grads)
    match op:
        case Linear():
            return machine.op_s + passes * _product_s(draft, op, machine)
        case GraphLinear():
            return machine.op_s + _graph_linear_s(draft, op, machine, len(grads))
        case SparseProduct():
            entries = stored(draft, op.x) * (1 + (0.5 if op.input_drop else 0))
            gathered = entries * (output.shape[1] * output.dtype.itemsize + 4) / machine.gathered_bytes_per_s
            return machine.op_s + (2 if training else 1) * (
                gathered + _bytes(draft, op.outputs[0]) / machine.bytes_per_s
            )
        case Propagate():
            return machine.op_s + passes * _gather_s(draft, op, machine, 1)
        case Attend():
            return machine.op_s + _gather_s(draft, op, machine, 2 + (4 if grads else 0))
        case View():
            return machine.op_s / 3
    moved = sum(_bytes(draft, ref) for ref in {*op.reads(), *op.outputs})
    if isinstance(op, Aggregate | EdgeApply | EdgeSoftmax):
        moved += _edge_bytes(draft, op)
    return machine.op_s + (2.0 if grads else 1.0) * moved / machine.bytes_per_s


def _product_s(draft: Draft, op: Linear, machine: Machine) -> float:
    rows, width = math.prod(draft.value(op.output).shape[:-1]), draft.value(op.output).shape[-1]
    depth = draft.value(op.x).shape[-1]
    moved = sum(_bytes(draft, ref) for ref in (op.x, op.weight, op.output))
    return max(2.0 * rows * depth * width / machine.flops_per_s, moved / machine.bytes_per_s)


def _graph_linear_s(draft: Draft, op: GraphLinear, machine: Machine, num_grads: int) -> float:
    """Products and propagations of both directions, each at the width that its order has; A x once more where a backward needs it anew."""
    nodes, depth, width = *draft.value(op.x).shape, draft.value(op.output).shape[1]
    widths = {"propagate first": depth, "transform first": width}
    product = max(
        2.0 * nodes * depth * width / machine.flops_per_s, 4.0 * nodes * (depth + width) / machine.bytes_per_s
    )

    def propagation(columns: int) -> float:
        gathered = draft.graph.adjacency_of(op).num_edges * (4.0 * columns + 4) / machine.gathered_bytes_per_s
        return gathered + 4.0 * nodes * columns / machine.bytes_per_s

    seconds = product * (1 + num_grads) + propagation(widths[op.order])
    if num_grads:
        seconds += propagation(widths[op.back])
        needs_anew = op.back == "propagate first" and op.order != "propagate first"
        seconds += propagation(depth) if needs_anew else 0.0
    return seconds


def _gather_s(draft: Draft, op: Propagate | Attend, machine: Machine, times: float) -> float:
    value = draft.value(op.output)
    width = math.prod(value.shape[1:]) * value.dtype.itemsize
    gathered = draft.graph.adjacency_of(op).num_edges * (width + 4)
    return times * (gathered / machine.gathered_bytes_per_s + _bytes(draft, op.output) / machine.bytes_per_s)


def _edge_bytes(draft: Draft, op: Aggregate | EdgeApply | EdgeSoftmax) -> float:
    sizes = [math.prod(draft.value(ref).shape[1:]) for ref in (*op.reads(), *op.outputs)]
    return draft.graph.adjacency_of(op).num_edges * max(sizes) * 4.0 * (2 if isinstance(op, Aggregate) else 1)


def _bytes(draft: Draft, ref: Ref) -> float:
    value = draft.value(ref)
    return math.prod(value.shape) * value.dtype.itemsize
