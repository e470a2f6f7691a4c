"""What a program computes once: values that depend on the graph and the features only, and the layouts of fixed matrices.

They belong to one prepared program. A value is kept for the features that it was made of: other features, or the same tensor changed in
place, and it is made anew. The graph can't change: an :class:`~runner.kernels.adjacency.Adjacency` is frozen, and another graph is
another program. Train and evaluation mode share what is equal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor

from runner.kernels.opgraph import Aggregate, EdgeApply, EdgeSoftmax, Op, Ref
from runner.kernels.rewrite.draft import Draft

Made = TypeVar("Made")


class Invariants:
    """The owner of a program's kept values."""

    def __init__(self) -> None:
        self._features: Tensor | None = None
        self._version = -1
        self._values: dict[Hashable, Any] = {}
        self._layouts: dict[Hashable, Any] = {}

    def follow(self, features: Tensor) -> None:
        """Forget what was made of other features than these, or of these before they were changed in place."""
        if features is not self._features or features._version != self._version:
            self._values.clear()
            self._features, self._version = features, features._version

    def value(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """Return what is kept of the features under a key, made where it is missing."""
        if key not in self._values:
            with torch.no_grad():
                self._values[key] = make()
        found: Made = self._values[key]
        return found

    def layout(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """Return what is kept of the graph under a key, made where it is missing."""
        if key not in self._layouts:
            with torch.no_grad():
                self._layouts[key] = make()
        found: Made = self._layouts[key]
        return found

    @property
    def num_bytes(self) -> int:
        """What is kept, in bytes."""
        held = [*self._values.values(), *self._layouts.values()]
        return sum(entry.nbytes if isinstance(entry, Tensor) else entry.num_bytes for entry in held)

    def clear(self) -> None:
        """Forget everything."""
        self._features, self._version = None, -1
        self._values.clear()
        self._layouts.clear()


def expression(draft: Draft, ref: Ref) -> Hashable:
    """Return what a fixed value is made of, equal for equal values of any draft of one program; features are ``X``."""
    if ref == draft.graph.features:
        return "X"
    if ref.index in draft.constants:
        constant = draft.constants[ref.index]
        return "constant", tuple(constant.shape), str(constant.dtype), _digest(constant)
    op = next(op for op in draft.prologue if ref in op.outputs)
    return (op.label, _settings(op), *(expression(draft, read) for read in op.reads()))


def _settings(op: Op) -> Hashable:
    if isinstance(op, EdgeApply | Aggregate):
        return op.operation, op.relation, tuple(operand.target for operand in op.operands)
    if isinstance(op, EdgeSoftmax):
        return op.norm_by, op.relation
    fields = {name: value for name, value in op.__dict__.items() if name not in ("output", "where")}
    return tuple((name, value if not isinstance(value, Ref) else "") for name, value in fields.items())


def _digest(constant: Tensor) -> Hashable:
    return hashlib.sha256(constant.detach().contiguous().cpu().numpy().tobytes()).digest()
