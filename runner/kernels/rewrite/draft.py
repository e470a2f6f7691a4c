"""An op graph that is being rewritten: ops come and go, values keep their numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from runner.kernels.opgraph import Call, Op, Operand, OpGraph, Ref, Space, Value, replace_leaves, trainable

OpT = TypeVar("OpT", bound=Op)


class Draft:
    """A mutable copy of an op graph.

    Attributes:
        graph: what it was made from; its values, leaves and constants stay, and new values are added to the draft's own lists.
        values, constants, ops, output: as in :class:`~runner.kernels.opgraph.OpGraph`.
        prologue: ops that run once for the features that are given, before the others.
    """

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph
        self.values = list(graph.values)
        self.constants = dict(graph.constants)
        self.ops: list[Op] = list(graph.ops)
        self.output = graph.output
        self.prologue: list[Op] = []
        self._producers: dict[int, Op] | None = None
        self._readers: dict[int, list[Op]] | None = None
        self._trainable: frozenset[int] | None = None

    # --- looking ---------------------------------------------------------------------------------------------------------

    def value(self, ref: Ref) -> Value:
        """What is known of a value."""
        return self.values[ref.index]

    def producer(self, ref: Ref | None) -> Op | None:
        """The op that makes a value; None for inputs, and for values of the prologue."""
        if self._producers is None:
            self._producers = {output.index: op for op in self.ops for output in op.outputs}
        return None if ref is None else self._producers.get(ref.index)

    def readers(self, ref: Ref) -> list[Op]:
        """The ops that read a value, each once a time it reads it; the graph's output counts as no op."""
        if self._readers is None:
            self._readers = {}
            for op in self.ops:
                for read in op.reads():
                    self._readers.setdefault(read.index, []).append(op)
        return self._readers.get(ref.index, [])

    def is_read_once(self, ref: Ref) -> bool:
        """Whether a single op reads a value, and it isn't the output."""
        return len(self.readers(ref)) == 1 and ref != self.output

    @property
    def is_fixed(self) -> frozenset[int]:
        """Numbers of the values that depend on the graph and the features only: features, constants, values of the prologue."""
        made = {output.index for op in self.prologue for output in op.outputs}
        return frozenset({self.graph.features.index, *self.constants, *made})

    def is_trainable(self, ref: Ref) -> bool:
        """Whether a gradient flows through a value."""
        if self._trainable is None:
            self._trainable = trainable(self.graph.leaves, self.ops)
        return ref.index in self._trainable

    # --- changing --------------------------------------------------------------------------------------------------------

    def new_value(self, space: Space, shape: Sequence[int], dtype: torch.dtype) -> Ref:
        """Add a value and return its number."""
        self.values.append(Value(space, tuple(shape), dtype))
        return Ref(len(self.values) - 1)

    def new_constant(self, tensor: Tensor, space: Space) -> Ref:
        """Add a constant and return its number."""
        ref = self.new_value(space, tensor.shape, tensor.dtype)
        self.constants[ref.index] = tensor
        return ref

    def like(self, ref: Ref, width: int | None = None) -> Ref:
        """Add a value of the space and dtype of another, and of its shape, or [rows, width]."""
        value = self.value(ref)
        return self.new_value(value.space, value.shape if width is None else (value.shape[0], width), value.dtype)

    def replace(self, old: Sequence[Op], new: Sequence[Op], at_first: bool = False) -> None:
        """Put new ops where the last (or the first) of the old ones was; what these made is made by the new ones, or read by nobody."""
        gone = {id(op) for op in old}
        places = [at for at, op in enumerate(self.ops) if id(op) in gone]
        place = places[0] if at_first else places[-1]
        before = [op for op in self.ops[:place] if id(op) not in gone]
        after = [op for op in self.ops[place:] if id(op) not in gone]
        self.ops = [*before, *new, *after]
        self._forget()

    def rename(self, old: Ref, new: Ref) -> None:
        """Let everything that reads one value read another."""
        self.ops = [reading(op, {old.index: new}) for op in self.ops]
        self.prologue = [reading(op, {old.index: new}) for op in self.prologue]
        self.output = new if self.output == old else self.output
        self._forget()

    def prune(self) -> None:
        """Drop what nothing needs; calls that change a buffer are needed."""
        needed, kept = {self.output.index}, []
        for op in reversed(self.ops):
            if (isinstance(op, Call) and op.is_in_place) or any(ref.index in needed for ref in op.outputs):
                needed.update(ref.index for ref in op.reads())
                kept.append(op)
        self.ops = kept[::-1]
        made: list[Op] = []
        for op in reversed(self.prologue):
            if any(ref.index in needed for ref in op.outputs):
                needed.update(ref.index for ref in op.reads())
                made.append(op)
        self.prologue = made[::-1]
        self._forget()

    def copy(self) -> Draft:
        """Return a draft that can be changed without changing this one."""
        twin = Draft(self.graph)
        twin.values, twin.constants = list(self.values), dict(self.constants)
        twin.ops, twin.prologue, twin.output = list(self.ops), list(self.prologue), self.output
        return twin

    def finish(self) -> OpGraph:
        """Return the op graph, with the prologue in front."""
        used = {ref.index for op in (*self.prologue, *self.ops) for ref in op.reads()} | {self.output.index}
        return dataclasses.replace(
            self.graph,
            values=self.values,
            leaves={index: leaf for index, leaf in self.graph.leaves.items() if index in used},
            constants={index: constant for index, constant in self.constants.items() if index in used},
            ops=[*self.prologue, *self.ops],
            output=self.output,
        )

    def _forget(self) -> None:
        self._producers = self._readers = self._trainable = None


def reading(op: OpT, names: Mapping[int, Ref]) -> OpT:
    """Return an op that reads other values where ``names`` has them."""
    if not any(ref.index in names for ref in op.reads()):
        return op

    def changed(ref: Ref) -> Ref:
        return names.get(ref.index, ref)

    def replaced(given: Any) -> Any:
        return replace_leaves(
            replace_leaves(given, Operand, lambda operand: dataclasses.replace(operand, ref=changed(operand.ref))),
            Ref,
            changed,
        )

    fields = [field.name for field in dataclasses.fields(op) if field.name not in ("output", "outputs")]  # type: ignore[arg-type]
    return dataclasses.replace(op, **{name: replaced(getattr(op, name)) for name in fields})  # type: ignore[type-var]
