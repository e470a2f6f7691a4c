"""Messages: weighted sums become propagations (T6), edge work moves to the nodes (R1, T2), shifts leave a maximum (R3).

Legend: N nodes, E edges, F features, H heads.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from runner.kernels.opgraph import Aggregate, Call, EdgeApply, Operand, Ref
from runner.kernels.rewrite.draft import Draft
from runner.kernels.rewrite.engine import Match, Refusal
from runner.kernels.rewrite.made import Part, Propagate
from runner.kernels.rewrite.ops import Binary, Concat, Linear, Map


@dataclass(frozen=True)
class Propagation:
    """``copy_u`` or ``u_mul_e``, then a reduction: no message is stored."""

    name: str = "T6 messages"
    family: str = "fuse"

    def find(self, draft: Draft) -> Iterator[Match | Refusal]:
        for op in draft.ops:
            if isinstance(op, Aggregate) and op.grad and (operands := _operands(draft, op)):
                x, weight = operands
                yield Match(
                    op.where,
                    f"{op.label}: one pass, no messages",
                    partial(_propagate, draft, op, x, weight),
                )


def _operands(draft: Draft, op: Aggregate) -> tuple[Ref, Ref | None] | None:
    by_target = {operand.target: operand.ref for operand in op.operands}
    if op.operation == "copy" and set(by_target) == {"u"}:
        return by_target["u"], None
    if op.operation != "mul" or set(by_target) != {"u", "e"} or op.reduce not in ("sum", "mean"):
        return None
    x, weight = draft.value(by_target["u"]).shape, draft.value(by_target["e"]).shape
    width = math.prod(weight[1:])
    is_scalar = width == 1 and len(weight) <= len(x)
    is_per_head = len(x) > 2 and len(weight) == len(x) and weight[1] == x[1] and width == x[1]
    return (by_target["u"], by_target["e"]) if is_scalar or is_per_head or weight[1:] == x[1:] else None


def _propagate(draft: Draft, op: Aggregate, x: Ref, weight: Ref | None) -> None:
    draft.replace(
        [op],
        [Propagate(output=op.outputs[0], where=op.where, x=x, weight=weight, reduce=op.reduce, relation=op.relation)],
    )


@dataclass(frozen=True)
class HoistLinear:
    """R1, T2: a linear layer of a sum, difference or concatenation of both ends becomes linear layers of the nodes."""

    name: str = "R1 hoist"
    family: str = "split"

    def find(self, draft: Draft) -> Iterator[Match | Refusal]:
        for op in draft.ops:
            if not isinstance(op, Linear) or draft.value(op.output).space != "edge":
                continue
            source = draft.producer(op.x)
            if _gathered(draft, op.x) or (isinstance(source, EdgeApply) and source.grad and _is_of_ends(source)):
                assert isinstance(source, EdgeApply)
                yield _hoisting(draft, op, source)
            elif isinstance(source, EdgeApply) and source.operation in ("mul", "div", "dot"):
                yield Refusal(op.where, "linear of an edge value", f"{source.label} isn't linear in either end")
            elif isinstance(source, Call) and "norm" in source.label:
                yield Refusal(op.where, "linear of an edge value", f"{source.label} over edges lies between")


def _is_of_ends(op: EdgeApply) -> bool:
    """Whether it is a sum or difference of both ends' rows."""
    return op.operation in ("add", "sub") and {operand.target for operand in op.operands} == {"u", "v"}


def _hoisting(draft: Draft, op: Linear, source: EdgeApply) -> Match | Refusal:
    if any(draft.value(end.ref).shape[1:] != draft.value(op.x).shape[1:] for end in source.operands):
        return Refusal(op.where, f"linear of {source.label}", "one of its ends has one number in the place of a row")
    return Match(op.where, f"linear of {source.label}: on nodes, not edges", partial(_hoist, draft, op, source))


def _hoist(draft: Draft, op: Linear, source: EdgeApply) -> None:
    """W (a[u] ± b[v]) + c = (W a)[u] ± (W b)[v], c with the first."""
    width = draft.value(op.output).shape[1]
    made, operands = [], []
    for position, operand in enumerate(source.operands):
        output = draft.like(operand.ref, width)
        bias = op.bias if position == 0 else None
        made.append(
            Linear(output=output, where=op.where, x=operand.ref, weight=op.weight, bias=bias, is_turned=op.is_turned)
        )
        operands.append(Operand(output, operand.target))
    draft.replace(
        [op], [*made, EdgeApply((op.output,), source.operation, tuple(operands), op.where, relation=source.relation)]
    )


