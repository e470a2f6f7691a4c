"""Gather, apply, scatter: what a generated kernel computes, read off the ops of a draft.

``out[i] = reduce over edges j → i of message``, the message a formula of rows of the source (u), of the destination (v), of the edge (e)
and of weights. Ops whose value only the message needs are taken in; everything else is an operand.

Legend: E edges, K leading dimensions of a message, C channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from runner.kernels.generate import expressions
from runner.kernels.generate.expressions import Formula, apply, constant, operand
from runner.kernels.opgraph import Aggregate, EdgeApply, Op, Ref
from runner.kernels.rewrite.draft import Draft
from runner.kernels.rewrite.made import Propagate
from runner.kernels.rewrite.ops import Binary, Linear, Map, Total, View

_MOST_SMALL = 64  # elements of a small value, or of a small layer's weights: each is a variable of its own
_BINARY = ("add", "sub", "mul", "div")
Array = np.ndarray[Any, Any]  # of formulas, in the shape of a value's row; a wide one has 1 in the place of C


class NotACaseError(Exception):
    """What keeps a chain of ops from being one kernel."""


@dataclass(frozen=True)
class Slot:
    """An operand.

    Attributes:
        ref: the value.
        target: where it is read: u, v, e, or w for a weight, the same for all edges.
        width: elements of a row (of a weight: all).
        needs_gradient: whether a gradient flows to it.
    """

    ref: Ref
    target: str
    width: int
    needs_gradient: bool


@dataclass(frozen=True)
class Description:
    """A kernel to be generated.

    Attributes:
        slots: the operands.
        message: formulas of the result's rows, wide, one for each leading index.
        channels: C.
        is_mean: a mean over edges, not a sum.
    """

    slots: tuple[Slot, ...]
    message: tuple[Formula, ...]
    channels: int
    is_mean: bool


@dataclass
class Reading:
    """The ops that a kernel takes in, and its operands so far; ``private`` are the values that nothing else needs."""

    draft: Draft
    root: Op
    private: set[int]
    slots: list[Slot] = field(default_factory=list)
    inner: list[Op] = field(default_factory=list)
    made: dict[tuple[Any, ...], Array] = field(default_factory=dict)


def describe(draft: Draft, root: Op, heads: Total | None) -> tuple[Description, list[Op]]:
    """Read a chain that ends in a sum or mean; returns what the kernel is and the ops that it takes in.

    Args:
        draft: the graph.
        root: a :class:`Propagate` or :class:`Aggregate`.
        heads: the sum over a message's leading dimension that follows it, or None.

    Raises:
        NotACaseError: where the chain is not one that a kernel is generated for; says why.
    """
    reading = Reading(draft, root, _private(draft, root))
    message = _message(reading)
    channels = draft.value(root.outputs[0]).shape[-1]
    if heads is not None:
        message = np.add.reduce(_adding(message), axis=0)
    flat = tuple(_unwrapped(entry) for entry in message.reshape(-1))
    if not all(entry.is_wide for entry in flat):
        raise NotACaseError("its message has no channels to walk")
    reduce = root.reduce if isinstance(root, Propagate | Aggregate) else ""
    return Description(tuple(reading.slots), flat, channels, reduce == "mean"), reading.inner


def _private(draft: Draft, root: Op) -> set[int]:
    """Numbers of the edge values that only this chain reads."""
    inside, found = {id(root)}, set[int]()
    for op in reversed(draft.ops):
        output = op.outputs[0]
        is_edge = len(op.outputs) == 1 and op.grad and draft.value(output).space == "edge" and output != draft.output
        if is_edge and draft.readers(output) and all(id(reader) in inside for reader in draft.readers(output)):
            inside.add(id(op))
            found.add(output.index)
    return found


def _message(reading: Reading) -> Array:
    root, draft = reading.root, reading.draft
    shape = draft.value(root.outputs[0]).shape[1:]
    if len(shape) > 2 or not shape:
        raise NotACaseError(f"its messages have {len(shape)} dimensions")
    if isinstance(root, Propagate):
        if (
            root.reduce not in ("sum", "mean")
            or root.weight is None
            or not root.is_bare
            or root.row_scale
            or root.col_scale
        ):
            raise NotACaseError("it is no plain sum or mean of weighted rows")
        x = _operand(reading, root.x, "u", True)
        return _apply("mul", x, _value(reading, root.weight, _is_wide(draft, root.weight, shape)))
    assert isinstance(root, Aggregate)
    if root.reduce not in ("sum", "mean") or root.operation not in (*_BINARY, "copy"):
        raise NotACaseError(f"{root.label} is no sum or mean of products, sums or copies")
    sides = []
    for side in root.operands:
        is_wide = _is_wide(draft, side.ref, shape)
        read = (
            _value(reading, side.ref, is_wide)
            if side.target == "e"
            else _operand(reading, side.ref, side.target, is_wide)
        )
        sides.append(read)
    return sides[0] if root.operation == "copy" else _apply(root.operation, *sides)


def _is_wide(draft: Draft, ref: Ref, shape: Sequence[int]) -> bool:
    """Whether a value has the message's channels, not one number in their place."""
    own = draft.value(ref).shape[1:]
    return (bool(own) and len(own) == len(shape) and own[-1] == shape[-1] and shape[-1] > 1) or (
        shape[-1] == 1 and len(own) == len(shape)
    )


