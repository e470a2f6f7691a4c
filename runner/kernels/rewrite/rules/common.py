"""Common subexpressions (T11): equal ops on equal values are computed once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from runner.kernels.opgraph import Call, EdgeApply, EdgeSoftmax, Op, Ref
from runner.kernels.rewrite.draft import Draft
from runner.kernels.rewrite.engine import Match, Refusal
from runner.kernels.rewrite.ops import TypedOp


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
                yield Match(op.where, f"{op.label}: as at {known.where}", lambda op=op, known=known: _merge(draft, op, known.outputs[0]))


def _key(op: Op) -> Any:
    if not op.grad:
        return None
    if isinstance(op, TypedOp):
        return op.key()
    if isinstance(op, EdgeApply):
        return EdgeApply, op.operation, op.operands
    return (EdgeSoftmax, op.logits, op.norm_by) if isinstance(op, EdgeSoftmax) else None


def _merge(draft: Draft, op: Op, kept: Ref) -> None:
    draft.rename(op.outputs[0], kept)
