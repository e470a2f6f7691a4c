"""Captured torch calls → typed ops, where their meaning is known; everything else stays the call that it was, a barrier to rewrites.

Only values with a row a node or edge are typed: what is computed from weights alone is small, and stays as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from runner.kernels.opgraph import Aggregate, Call, EdgeApply, EdgeSoftmax, Op, OpGraph, Ref
from runner.kernels.rewrite.draft import Draft, reading
from runner.kernels.rewrite.ops import Binary, Concat, Drop, Dropout, Linear, Map, Total, TypedLinear, TypedOp, View
from runner.kernels.seeds import dropout_arguments, is_dropout

Typing = Callable[["_Reader"], TypedOp | Ref | None]


def canonical(graph: OpGraph) -> Draft:
    """Return a draft of an op graph in typed ops; calls that change nothing are gone, dropouts are numbered."""
    draft = Draft(dataclasses.replace(graph, values=_with_edges(graph)))
    aliases: dict[int, Ref] = {}
    ops: list[Op] = []
    num_dropouts = 0
    for op in graph.ops:
        op = reading(op, aliases)
        found: TypedOp | Ref | None = None
        if isinstance(op, Call) and is_dropout(op):
            found = _Reader(draft, op).dropout(num_dropouts)
            num_dropouts += 1
        elif isinstance(op, Call) and op.grad and len(op.outputs) == 1:
            found = _Reader(draft, op).typed()
        if isinstance(found, Ref):
            aliases[op.outputs[0].index] = found
        else:
            ops.append(op if found is None else found)
    draft.ops = ops
    draft.output = aliases.get(graph.output.index, graph.output)
    draft.prune()
    return draft


def _with_edges(graph: OpGraph) -> list[Any]:
    """Return the values, those that have a row an edge because they are read so marked as such: capture can't see it of a constant that a
    model is given."""
    values, num_edges = list(graph.values), graph.num_edges

    def mark(ref: Ref) -> bool:
        value = values[ref.index]
        if value.space != "dense" or not value.shape or value.shape[0] not in num_edges:
            return False
        values[ref.index] = dataclasses.replace(value, space="edge")
        return True

    def pending(op: Op) -> list[Ref]:
        if isinstance(op, EdgeApply | Aggregate):
            return [operand.ref for operand in op.operands if operand.target == "e"]
        if isinstance(op, EdgeSoftmax):
            return [op.logits]
        is_edge = isinstance(op, Call) and values[op.outputs[0].index].space == "edge"
        return [ref for ref in op.reads() if ref.index not in graph.leaves] if is_edge and op.label in _BY_ROW else []

    for op in reversed(graph.ops):
        for ref in pending(op):
            mark(ref)
    return values


class _Reader:
    """Reads one call."""

    def __init__(self, draft: Draft, call: Call) -> None:
        self.draft, self.call, self.args = draft, call, call.args
        self.output = call.outputs[0]
        self.value = draft.value(self.output)

    def typed(self) -> TypedOp | Ref | None:
        """The typed op that the call is, the value that it merely passes on, or None."""
        if self.value.space == "dense" or not self.value.dtype.is_floating_point or not self.args:
            return None
        read = _TYPED.get(self.call.label)
        return None if read is None else read(self)

    @property
    def common(self) -> dict[str, Any]:
        return {"output": self.output, "where": self.call.where, "grad": self.call.grad}

    def ref(self, at: int) -> Ref | None:
        """The value that an argument is, where it is one."""
        return self.args[at] if len(self.args) > at and isinstance(self.args[at], Ref) else None

    def number(self, at: int) -> float | None:
        """The number that an argument is, where it is one."""
        given = self.args[at] if len(self.args) > at else None
        return float(given) if isinstance(given, int | float) and not isinstance(given, bool) else None

    def option(self, at: int, name: str, default: Any) -> Any:
        return self.args[at] if len(self.args) > at else self.call.kwargs.get(name, default)

    def shape(self, ref: Ref) -> tuple[int, ...]:
        return self.draft.value(ref).shape

    def is_rows(self, ref: Ref) -> bool:
        """Whether a value has the output's rows."""
        value = self.draft.value(ref)
        return value.space == self.value.space and value.shape[:1] == self.value.shape[:1]

    def same(self) -> Ref | None:
        """The first argument, for calls that change nothing."""
        x = self.ref(0)
        value = None if x is None else self.draft.value(x)
        is_same = value is not None and (value.shape, value.dtype) == (self.value.shape, self.value.dtype)
        return x if is_same else None

    def dropout(self, number: int) -> TypedOp | None:
        """A dropout of any value; what is no value of rows stays a call."""
        x = self.ref(0) or self.call.kwargs.get("input")
        if not isinstance(x, Ref) or not self.value.shape:
            return None
        probability, _ = dropout_arguments(self.call)
        return Dropout(**self.common, x=x, drop=Drop(probability, number))

    def inactive_dropout(self) -> Ref | None:
        probability, training = dropout_arguments(self.call)
        return self.same() if not training or probability == 0 else None

    def linear(self) -> TypedOp | None:
        x, weight = self.ref(0), self.ref(1)
        bias = self.option(2, "bias", None)
        if x is None or weight is None or not self.is_rows(x) or self.draft.value(weight).space != "dense":
            return None
        if len(self.shape(x)) != 2 or len(self.shape(weight)) != 2:
            return None
        return Linear(**self.common, x=x, weight=weight, bias=bias, is_turned=True)

    def matmul(self) -> TypedOp | None:
        found = self.linear() if len(self.args) == 2 else None
        return dataclasses.replace(found, is_turned=False) if isinstance(found, Linear) else None

    def typed_linear(self) -> TypedOp | None:
        x, weight, types = self.ref(0), self.ref(1), self.ref(2)
        if x is None or weight is None or types is None:
            return None
        return TypedLinear(**self.common, x=x, weight=weight, types=types)

    def view(self) -> TypedOp | Ref | None:
        x = self.ref(0)
        if x is None or not self.is_rows(x):
            return None
        return x if self.shape(x) == self.value.shape else View(**self.common, x=x, shape=self.value.shape[1:])

    def total(self) -> TypedOp | None:
        x, dims = self.ref(0), self.option(1, "dim", None)
        keeps = bool(self.option(2, "keepdim", False))
        if x is None or not self.is_rows(x) or dims is None or "dtype" in self.call.kwargs:
            return None
        rank = len(self.shape(x))
        found = tuple(sorted(dim % rank for dim in (dims if isinstance(dims, list | tuple) else [dims])))
        if 0 in found or len(self.args) > 3:
            return None
        return Total(**self.common, x=x, dims=found, keeps_dims=keeps, is_mean=self.call.label == "mean")

    def concat(self) -> TypedOp | None:
        parts, dim = self.args[0], self.option(1, "dim", 0)
        is_flat = len(self.value.shape) == 2 and isinstance(parts, list | tuple)
        if not is_flat or dim not in (1, -1) or not all(isinstance(part, Ref) and self.is_rows(part) for part in parts):
            return None
        return Concat(**self.common, parts=tuple(parts))

    def map(self, function: str, *arguments: float) -> TypedOp | None:
        x = self.ref(0)
        if x is None or self.shape(x) != self.value.shape:
            return None
        return Map(**self.common, x=x, function=function, arguments=arguments)

    def activation(self, option: str, default: float) -> TypedOp | None:
        argument = self.option(1, option, default)
        return self.map(self.call.label.rstrip("_"), float(argument)) if isinstance(argument, int | float) else None

    def softplus(self) -> TypedOp | None:
        is_usual = self.option(1, "beta", 1) == 1 and self.option(2, "threshold", 20) == 20
        return self.map("softplus") if is_usual else None

    def power(self) -> TypedOp | None:
        return self.map("square") if self.number(1) == 2 else None

    def binary(self, operation: str, is_turned: bool = False) -> TypedOp | None:
        if self.call.kwargs or len(self.args) != 2:
            return None
        a, b = self.args[::-1] if is_turned else self.args
        if isinstance(a, Ref) and isinstance(b, Ref):
            fits = all(self._broadcasts(ref) for ref in (a, b))
            return Binary(**self.common, operation=operation, a=a, b=b) if fits else None
        return self._with_number(operation, a, b)

    def _broadcasts(self, ref: Ref) -> bool:
        """Whether a value has the output's rows, or none."""
        shape, rank = self.shape(ref), len(self.value.shape)
        if not self.draft.value(ref).dtype.is_floating_point:
            return False
        return (self.is_rows(ref) and len(shape) == rank) or len(shape) < rank or shape[0] == 1

    def _with_number(self, operation: str, a: Any, b: Any) -> TypedOp | None:
        x, number = (a, b) if isinstance(a, Ref) else (b, a)
        if not isinstance(x, Ref) or not isinstance(number, int | float) or self.shape(x) != self.value.shape:
            return None
        match operation, x is a:
            case "add", _:
                function, argument = "shift", float(number)
            case "sub", True:
                function, argument = "shift", -float(number)
            case "mul", _:
                function, argument = "scale", float(number)
            case "div", True if number:
                function, argument = "scale", 1 / float(number)
            case _:
                return None
        return Map(**self.common, x=x, function=function, arguments=(argument,))


