"""Epilogues (T8): bias, activation and dropout are done where a value is stored."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from runner.kernels.opgraph import Op, Ref
from runner.kernels.rewrite.draft import Draft
from runner.kernels.rewrite.engine import Match, Refusal
from runner.kernels.rewrite.made import Attend, Finish, Finishing, Propagate
from runner.kernels.rewrite.ops import Binary, Dropout, Linear, Map, View

_ACTIVATIONS = ("relu", "elu", "leaky_relu")


@dataclass(frozen=True)
class Epilogue:
    """What follows a kernel element by element is done in its store; what follows a product or an attention, in one pass."""

    name: str = "T8 epilogue"
    family: str = "epilogue"

    def find(self, draft: Draft) -> Iterator[Match | Refusal]:
        for op in draft.ops:
            for x, fields in _what_follows(draft, op):
                source = draft.producer(x)
                if not draft.is_read_once(x) or draft.value(x).space != "node":
                    continue
                if isinstance(source, Finishing) and _has_room(source, fields):
                    joined = dataclasses.replace(source, output=op.outputs[0], **fields)
                    what = f"{op.label} in the store of {source.label}"
                    yield Match(op.where, what, partial(draft.replace, [source, op], [joined]))
                elif (alone := _alone(draft, source, op, x, fields)) is not None:
                    yield Match(op.where, f"{op.label} in one pass", partial(draft.replace, *alone))


_Fields = dict[str, Any]


def _what_follows(draft: Draft, op: Op) -> Iterator[tuple[Ref, _Fields]]:
    """Yield (value, what is done to it) for an op that works element by element; a sum can be read in two ways."""
    if not op.grad:
        return
    match op:
        case Map() if op.function in _ACTIVATIONS:
            yield op.x, {"activation": op.function, "slope": op.arguments[0] if op.arguments else 0.0}
        case Dropout():
            yield op.x, {"drop": op.drop}
        case Binary(operation="add"):
            for x, other in ((op.a, op.b), (op.b, op.a)):
                if draft.value(x).shape != draft.value(op.output).shape:
                    continue
                if _is_row(draft, other, x):
                    yield x, {"bias": other}
                elif draft.value(other).shape == draft.value(x).shape and isinstance(draft.producer(x), Propagate):
                    yield x, _addend(draft, other)


def _is_row(draft: Draft, bias: Ref, x: Ref) -> bool:
    row = draft.value(x).shape[1:]
    return draft.value(bias).space == "dense" and draft.value(bias).shape in (row, (1, *row))


def _addend(draft: Draft, ref: Ref) -> _Fields:
    """An addend, its scale apart where it has one number as such."""
    op = draft.producer(ref)
    if isinstance(op, Binary) and op.operation == "mul" and draft.is_read_once(ref):
        for scale, x in ((op.a, op.b), (op.b, op.a)):
            is_number = draft.value(scale).space == "dense" and math.prod(draft.value(scale).shape) == 1
            if is_number and draft.value(x).shape == draft.value(ref).shape:
                return {"addend": x, "addend_scale": scale}
    return {"addend": ref}


def _has_room(source: Finishing, fields: _Fields) -> bool:
    """Whether a store can do something more, after all that it does already."""
    if "drop" in fields:
        return source.drop is None
    if not source.is_open:
        return False
    is_sum = isinstance(source, Propagate) and source.reduce == "sum"
    if "addend" in fields:
        return source.addend is None and is_sum
    return "activation" in fields or source.bias is None


def _alone(draft: Draft, source: Op | None, op: Op, x: Ref, fields: _Fields) -> tuple[list[Op], list[Op]] | None:
    """A pass of its own behind a product, an attention or a sum of two values: (what goes, what comes)."""
    if "addend" in fields or not isinstance(source, Linear | Attend | View | Binary):
        return None
    shape = draft.value(x).shape
    if (
        isinstance(source, Binary)
        and source.operation == "add"
        and draft.value(source.a).shape == draft.value(source.b).shape == shape
    ):
        joined = Finish(output=op.outputs[0], where=op.where, x=source.a, addend=source.b, **fields)
        return [source, op], [joined]
    return [op], [Finish(output=op.outputs[0], where=op.where, x=x, **fields)]


@dataclass(frozen=True)
class ViewLast:
    """A change of a row's shape moves behind what works element by element, so that it isn't in the way."""

    name: str = "T8 view"
    family: str = "epilogue"

    def find(self, draft: Draft) -> Iterator[Match | Refusal]:
        for op in draft.ops:
            view = draft.producer(op.x) if isinstance(op, Map | Dropout) and op.grad else None
            if isinstance(view, View) and isinstance(op, Map | Dropout) and draft.is_read_once(view.output):
                yield Match(op.where, f"{op.label} before the view", partial(_swap, draft, op, view))


def _swap(draft: Draft, op: Map | Dropout, view: View) -> None:
    first = dataclasses.replace(op, x=view.x, output=draft.like(view.x))
    draft.replace([view, op], [first, dataclasses.replace(view, x=first.output, output=op.output)])
