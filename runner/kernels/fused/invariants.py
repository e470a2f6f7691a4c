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
        self._numbers: dict[Hashable, int] = {}

    def number(self, expression: Hashable) -> int:
        """Return a number, the same for equal expressions."""
        return self._numbers.setdefault(expression, len(self._numbers))

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

    def has(self, key: Hashable) -> bool:
        """Whether something is kept of the features under a key."""
        return key in self._values

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


class Expressions:
    """What the fixed values of a draft are made of, as numbers: equal for equal values of any draft of one program.

    An expression is told by the numbers of its parts, so that its size doesn't grow with what it is made of.

    Args:
        draft: whose constants and prologue they are.
        invariants: gives the numbers.
    """

    def __init__(self, draft: Draft, invariants: Invariants) -> None:
        self._draft, self._invariants = draft, invariants
        self._numbers = {draft.graph.features.index: invariants.number("features")}
        for op in draft.prologue:
            (output,) = op.outputs
            self._numbers[output.index] = invariants.number((op.label, _settings(op), *map(self.__call__, op.reads())))

    def __call__(self, ref: Ref) -> int:
        """Return the number of the features, a constant, or a value of the prologue."""
        if ref.index not in self._numbers:
            constant = self._draft.constants[ref.index]
            told = "constant", tuple(constant.shape), str(constant.dtype), _digest(constant)
            self._numbers[ref.index] = self._invariants.number(told)
        return self._numbers[ref.index]


def _settings(op: Op) -> Hashable:
    if isinstance(op, EdgeApply | Aggregate):
        return op.operation, op.relation, tuple(operand.target for operand in op.operands)
    if isinstance(op, EdgeSoftmax):
        return op.norm_by, op.relation
    fields = {name: value for name, value in op.__dict__.items() if name not in ("output", "where")}
    return tuple((name, value if not isinstance(value, Ref) else "") for name, value in fields.items())


def _digest(constant: Tensor) -> Hashable:
    return hashlib.sha256(constant.detach().contiguous().cpu().numpy().tobytes()).digest()
