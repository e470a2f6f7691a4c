"""Normalisation (T4): scales of rows and columns join the propagation that they stand beside, and each other.

Legend: N nodes, E edges.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from runner.kernels.opgraph import Op, Ref
from runner.kernels.rewrite.draft import Draft
from runner.kernels.rewrite.engine import Match, Refusal
from runner.kernels.rewrite.legality import is_constant_scale
from runner.kernels.rewrite.made import Propagate
from runner.kernels.rewrite.ops import Binary, Map


@dataclass(frozen=True)
class MeanAsScale:
    """A mean is a sum whose rows are scaled by 1 / degree."""

    name: str = "T4 mean"
    family: str = "scale"

    def find(self, draft: Draft) -> Iterator[Match | Refusal]:
        for op in draft.ops:
            if isinstance(op, Propagate) and op.reduce == "mean":
                yield Match(op.where, "mean: a sum with a row scale", partial(_mean, draft, op))


def _mean(draft: Draft, op: Propagate) -> None:
    scale = draft.graph.adjacency_of(op).mean_scale(draft.value(op.output).dtype).unsqueeze(1)
    scaled = scale if op.row_scale is None else scale * draft.constants[op.row_scale.index].reshape(-1, 1)
    draft.replace([op], [dataclasses.replace(op, reduce="sum", row_scale=draft.new_constant(scaled, "node"))])


@dataclass(frozen=True)
class FoldScale:
    """R4: a constant scale of a sum's rows, before or after, is done by its kernel."""

    name: str = "T4 scale"
    family: str = "scale"

    def find(self, draft: Draft) -> Iterator[Match | Refusal]:
        for op in draft.ops:
            factor = _factor(draft, op)
            if factor is None:
                continue
            source = draft.producer(factor[0])
            if isinstance(source, Propagate) and source.is_linear and draft.is_read_once(source.output):
                yield Match(
                    op.where,
                    f"{op.label}: rows scaled in the propagation's store",
                    partial(_after, draft, op, factor[1], source),
                )
                continue
            readers = draft.readers(op.outputs[0])
            inside = [reader for reader in readers if isinstance(reader, Propagate) and _takes(reader, op.outputs[0])]
            if readers and len(inside) == len(readers) and op.outputs[0] != draft.output:
                yield Match(
                    op.where,
                    f"{op.label}: columns scaled by the propagation",
                    partial(_before, draft, factor, inside),
                )


def _factor(draft: Draft, op: Op) -> tuple[Ref, Tensor | float] | None:
    """What an op scales, and by what constant: float [N] or a number."""
    if isinstance(op, Map) and op.function in ("scale", "neg") and draft.value(op.output).space == "node":
        return op.x, op.arguments[0] if op.function == "scale" else -1.0
    if not isinstance(op, Binary) or op.operation not in ("mul", "div"):
        return None
    if is_constant_scale(draft, op.b):
        constant = draft.constants[op.b.index].reshape(-1)
        return op.a, constant if op.operation == "mul" else 1 / constant
    if op.operation == "mul" and is_constant_scale(draft, op.a):
        return op.b, draft.constants[op.a.index].reshape(-1)
    return None


def _takes(reader: Propagate, ref: Ref) -> bool:
    return reader.x == ref and reader.reduce in ("sum", "mean") and reader.reads().count(ref) == 1


def _joined(draft: Draft, known: Ref | None, factor: Tensor | float) -> Ref:
    """A constant [N, 1] that is the product of a scale that is there and another."""
    degrees = draft.graph.adjacency.in_degrees
    scale = degrees.new_ones(degrees.shape, dtype=draft.values[0].dtype)
    if known is not None:
        scale = draft.constants[known.index].reshape(-1)
    product = scale * factor
    return draft.new_constant(product.reshape(-1, 1), "node")


def _after(draft: Draft, op: Op, factor: Tensor | float, source: Propagate) -> None:
    scale = _joined(draft, source.row_scale, factor)
    draft.replace([source, op], [dataclasses.replace(source, output=op.outputs[0], row_scale=scale)])


def _before(draft: Draft, factor: tuple[Ref, Tensor | float], readers: list[Propagate]) -> None:
    for reader in readers:
        scale = _joined(draft, reader.col_scale, factor[1])
        draft.replace([reader], [dataclasses.replace(reader, x=factor[0], col_scale=scale)])
