"""Attention in one pass (T5), and its scores as one narrow product (T3).

Legend: N nodes, E edges, H heads, C channels a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from runner.kernels.opgraph import Aggregate, EdgeApply, EdgeSoftmax, Op, Ref
from runner.kernels.rewrite.draft import Draft
from runner.kernels.rewrite.engine import Match, Refusal
from runner.kernels.rewrite.made import Attend, HeadMatrix, Propagate
from runner.kernels.rewrite.ops import Binary, Dropout, Linear, Map, Total, View


@dataclass(frozen=True)
class FuseAttention:
    """Scores, softmax over a destination's edges and weighted sum: one kernel that keeps two numbers a destination and head."""

    name: str = "T5 attention"
    family: str = "attention"

    def find(self, draft: Draft) -> Iterator[Match | Refusal]:
        for op in draft.ops:
            if not isinstance(op, EdgeSoftmax):
                continue
            if op.norm_by != "dst":
                yield Refusal(op.where, "attention in one pass", "the softmax is over a source's edges")
                continue
            found = _attention_of(draft, op)
            if isinstance(found, str):
                yield Refusal(op.where, "attention in one pass", found)
            else:
                sink, attend = found
                yield Match(
                    op.where,
                    f"{attend.label}: nothing of an edge's size is kept",
                    partial(draft.replace, [sink], [attend]),
                )


def _attention_of(draft: Draft, softmax: EdgeSoftmax) -> tuple[Op, Attend] | str:
    """Return the weighted sum that a softmax ends in, and the attention that takes its place; or what is in the way."""
    share, drop = softmax.outputs[0], None
    if not draft.is_read_once(share):
        return "its weights are read more than once"
    reader = draft.readers(share)[0]
    if isinstance(reader, Dropout):
        share, drop = reader.output, reader.drop
        if not draft.is_read_once(share):
            return "its weights are read more than once"
        reader = draft.readers(share)[0]
    found = _weighted_sum(reader, share)
    if found is None:
        return "its weights are not those of a sum over the source's rows"
    value = found
    shape = draft.value(value).shape
    logits = draft.value(softmax.logits).shape
    if len(shape) != 3 or logits[1:] != (shape[1], 1) or not (softmax.grad and reader.grad):
        return f"its scores have shape {list(logits)}, the rows {list(shape)}: one score a head is needed"
    if getattr(reader, "relation", 0) != softmax.relation:
        return "its sum is over another relation's edges"
    scored = _score(draft, softmax.logits, value, softmax.relation)
    if isinstance(scored, str):
        return scored
    return reader, Attend(
        output=reader.outputs[0], where=softmax.where, value=value, drop=drop, relation=softmax.relation, **scored
    )


def _weighted_sum(op: Op, weight: Ref) -> Ref | None:
    if isinstance(op, Propagate) and op.weight == weight and op.is_linear and op.row_scale is op.col_scale is None:
        return op.x if op.reduce == "sum" else None
    if isinstance(op, Aggregate) and op.operation == "mul" and op.reduce == "sum":
        sources = [operand.ref for operand in op.operands if operand.target == "u"]
        weights = [operand.ref for operand in op.operands if operand.target == "e"]
        return sources[0] if weights == [weight] and len(sources) == 1 else None
    return None


def _score(draft: Draft, logits: Ref, value: Ref, relation: int) -> dict[str, Any] | str:
    """Return how a score is made, as fields of :class:`Attend`; or why it isn't one that a kernel makes."""
    op = _behind_views(draft, logits)
    if isinstance(op, Map) and op.function == "leaky_relu":
        ends = _ends(draft, op.x, "add", relation)
        if ends and draft.value(op.x).shape == draft.value(logits).shape:
            return {"score": "gat", "key_": ends[0], "query": ends[1], "slope": op.arguments[0]}
        return "its scores are not one number of each end"
    if isinstance(op, Total):
        return _gatv2(draft, op, value, relation)
    scale = 1.0
    if isinstance(op, Map) and op.function == "scale":
        scale, op = op.arguments[0], _behind_views(draft, op.x)
    if isinstance(op, EdgeApply) and op.operation == "dot":
        ends = _ends(draft, op.outputs[0], "dot", relation)
        if ends and draft.value(ends[0]).shape == draft.value(value).shape:
            return {"score": "dot", "key_": ends[0], "query": ends[1], "scale": scale}
    return f"its scores are made by '{op.label if op else 'an input'}', which no attention kernel has"


