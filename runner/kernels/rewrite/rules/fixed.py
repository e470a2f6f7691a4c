"""What depends on the graph and the features only is computed once (T9); products with mostly empty features read what is stored (T10).

Legend: N nodes, Fi → Fo feature widths.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from runner.kernels.opgraph import Aggregate, EdgeApply, EdgeSoftmax, Op, Ref
from runner.kernels.rewrite.draft import Draft
from runner.kernels.rewrite.engine import Match, Refusal
from runner.kernels.rewrite.made import SparseProduct
from runner.kernels.rewrite.ops import Dropout, Linear, TypedOp
from runner.units import format_bytes


@dataclass(frozen=True)
class KeepFixed:
    """Ops on the graph and the features alone run once, and what others read of them is kept.

    Attributes:
        most_bytes: of one kept value.
    """

    most_bytes: float = 2.0**30
    name: str = "T9 keep"
    family: str = "keep"

    def find(self, draft: Draft) -> Iterator[Match | Refusal]:
        fixed = draft.is_fixed
        for op in draft.ops:
            is_computed = isinstance(op, TypedOp | EdgeApply | Aggregate | EdgeSoftmax)
            if not is_computed or not op.reads():
                continue
            if isinstance(op, Dropout) and op.x.index in fixed:
                yield Refusal(op.where, "a propagation of it kept", "input dropout draws anew at each step")
            elif all(ref.index in fixed for ref in op.reads()) and not (isinstance(op, TypedOp) and op.draws):
                size = math.prod(draft.value(op.outputs[0]).shape) * draft.value(op.outputs[0]).dtype.itemsize
                if size > self.most_bytes:
                    yield Refusal(
                        op.where,
                        f"{op.label} kept",
                        f"{format_bytes(size)} are more than {format_bytes(int(self.most_bytes))}",
                    )
                else:
                    yield Match(
                        op.where,
                        f"{op.label} of fixed values: once, {format_bytes(size)} kept",
                        partial(_keep, draft, op),
                    )


def _keep(draft: Draft, op: Op) -> None:
    draft.prologue.append(op)
    draft.replace([op], [])


@dataclass(frozen=True)
class SparseFirst:
    """A linear layer on features that are mostly 0 reads and multiplies only what is stored, input dropout included.

    Attributes:
        plan: by number of the weight, whether its product is sparse.
    """

    plan: Mapping[int, bool]
    name: str = "T10 sparse"
    family: str = "sparse"

    def find(self, draft: Draft) -> Iterator[Match | Refusal]:
        for op, _, _ in sparse_sites(draft):
            if self.plan.get(op.weight.index):
                yield Match(op.where, "linear on stored features only", partial(_make_sparse, draft, op))


def sparse_sites(draft: Draft) -> Iterator[tuple[Linear, Ref, Dropout | None]]:
    """Yield the linear layers on fixed values, with what they read behind an input dropout."""
    fixed = draft.is_fixed
    for op in draft.ops:
        if not isinstance(op, Linear) or not op.grad or draft.value(op.output).space != "node":
            continue
        source = draft.producer(op.x)
        dropout = source if isinstance(source, Dropout) else None
        x = op.x if dropout is None else dropout.x
        if x.index in fixed and op.weight.index not in fixed:
            yield op, x, dropout


def _make_sparse(draft: Draft, op: Linear) -> None:
    source = draft.producer(op.x)
    dropout = source if isinstance(source, Dropout) else None
    product = SparseProduct(
        output=op.output,
        where=op.where,
        x=op.x if dropout is None else dropout.x,
        weight=op.weight,
        is_turned=op.is_turned,
        input_drop=None if dropout is None else dropout.drop,
        bias=op.bias,
    )
    draft.replace([op], [product])