@dataclass(frozen=True)
class SplitConcat:
    """T2: ``[a ‖ b] W = a W1 + b W2``, so that each part can be treated by itself."""

    name: str = "T2 split"
    family: str = "split"

    def find(self, draft: Draft) -> Iterator[Match | Refusal]:
        for op in draft.ops:
            source = draft.producer(op.x) if isinstance(op, Linear) else None
            if (
                isinstance(op, Linear)
                and isinstance(source, Concat)
                and any(_is_worth_it(draft, part) for part in source.parts)
            ):
                yield Match(op.where, f"linear of {len(source.parts)} parts", partial(_split, draft, op, source))


def _is_worth_it(draft: Draft, part: Ref) -> bool:
    """Whether a part is gathered or propagated, so that a linear of it alone can move."""
    return isinstance(draft.producer(part), EdgeApply | Propagate | Binary | Aggregate)


def _split(draft: Draft, op: Linear, source: Concat) -> None:
    made: list[Linear | Part | Binary] = []
    terms: list[Ref] = []
    begin, dim = 0, 1 if op.is_turned else 0
    weight = draft.value(op.weight)
    for part in source.parts:
        width = draft.value(part).shape[1]
        shape = (weight.shape[0], width) if op.is_turned else (width, weight.shape[1])
        piece = draft.new_value("dense", shape, weight.dtype)
        made.append(Part(output=piece, where=op.where, x=op.weight, begin=begin, end=begin + width, dim=dim))
        terms.append(draft.like(op.output))
        bias = op.bias if not begin else None
        made.append(Linear(output=terms[-1], where=op.where, x=part, weight=piece, bias=bias, is_turned=op.is_turned))
        begin += width
    total = terms[0]
    for position, term in enumerate(terms[1:], 2):
        output = op.output if position == len(terms) else draft.like(op.output)
        made.append(Binary(output=output, where=op.where, operation="add", a=total, b=term))
        total = output
    draft.replace([op], made)


@dataclass(frozen=True)
class MergeGathers:
    """R1: a function of gathered rows is the gathered function; two gathers that meet are one message function."""

    name: str = "R1 gather"
    family: str = "split"

    def find(self, draft: Draft) -> Iterator[Match | Refusal]:
        for op in draft.ops:
            if isinstance(op, Map) and (copy := _gathered(draft, op.x)) is not None:
                yield Match(op.where, f"{op.label} of a gathered row: on nodes", partial(_map_first, draft, op, copy))
            elif isinstance(op, Binary) and draft.value(op.output).space == "edge":
                a, b = _gathered(draft, op.a), _gathered(draft, op.b)
                if a is not None and b is not None and _can_meet(draft, a, b):
                    yield Match(op.where, f"{op.label} of two gathered rows", partial(_meet, draft, op, a, b))


def _gathered(draft: Draft, ref: Ref) -> EdgeApply | None:
    source = draft.producer(ref)
    is_copy = isinstance(source, EdgeApply) and source.operation == "copy" and source.operands[0].target != "e"
    return source if is_copy and isinstance(source, EdgeApply) and source.grad else None


def _can_meet(draft: Draft, a: EdgeApply, b: EdgeApply) -> bool:
    shapes = [draft.value(one.operands[0].ref).shape for one in (a, b)]
    return shapes[0] == shapes[1] and a.relation == b.relation


def _copied(op: Map | Binary, ref: Ref, source: EdgeApply) -> EdgeApply:
    """A node's value, gathered as another was."""
    return EdgeApply(
        (op.output,), "copy", (Operand(ref, source.operands[0].target),), op.where, relation=source.relation
    )


def _map_first(draft: Draft, op: Map, source: EdgeApply) -> None:
    x = source.operands[0].ref
    mapped = Map(output=draft.like(x), where=op.where, x=x, function=op.function, arguments=op.arguments)
    draft.replace([op], [mapped, _copied(op, mapped.output, source)])


def _meet(draft: Draft, op: Binary, a: EdgeApply, b: EdgeApply) -> None:
    one, other = a.operands[0], b.operands[0]
    if one.target != other.target:
        draft.replace([op], [EdgeApply((op.output,), op.operation, (one, other), op.where, relation=a.relation)])
        return
    both = Binary(output=draft.like(one.ref), where=op.where, operation=op.operation, a=one.ref, b=other.ref)
    draft.replace([op], [both, _copied(op, both.output, a)])