def _gatv2(draft: Draft, op: Total, value: Ref, relation: int) -> dict[str, Any] | str:
    product = draft.producer(op.x)
    if op.dims != (2,) or op.is_mean or not isinstance(product, Binary) or product.operation != "mul":
        return "its scores are no product of each head with a vector"
    shape = draft.value(value).shape
    for inner, vector in ((product.a, product.b), (product.b, product.a)):
        curved = draft.producer(inner)
        is_vector = draft.value(vector).space == "dense" and draft.value(vector).shape[-2:] == shape[1:]
        if is_vector and isinstance(curved, Map) and curved.function == "leaky_relu":
            ends = _ends(draft, curved.x, "add", relation)
            if ends and ends[0] == value and draft.value(ends[1]).shape == shape:
                return {"score": "gatv2", "query": ends[1], "vector": vector, "slope": curved.arguments[0]}
    return "its scores are no product of a vector with LeakyReLU(source's row + destination's row)"


def _ends(draft: Draft, ref: Ref, operation: str, relation: int) -> tuple[Ref, Ref] | None:
    """Return what a message function reads of the source and of the destination."""
    op = draft.producer(ref)
    if not isinstance(op, EdgeApply) or op.operation != operation or op.relation != relation:
        return None
    by_target = {operand.target: operand.ref for operand in op.operands}
    if set(by_target) != {"u", "v"} or draft.value(by_target["u"]).shape[1:] != draft.value(by_target["v"]).shape[1:]:
        return None
    return by_target["u"], by_target["v"]


def _behind_views(draft: Draft, ref: Ref) -> Op | None:
    op = draft.producer(ref)
    while isinstance(op, View):
        op = draft.producer(op.x)
    return op


@dataclass(frozen=True)
class ScoresAsProduct:
    """T3: the product of each head with its own vector, summed, is a product with a narrow matrix."""

    name: str = "T3 scores"
    family: str = "attention"

    def find(self, draft: Draft) -> Iterator[Match | Refusal]:
        for op in draft.ops:
            if not isinstance(op, Total) or op.dims != (2,) or op.is_mean or draft.value(op.output).space == "dense":
                continue
            product = draft.producer(op.x)
            if (
                isinstance(product, Binary)
                and product.operation == "mul"
                and (found := _rows_and_vector(draft, product))
            ):
                rows, vector = found
                yield Match(
                    op.where,
                    "scores of all heads: one narrow product",
                    partial(_as_product, draft, op, rows, vector),
                )


def _rows_and_vector(draft: Draft, product: Binary) -> tuple[Ref, Ref] | None:
    """The flat value [N, H · C] behind a view [N, H, C], and the vectors [1, H, C]."""
    for rows, vector in ((product.a, product.b), (product.b, product.a)):
        view, shape = draft.producer(rows), draft.value(rows).shape
        is_vector = draft.value(vector).space == "dense" and draft.value(vector).shape == (1, *shape[1:])
        if isinstance(view, View) and is_vector and len(draft.value(view.x).shape) == 2:
            return view.x, vector
    return None


def _as_product(draft: Draft, op: Total, rows: Ref, vector: Ref) -> None:
    _, num_heads, channels = draft.value(vector).shape
    dtype = draft.value(vector).dtype
    matrix = draft.new_value("dense", (num_heads * channels, num_heads), dtype)
    made: list[Op] = [HeadMatrix(output=matrix, where=op.where, vector=vector)]
    if op.keeps_dims:
        flat = draft.like(rows, num_heads)
        made += [
            Linear(output=flat, where=op.where, x=rows, weight=matrix),
            View(output=op.output, where=op.where, x=flat, shape=(num_heads, 1)),
        ]
    else:
        made.append(Linear(output=op.output, where=op.where, x=rows, weight=matrix))
    draft.replace([op], made)
