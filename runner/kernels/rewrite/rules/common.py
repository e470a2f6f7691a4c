"""Common subexpressions (T11): equal ops on equal values are computed once, products with one value together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from runner.kernels.opgraph import Call, EdgeApply, EdgeSoftmax, Op, Ref
from runner.kernels.rewrite.draft import Draft
from runner.kernels.rewrite.engine import Match, Refusal
from runner.kernels.rewrite.made import Split, Stack
from runner.kernels.rewrite.ops import Binary, Linear, TypedOp


@dataclass(frozen=True)
class MergeEqual:
    """One of several ops that compute the same is kept."""

    name: str = "T11 equal"
    family: str = "common"

    def find(self, draft: Draft) -> Iterator[Match | Refusal]:
        changed = {ref.index for op in draft.ops if isinstance(op, Call) and op.is_in_place for ref in op.reads()}
        first: dict[Any, Op] = {}
        for op in draft.ops:
            key = _key(op)
            if key is None or op.outputs[0].index in changed:
                continue
            known = first.setdefault(key, op)
            if known is not op and op.outputs[0] != draft.output:
                yield Match(
                    op.where,
                    f"{op.label}: as at {known.where}",
                    partial(_merge, draft, op, known.outputs[0]),
                )


def _key(op: Op) -> Any:
    if not op.grad:
        return None
    if isinstance(op, TypedOp):
        return op.key()
    if isinstance(op, EdgeApply):
        return EdgeApply, op.operation, op.operands, op.relation
    return (EdgeSoftmax, op.logits, op.norm_by, op.relation) if isinstance(op, EdgeSoftmax) else None


def _merge(draft: Draft, op: Op, kept: Ref) -> None:
    draft.rename(op.outputs[0], kept)


@dataclass(frozen=True)
class ShareProduct:
    """``x W + b`` beside ``x W``: one product, the bias added to it."""

    name: str = "T11 product"
    family: str = "common"

    def find(self, draft: Draft) -> Iterator[Match | Refusal]:
        bare = {(op.x, op.weight, op.is_turned): op for op in draft.ops if isinstance(op, Linear) and op.bias is None}
        for op in draft.ops:
            if isinstance(op, Linear) and op.bias is not None and (op.x, op.weight, op.is_turned) in bare:
                other = bare[op.x, op.weight, op.is_turned]
                yield Match(op.where, f"the product of {other.where}, and a bias", partial(_share, draft, op, other))


def _share(draft: Draft, op: Linear, other: Linear) -> None:
    """One product where the first of the two was, the sum with the bias behind it."""
    assert op.bias is not None
    biased = Binary(output=op.output, where=op.where, operation="add", a=other.output, b=op.bias)
    draft.replace([op, other], [other, biased], at_first=True)


_MOST_COLUMNS = 32  # of narrow products that are one: wider ones use the machine well by themselves


@dataclass(frozen=True)
class StackNarrow:
    """Narrow products with one value are one product, so that the value is read once, and its gradient made once."""

    name: str = "T11 stack"
    family: str = "common"

    def find(self, draft: Draft) -> Iterator[Match | Refusal]:
        groups: dict[tuple[Ref, bool], list[Linear]] = {}
        for op in draft.ops:
            if (
                isinstance(op, Linear)
                and op.bias is None
                and op.grad
                and draft.value(op.output).space == "node"
                and _can_move(draft, op.weight)
            ):
                groups.setdefault((op.x, op.is_turned), []).append(op)
        for (x, _), group in groups.items():
            widths = [draft.value(op.output).shape[1] for op in group]
            if len(group) > 1 and sum(widths) <= _MOST_COLUMNS and x.index not in draft.is_fixed:
                yield Match(
                    group[0].where, f"{len(group)} narrow products of one value: one", partial(_stack, draft, group)
                )


def _can_move(draft: Draft, weight: Ref) -> bool:
    """Whether a weight is there from the beginning, or made of one that is."""
    op = draft.producer(weight)
    return weight.index in draft.graph.leaves or (
        op is not None and all(ref.index in draft.graph.leaves for ref in op.reads())
    )


def _stack(draft: Draft, group: list[Linear]) -> None:
    first = group[0]
    widths = tuple(draft.value(op.output).shape[1] for op in group)
    weight, depth = draft.value(first.weight), draft.value(first.x).shape[1]
    shape = (sum(widths), depth) if first.is_turned else (depth, sum(widths))
    stacked = draft.new_value("dense", shape, weight.dtype)
    product = draft.like(first.output, sum(widths))
    made: list[Op] = [
        Stack(
            output=stacked, where=first.where, parts=tuple(op.weight for op in group), dim=0 if first.is_turned else 1
        ),
        Linear(output=product, where=first.where, x=first.x, weight=stacked, is_turned=first.is_turned),
        Split(
            output=first.output,
            where=first.where,
            x=product,
            widths=widths,
            others=tuple(op.output for op in group[1:]),
        ),
    ]
    weights = [made_by for op in group if (made_by := draft.producer(op.weight)) is not None]
    draft.replace([*weights, *group], [*weights, *made], at_first=True)