def _simple(name: str) -> Typing:
    return lambda reader: reader.map(name)


def _binary(operation: str) -> Typing:
    return lambda reader: reader.binary(operation)


_TYPED: dict[str, Typing] = {
    "linear": _Reader.linear,
    **dict.fromkeys(("matmul", "mm", "__matmul__"), _Reader.matmul),
    "typed_linear": _Reader.typed_linear,
    **dict.fromkeys(("view", "reshape", "flatten", "unsqueeze", "squeeze", "view_as", "reshape_as"), _Reader.view),
    **dict.fromkeys(("contiguous", "to", "float", "type_as", "identity"), _Reader.same),
    **dict.fromkeys(("sum", "mean"), _Reader.total),
    **dict.fromkeys(("cat", "concat", "concatenate"), _Reader.concat),
    "dropout": _Reader.inactive_dropout,
    **{name + mark: _simple(name) for name in ("relu", "tanh", "sigmoid", "exp", "log", "log1p", "sqrt", "abs", "neg", "square")
       for mark in ("", "_")},
    **dict.fromkeys(("leaky_relu", "leaky_relu_"), lambda reader: reader.activation("negative_slope", 0.01)),
    **dict.fromkeys(("elu", "elu_"), lambda reader: reader.activation("alpha", 1.0)),
    "silu": _simple("silu"),
    "softplus": _Reader.softplus,
    **dict.fromkeys(("pow", "__pow__", "pow_"), _Reader.power),
    **{name: _binary(operation)
       for operation in ("add", "sub", "mul", "div")
       for name in (operation, f"{operation}_", f"__{operation}__", f"__i{operation}__")},
    **dict.fromkeys(("true_divide", "__truediv__", "__itruediv__"), lambda reader: reader.binary("div")),
    "__radd__": lambda reader: reader.binary("add"),
    "__rmul__": lambda reader: reader.binary("mul"),
    **dict.fromkeys(("__rsub__", "rsub"), lambda reader: reader.binary("sub", is_turned=True)),
}  # fmt: skip
# calls whose result's rows are their first argument's, so that they tell of it what its rows are
_BY_ROW = frozenset(_TYPED) - {"mm", "__matmul__"} | {"batch_norm", "layer_norm"}
