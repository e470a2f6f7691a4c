"""Relations (T12): a linear layer of each edge's relation is applied to the (node, relation) pairs that occur, not to edges.

Legend: N nodes, E edges, R relations, Fi → Fo feature widths.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from runner.kernels.opgraph import Aggregate, EdgeApply, Op, Ref
from runner.kernels.rewrite.draft import Draft
from runner.kernels.rewrite.engine import Match, Refusal
from runner.kernels.rewrite.legality import is_scale
from runner.kernels.rewrite.made import Relational
from runner.kernels.rewrite.ops import Binary, TypedLinear


@dataclass(frozen=True)
class PairsNotEdges:
    """``sum over j → i of c_ij W[type_ij] x_j``: a product for each pair of source and relation (or of destination and relation)."""

    name: str = "T12 relations"
    family: str = "split"

    def find(self, draft: Draft) -> Iterator[Match | Refusal]:
        for op in draft.ops:
            if not isinstance(op, Aggregate) or op.operation != "copy" or op.operands[0].target != "e" or not op.grad:
                continue
            found = _typed(draft, op.operands[0].ref)
            if found is None:
                continue
            typed, scale = found
            source = draft.producer(typed.x)
            is_gather = (
                isinstance(source, EdgeApply)
                and source.operation == "copy"
                and source.operands[0].target == "u"
                and source.relation == op.relation
            )
            if op.reduce not in ("sum", "mean"):
                yield Refusal(
                    op.where, "a product for each relation and node", f"{op.reduce} doesn't commute with a product (R3)"
                )
            elif not is_gather or typed.types.index not in draft.constants:
                yield Refusal(
                    op.where,
                    "a product for each relation and node",
                    "its rows aren't the sources', or its relations change",
                )
            else:
                assert isinstance(source, EdgeApply)
                made = Relational(
                    output=op.outputs[0], where=op.where, x=source.operands[0].ref, weight=typed.weight, types=typed.types,
                    scale=scale, is_mean=op.reduce == "mean", order=_order(draft, typed), relation=op.relation,
                )  # fmt: skip
                yield Match(op.where, f"{made.label}, not for each edge", partial(draft.replace, [op], [made]))


def _typed(draft: Draft, ref: Ref) -> tuple[TypedLinear, Ref | None] | None:
    """The layer of each edge's relation behind an edge value, and the constant scale of edges between."""
    op: Op | None = draft.producer(ref)
    if not draft.is_read_once(ref):
        return None
    if isinstance(op, TypedLinear):
        return op, None
    if isinstance(op, Binary) and op.operation == "mul":
        for value, scale in ((op.a, op.b), (op.b, op.a)):
            inner = draft.producer(value)
            is_fixed = scale.index in draft.constants and is_scale(draft, scale)
            if isinstance(inner, TypedLinear) and is_fixed and draft.is_read_once(value):
                return inner, scale
    return None


def _order(draft: Draft, typed: TypedLinear) -> str:
    """Where fewer numbers are gathered: the narrower side goes along the edges."""
    _, width_in, width_out = draft.value(typed.weight).shape
    return "transform first" if width_out <= width_in else "propagate first"
