"""What may be moved past what: the proofs that rewrites ask for.

R1 a gather commutes with any function of one endpoint's row. R2 sums and means with one weight an edge commute with a product from
the right. R3 max and min commute with increasing maps and with a shift per destination. R4 a scale of rows commutes with a product
from the right. An op of R2 or R4 acts from the left: it mixes or scales rows, and treats every column alike.

Legend: N nodes, E edges, F features.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from runner.kernels.opgraph import Call, Op, Ref
from runner.kernels.rewrite.draft import Draft
from runner.kernels.rewrite.made import Propagate
from runner.kernels.rewrite.ops import Binary, Dropout, Map, TypedOp


def is_scale(draft: Draft, ref: Ref) -> bool:
    """Whether a value has one number a row, or one in all, so that multiplying by it acts from the left (R4)."""
    value = draft.value(ref)
    rows = value.shape[0] if value.space != "dense" and value.shape else 1
    return math.prod(value.shape) == rows


def is_constant_scale(draft: Draft, ref: Ref) -> bool:
    """Whether a value is a constant with one number a node."""
    return ref.index in draft.constants and draft.value(ref).space == "node" and is_scale(draft, ref)


def carried(draft: Draft, op: Op | None) -> tuple[Ref, ...]:
    """Return the values through which a product from the right passes an op (R2, R4), or none where it doesn't.

    They are what the op is linear in, column by column; its other operands are scales and weights.
    """
    match op:
        case Propagate() if op.is_linear and (op.weight is None or is_scale(draft, op.weight)):
            return (op.x,)
        case Map(function="scale" | "neg"):
            return (op.x,)
        case Binary(operation="add" | "sub"):
            alike = draft.value(op.a).shape == draft.value(op.b).shape == draft.value(op.output).shape
            return (op.a, op.b) if alike else ()
        case Binary(operation="mul") if is_scale(draft, op.a) and not is_scale(draft, op.b):
            return (op.b,)
        case Binary(operation="mul" | "div") if is_scale(draft, op.b):
            return (op.a,)
    return ()


def obstacle(op: Op | None) -> str | None:
    """Say why a product from the right can't pass an op; None where the op is nothing that a rewrite would be tempted by."""
    match op:
        case Propagate(reduce="max" | "min"):
            return f"{op.reduce} doesn't commute with a product (R3)"
        case Propagate() if op.weight is not None:
            return "its edges have a weight for each head or channel (R2)"
        case Dropout():
            return "a dropout lies between"
        case Map():
            return f"{op.function} lies between"
        case Call() if "norm" in op.label:
            return f"{op.label} lies between"
        case TypedOp():
            return op.obstacle
    return None


@dataclass(frozen=True)
class Region:
    """Ops that act from the left, from one value to one value.

    Attributes:
        base: what goes in.
        ops: in an order that executes; empty: the result is the base.
        result: what comes out.
    """

    base: Ref
    ops: tuple[Op, ...]
    result: Ref

    @property
    def propagates(self) -> list[Propagate]:
        """Those of its ops that pass messages."""
        return [op for op in self.ops if isinstance(op, Propagate)]


def region_into(draft: Draft, ref: Ref) -> Region:
    """Return the largest region whose result is a value, and whose inner values nobody else reads."""
    stops: set[int] = set()
    while True:
        found = _walk_up(draft, ref, stops)
        inside = {id(op) for op in found.ops}
        inner = [op.outputs[0] for op in found.ops if op.outputs[0] != ref]
        shared = [
            value
            for value in inner
            if value == draft.output or any(id(reader) not in inside for reader in draft.readers(value))
        ]
        if not shared:
            return found
        stops.update(value.index for value in shared)


def _walk_up(draft: Draft, ref: Ref, stops: set[int]) -> Region:
    """Return the largest region whose result is a value, going no further up than ``stops``; one pass, since sums fan out."""
    bases = _bases(draft, ref, stops)
    ops, wanted = list[Op](), {ref.index}
    for op in reversed(draft.ops):
        output = op.outputs[0]
        if output.index in wanted and output.index in bases:
            ops.append(op)
            wanted.update(value.index for value in carried(draft, op))
    return Region(bases.get(ref.index, ref), tuple(ops[::-1]), ref)


def _bases(draft: Draft, ref: Ref, stops: set[int]) -> dict[int, Ref]:
    """Return, of the values down to one that ops make from a single value from the left, that value."""
    bases: dict[int, Ref] = {}
    last = draft.producer(ref)
    for op in draft.ops:
        inputs = carried(draft, op) if op.grad and op.outputs[0].index not in stops else ()
        found = {bases.get(value.index, value) for value in inputs}
        if len(found) == 1:
            bases[op.outputs[0].index] = found.pop()
        if op is last:
            break
    return bases


def region_from(draft: Draft, ref: Ref) -> Region:
    """Return the largest region whose base is a value that nobody else reads, and whose inner values nobody else reads."""
    reached, ops = {ref.index}, list[Op]()
    for op in draft.ops:
        inputs = carried(draft, op)
        if inputs and op.grad and all(value.index in reached for value in inputs):
            ops.append(op)
            reached.add(op.outputs[0].index)
    while ops:
        inside = {id(op) for op in ops}
        inner = [ref, *(op.outputs[0] for op in ops[:-1])]
        if all(
            value != draft.output and all(id(reader) in inside for reader in draft.readers(value)) for value in inner
        ):
            return Region(ref, tuple(ops), ops[-1].outputs[0])
        ops.pop()
    return Region(ref, (), ref)
