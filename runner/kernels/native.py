"""The strategy ``native``: the op graph as it was captured, each message passing op on a kernel of our own.

Nothing is reordered or fused, so it is also what a model is trained with on a GPU that DGL has no build for.

Legend: N destinations, M sources, E edges, F features, H heads, C channels a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from runner.kernels.dropout import dropout_kernel
from runner.kernels.lower import Executable, Kernel, Resolve, message
from runner.kernels.opgraph import Aggregate, Call, EdgeApply, EdgeSoftmax, Op, Operand, OpGraph
from runner.kernels.ops import edge_softmax, sddmm, spmm
from runner.kernels.ops.checks import DTYPES
from runner.kernels.ops.sddmm import OPERATIONS
from runner.kernels.seeds import is_dropout
from runner.kernels.strategy import OwnOrder, Prepared, Program, Stopwatch


@dataclass(frozen=True)
class Native:
    """The strategy; it has no options."""

    name: str = "native"

    def prepare(self, program: Program) -> Prepared:
        """Capture and lower; kernels are built when they are first used, in verification.

        Raises:
            UserError: where the model can't be captured.
        """
        watch = Stopwatch()
        graphs = {training: watch.measure("capture", partial(program.capture, training)) for training in (True, False)}
        lowered = {training: Executable(graph, lower) for training, graph in graphs.items()}
        return PreparedNative(graphs, lowered, watch.seconds)


class PreparedNative(OwnOrder):
    """A program on native kernels, nodes in their own order; see :class:`runner.kernels.strategy.Prepared`."""

    name = "native"
    resident_bytes = 0

    def __init__(
        self, graphs: dict[bool, OpGraph], lowered: dict[bool, Executable], preprocess_s: dict[str, float]
    ) -> None:
        self._graphs, self._lowered, self.preprocess_s = graphs, lowered, preprocess_s
        self.report: dict[str, Any] = {
            "kernels": [f"{op.label}: {kernel_name(graphs[True], op)}" for op in _message_passing(graphs[True])]
        }

    def __call__(self, features: Tensor, training: bool) -> Tensor:
        return self._lowered[training](features)

    def lowered(self) -> tuple[OpGraph, Executable] | None:
        return self._graphs[True], self._lowered[True]

    def explain(self) -> str:
        return "\n".join(["op graph in training:", str(self._graphs[True]), "", *self.report["kernels"]])


def lower(graph: OpGraph, op: Op) -> Kernel | None:
    """Return an op on kernels of our own; None for what stays plain torch."""
    match op:
        case Call() if is_dropout(op) and graph.adjacency.device.type == "cpu":
            return dropout_kernel(op)
        case EdgeSoftmax() if _is_supported(graph, op):
            return lambda resolve: edge_softmax(graph.adjacency_of(op), resolve(op.logits), op.norm_by)
        case EdgeApply():
            return _lower_sddmm(graph, op)
        case Aggregate() if _is_supported(graph, op):
            return _lower_aggregate(graph, op)
    return None


def kernel_name(graph: OpGraph, op: Op) -> str:
    """Return what an op runs on, for people."""
    if lower(graph, op) is None:
        return "plain torch"
    match op:
        case EdgeSoftmax():
            return "edge_softmax"
        case EdgeApply():
            return "sddmm"
        case Aggregate():
            return "spmm" if _spmm_operands(graph, op) else "a message per edge, then spmm over edges"
    raise AssertionError(f"{op.label} passes no messages")


def _message_passing(graph: OpGraph) -> list[Op]:
    return [op for op in graph.ops if not isinstance(op, Call)]


def _is_supported(graph: OpGraph, op: Op) -> bool:
    return graph.values[op.outputs[0].index].dtype in DTYPES


def _lower_sddmm(graph: OpGraph, op: EdgeApply | Aggregate) -> Kernel | None:
    """An edge value from both ends, where the two are of one shape."""
    sides = {operand.target: operand.ref for operand in op.operands}
    if op.operation not in OPERATIONS or set(sides) != {"u", "v"}:
        return None
    u, v = graph.values[sides["u"].index], graph.values[sides["v"].index]
    if u.shape[1:] != v.shape[1:] or len(u.shape) < 2 or u.dtype != v.dtype or u.dtype not in DTYPES:
        return None
    turns = op.operands[0].target == "v"  # v_sub_u is minus u_sub_v; the others commute

    def run(resolve: Resolve) -> Tensor:
        found = sddmm(graph.adjacency_of(op), resolve(sides["u"]), resolve(sides["v"]), op.operation)
        if op.operation == "dot":
            return found.unsqueeze(-1)  # DGL keeps the dimension that was summed
        return -found if turns and op.operation == "sub" else found

    return run


def _lower_aggregate(graph: OpGraph, op: Aggregate) -> Kernel:
    operands = _spmm_operands(graph, op)
    if operands is not None:
        source, weight = operands
        return lambda resolve: spmm(
            graph.adjacency_of(op),
            _rows(resolve(source.ref)),
            None if weight is None else resolve(weight.ref),
            reduce=op.reduce,
        ).reshape(-1, *graph.values[source.ref.index].shape[1:])
    messages = _lower_sddmm(graph, op) or partial(message, graph, op)

    def run(resolve: Resolve) -> Tensor:
        values = messages(resolve)
        return spmm(graph.adjacency_of(op).incidence, _rows(values), reduce=op.reduce).reshape(-1, *values.shape[1:])

    return run


def _spmm_operands(graph: OpGraph, op: Aggregate) -> tuple[Operand, Operand | None] | None:
    """The source and the weight of a weighted copy of the source that spmm can take; None for other messages."""
    by_target = {operand.target: operand for operand in op.operands}
    if op.operation == "copy" and set(by_target) == {"u"}:
        return by_target["u"], None
    if op.operation != "mul" or set(by_target) != {"u", "e"}:
        return None
    x, weight = graph.values[by_target["u"].ref.index], graph.values[by_target["e"].ref.index]
    trailing = torch.Size(weight.shape[1:])
    is_scalar = trailing.numel() == 1 and len(weight.shape) <= len(x.shape)
    is_per_head = len(x.shape) > 2 and weight.shape[1:2] == x.shape[1:2] and trailing.numel() == x.shape[1]
    fits = is_scalar or (is_per_head and len(weight.shape) == len(x.shape)) or weight.shape[1:] == x.shape[1:]
    return (by_target["u"], by_target["e"]) if fits and weight.dtype == x.dtype else None


def _rows(values: Tensor) -> Tensor:
    """Give values of one number a row a second dimension, which spmm asks for."""
    return values.unsqueeze(1) if values.dim() == 1 else values