def _value(reading: Reading, ref: Ref, is_wide: bool) -> Array:
    """The formulas of an edge value: through the op that makes it where only this kernel needs that, else an operand."""
    draft, op = reading.draft, reading.draft.producer(ref)
    key = ("value", ref.index, is_wide)
    if key in reading.made:
        return reading.made[key]
    found = None
    if op is not None and ref.index in reading.private:
        num_slots, num_inner = len(reading.slots), len(reading.inner)
        try:
            reading.inner.append(op)
            found = _formulas(reading, op, is_wide)
        except NotACaseError:
            del reading.slots[num_slots:], reading.inner[num_inner:]
            reading.made.clear()
    if found is None:
        space = draft.value(ref).space
        if space == "node":
            raise NotACaseError("a node's value stands where an edge's is expected")
        found = _operand(reading, ref, "e" if space == "edge" else "w", is_wide)
    reading.made[key] = found
    return found


def _formulas(reading: Reading, op: Op, is_wide: bool) -> Array:
    draft = reading.draft
    shape = draft.value(op.outputs[0]).shape[1:]
    match op:
        case EdgeApply() if op.operation in (*_BINARY, "copy") and op.relation == getattr(reading.root, "relation", 0):
            sides = [
                _value(reading, side.ref, _carries(draft, side.ref, shape, is_wide))
                if side.target == "e"
                else _operand(reading, side.ref, side.target, _carries(draft, side.ref, shape, is_wide))
                for side in op.operands
            ]
            return sides[0] if op.operation == "copy" else _apply(op.operation, *sides)
        case Map() if op.function in expressions.MAPS:
            return _mapped(_value(reading, op.x, is_wide), op.function, op.arguments)
        case Binary():
            a, b = (_value(reading, ref, _carries(draft, ref, shape, is_wide)) for ref in (op.a, op.b))
            return _apply(op.operation, a, b)
        case View() if not is_wide:
            return _value(reading, op.x, False).reshape(op.shape)
        case Total() if not is_wide and not op.is_mean:
            axes = tuple(dim - 1 for dim in op.dims)
            summed: Array = np.sum(_adding(_value(reading, op.x, False)), axis=axes, keepdims=op.keeps_dims)
            return summed
        case Linear() if not is_wide:
            return _small_layer(reading, op)
    raise NotACaseError(f"'{op.label}' isn't computed edge by edge in a kernel")


def _carries(draft: Draft, ref: Ref, shape: Sequence[int], is_wide: bool) -> bool:
    own = draft.value(ref).shape
    trailing = own[1:] if draft.value(ref).space != "dense" or len(own) == len(shape) + 1 else own
    return is_wide and bool(trailing) and trailing[-1] == shape[-1]


def _small_layer(reading: Reading, op: Linear) -> Array:
    draft = reading.draft
    if math.prod(draft.value(op.weight).shape) > _MOST_SMALL:
        raise NotACaseError("a linear layer over edges is a product of matrices")
    x, weight = _value(reading, op.x, False), _operand(reading, op.weight, "w", False)
    weight = weight.reshape(draft.value(op.weight).shape)
    columns = weight if op.is_turned else weight.T
    results = []
    for column in columns:
        products = [_times(value, factor) for value, factor in zip(x.reshape(-1), column, strict=True)]
        results.append(_sum(products))
    found = np.empty(len(results), dtype=object)
    found[:] = results
    return found if op.bias is None else _apply("add", found, _operand(reading, op.bias, "w", False))


def _operand(reading: Reading, ref: Ref, target: str, is_wide: bool) -> Array:
    """The formulas of an operand's row, a leading 1 of a weight's shape left out where it stands for the edges."""
    draft = reading.draft
    value = draft.value(ref)
    shape = value.shape if target == "w" else value.shape[1:]
    if target == "w" and len(shape) > 2 and shape[0] == 1:
        shape = shape[1:]
    width = math.prod(shape)
    leading = shape[:-1] if is_wide else shape
    if math.prod(leading) > _MOST_SMALL:
        raise NotACaseError(f"a value of {math.prod(leading)} numbers an edge is too long")
    slot = Slot(ref, target, width, draft.is_trainable(ref))
    if slot not in reading.slots:
        reading.slots.append(slot)
    number = reading.slots.index(slot)
    entries = np.empty(math.prod(leading), dtype=object)
    entries[:] = [operand(number, index, is_wide) for index in range(entries.size)]
    return entries.reshape((*leading, 1) if is_wide else leading)


class _Adder:
    """Lets numpy sum formulas."""

    def __init__(self, formula: Formula) -> None:
        self.formula = formula

    def __add__(self, other: _Adder) -> _Adder:
        return _Adder(apply("add", self.formula, other.formula))


def _adding(array: Array) -> Array:
    return np.vectorize(_Adder, otypes=[object])(array)


def _unwrapped(entry: Any) -> Formula:
    formula: Formula = entry.formula if isinstance(entry, _Adder) else entry
    return formula


def _apply(function: str, a: Array, b: Array) -> Array:
    def both(x: Any, y: Any) -> Formula:
        return apply(function, _unwrapped(x), _unwrapped(y))

    return np.frompyfunc(both, 2, 1)(a, b)


def _mapped(array: Array, function: str, told: tuple[float, ...]) -> Array:
    def one(x: Any) -> Formula:
        argument = _unwrapped(x)
        match function:
            case "scale":
                return apply("mul", argument, constant(told[0]))
            case "shift":
                return apply("add", argument, constant(told[0]))
            case "square":
                return apply("mul", argument, argument)
        return apply(function, argument, told=told)

    return np.frompyfunc(one, 1, 1)(array)


def _times(x: Any, y: Any) -> Formula:
    return apply("mul", _unwrapped(x), _unwrapped(y))


def _sum(formulas: Sequence[Formula]) -> Formula:
    result = formulas[0]
    for formula in formulas[1:]:
        result = apply("add", result, formula)
    return result