@dataclass(frozen=True)
class ShiftOut:
    """R3: ``reduce over edges of (a[u] + b[v])`` is ``b + reduce a[u]`` (sum: ``deg · b + …``); without edges both are 0."""

    name: str = "R3 shift"
    family: str = "split"

    def find(self, draft: Draft) -> Iterator[Match | Refusal]:
        for op in draft.ops:
            if not isinstance(op, Aggregate) or not op.grad:
                continue
            terms = _terms(draft, op)
            if terms and sum(operand.target == "u" for _, operand in terms) == 1:
                yield Match(
                    op.where,
                    f"{op.label}: the destination's share after it",
                    partial(_shift, draft, op, terms),
                )
            elif op.reduce in ("max", "min") and any(operand.target == "e" for operand in op.operands):
                reason = "its message isn't a source's row shifted by the destination's (R3)"
                yield Refusal(op.where, f"{op.label} on nodes", reason)


_Terms = list[tuple[float, Operand]]


def _terms(draft: Draft, op: Aggregate | EdgeApply, sign: float = 1.0) -> _Terms | None:
    """Return a message as a signed sum of rows of its ends; None where it is no such sum."""
    if op.operation not in ("add", "sub", "copy"):
        return None
    found: _Terms = []
    for position, operand in enumerate(op.operands):
        signed = -sign if op.operation == "sub" and position == 1 else sign
        if operand.target != "e":
            found.append((signed, operand))
            continue
        source = draft.producer(operand.ref)
        is_same = isinstance(source, EdgeApply) and source.grad and source.relation == op.relation
        inner = _terms(draft, source, signed) if is_same and isinstance(source, EdgeApply) else None
        if inner is None:
            return None
        found += inner
    shapes = {draft.value(operand.ref).shape for _, operand in found}
    return found if len(shapes) == 1 else None


def _shift(draft: Draft, op: Aggregate, terms: _Terms) -> None:
    """The reduction of ± a[u], a minus turning max into min, plus the signed sum of the destination's terms."""
    ((source_sign, source),) = [(sign, operand) for sign, operand in terms if operand.target == "u"]
    reduce = {"max": "min", "min": "max"}.get(op.reduce, op.reduce) if source_sign < 0 else op.reduce
    best = Propagate(
        output=draft.like(op.outputs[0]), where=op.where, x=source.ref, reduce=reduce, relation=op.relation
    )
    made: list[Propagate | Binary | Map] = [best]
    ends = [(sign, operand.ref) for sign, operand in terms if operand.target == "v"]
    total = _signed_sum(draft, op.where, ends, made)
    factor = _share(draft, op)
    if total is not None and factor is not None:
        made.append(Binary(output=draft.like(total[1]), where=op.where, operation="mul", a=total[1], b=factor))
        total = (total[0], made[-1].outputs[0])
    both = [(source_sign, best.output)] + ([total] if total is not None else [])
    sign, result = _signed_sum(draft, op.where, both, made) or (1.0, best.output)
    if sign < 0:
        made.append(Map(output=draft.like(result), where=op.where, x=result, function="neg"))
    made[-1] = dataclasses.replace(made[-1], output=op.outputs[0])
    draft.replace([op], made)


def _signed_sum(
    draft: Draft, where: str, terms: list[tuple[float, Ref]], made: list[Propagate | Binary | Map]
) -> tuple[float, Ref] | None:
    """Add ops that sum up terms, those with a plus first; return the sign and the value of the sum, None of no terms."""
    total: tuple[float, Ref] | None = None
    for sign, ref in sorted(terms, key=lambda pair: -pair[0]):
        if total is None:
            total = (sign, ref)
            continue
        operation = "add" if sign == total[0] else "sub"
        made.append(Binary(output=draft.like(ref), where=where, operation=operation, a=total[1], b=ref))
        total = (total[0], made[-1].outputs[0])
    return total


def _share(draft: Draft, op: Aggregate) -> Ref | None:
    """A constant [N, 1] that a destination's own term is multiplied by: its degree for a sum, else 1 where it has edges and 0 where it
    has none; None where that is 1 everywhere."""
    degrees = draft.graph.adjacency_of(op).in_degrees
    share = degrees if op.reduce == "sum" else (degrees > 0).long()
    return None if bool((share == 1).all()) else draft.new_constant(share.to(torch.float32).unsqueeze(1), "node")
