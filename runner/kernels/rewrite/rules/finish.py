"""Epilogues (T8): bias, activation and dropout are done where a value is stored."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from runner.kernels.opgraph import Op, Ref
from runner.kernels.rewrite.draft import Draft
from runner.kernels.rewrite.engine import Match, Refusal
from runner.kernels.rewrite.ops import Attend, Binary, Dropout, Finish, Linear, Map, Propagate, SparseProduct, View

Finishing = Propagate | SparseProduct | Finish
_ACTIVATIONS = ("relu", "elu", "leaky_relu")


@dataclass(frozen=True)
class Epilogue:
    """What follows a kernel element by element is done in its store; what follows a product or an attention, in one pass."""

    name: str = "T8 epilogue"
    family: str = "epilogue"

    def find(self, draft: Draft) -> Iterator[Match | Refusal]:
        for op in draft.ops:
            source = _source(draft, op)
            if source is None:
                continue
            if isinstance(source, Finishing):
                joined = _joined(draft, source, op)
                if joined is not None:
                    yield Match(op.where, f"{op.label} in the store of {source.label}", lambda op=op, s=source, j=joined: draft.replace([s, op], [j]))
            elif (alone := _alone(draft, source, op)) is not None:
                yield Match(op.where, f"{op.label} in one pass", lambda op=op, a=alone: draft.replace([op], [a]))


def _source(draft: Draft, op: Op) -> Op | None:
    """What makes the value that an op alone reads, where the op works element by element."""
    if isinstance(op, Map) and op.function in _ACTIVATIONS or isinstance(op, Dropout):
        x = op.x
    elif isinstance(op, Binary) and op.operation == "add" and (found := _bias(draft, op)) is not None:
        x = found[0]
    else:
        return None
    return draft.producer(x) if draft.is_read_once(x) and draft.value(x).space == "node" else None


def _bias(draft: Draft, op: Binary) -> tuple[Ref, Ref] | None:
    """(value, bias) where one side of a sum has the shape of a row."""
    for x, bias in ((op.a, op.b), (op.b, op.a)):
        shape, row = draft.value(bias).shape, draft.value(x).shape[1:]
        is_row = shape in (row, (1, *row))
        if draft.value(bias).space == "dense" and is_row and draft.value(x).shape == draft.value(op.output).shape:
            return x, bias
    return None


def _joined(draft: Draft, source: Finishing, op: Op) -> Finishing | None:
    """The source with an op done in its store; None where what it does there already comes later."""
    is_bare = source.activation == "identity" and source.drop is None
    fields: dict[str, object] = {}
    if isinstance(op, Binary) and is_bare and source.bias is None and (found := _bias(draft, op)):
        fields = {"bias": found[1]}
    elif isinstance(op, Map) and is_bare:
        fields = {"activation": op.function, "slope": op.arguments[0] if op.arguments else 0.0}
    elif isinstance(op, Dropout) and source.drop is None:
        fields = {"drop": op.drop}
    return dataclasses.replace(source, output=op.outputs[0], **fields) if fields else None  # type: ignore[arg-type]


def _alone(draft: Draft, source: Op | None, op: Op) -> Finish | None:
    """A pass of its own behind a product, an attention, or what else gives a value of nodes."""
    x = op.x if isinstance(op, Map | Dropout) else op.reads()[0]
    if not isinstance(source, Linear | Attend | View | Binary):
        return None
    start = Finish(output=op.outputs[0], where=op.where, x=x)
    if isinstance(op, Binary):
        found = _bias(draft, op)
        assert found is not None
        return dataclasses.replace(start, x=found[0], bias=found[1])
    joined = _joined(draft, start, op)
    return joined if isinstance(joined, Finish) else None


@dataclass(frozen=True)
class ViewLast:
    """A change of a row's shape moves behind what works element by element, so that it isn't in the way."""

    name: str = "T8 view"
    family: str = "epilogue"

    def find(self, draft: Draft) -> Iterator[Match | Refusal]:
        for op in draft.ops:
            view = draft.producer(op.x) if isinstance(op, Map | Dropout) else None
            if isinstance(view, View) and isinstance(op, Map | Dropout) and draft.is_read_once(view.output):
                yield Match(op.where, f"{op.label} before the view", lambda op=op, v=view: _swap(draft, op, v))


def _swap(draft: Draft, op: Map | Dropout, view: View) -> None:
    first = dataclasses.replace(op, x=view.x, output=draft.like(view.x))
    draft.replace([view, op], [first, dataclasses.replace(view, x=first.output, output=op.output)])
