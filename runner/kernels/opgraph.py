"""A model's forward as typed ops over node, edge and dense values. The graph is a constant in it.

Legend: N nodes, E edges, F features. A value's space says what its first dimension is: ``node`` (N rows), ``edge`` (E rows,
in the order of the edge ids), ``dense`` (neither: weights, scalars).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from runner.kernels.adjacency import Adjacency

Space = Literal["node", "edge", "dense"]
Target = Literal["u", "v", "e"]
Leaf = TypeVar("Leaf")


@dataclass(frozen=True)
class Ref:
    """A value's number; stands for the value among an op's arguments."""

    index: int


@dataclass(frozen=True)
class Value:
    """What is known of a value: its space and, from the capturing run, shape and dtype."""

    space: Space
    shape: tuple[int, ...]
    dtype: torch.dtype
    name: str = ""


@dataclass(frozen=True)
class Operand:
    """One side of a message: a value, read at an edge's source (u), destination (v) or at the edge itself (e)."""

    ref: Ref
    target: Target


class Op(Protocol):
    """What an op graph is made of.

    Attributes:
        where: the place in the model's code.
        grad: whether it ran with gradients.
    """

    @property
    def outputs(self) -> tuple[Ref, ...]:
        """The values that it makes."""
        ...

    @property
    def where(self) -> str: ...

    @property
    def grad(self) -> bool: ...

    @property
    def label(self) -> str:
        """What it does, in a word or two."""
        ...

    def reads(self) -> Sequence[Ref]:
        """Return the values that it reads."""
        ...


@dataclass(frozen=True, eq=False)
class Call:
    """A torch call; ``args`` and ``kwargs`` hold Refs where it had tensors. Like every op it ran with or without gradients."""

    outputs: tuple[Ref, ...]
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    where: str
    grad: bool = True

    @property
    def label(self) -> str:
        """The torch function's name."""
        return getattr(self.function, "__name__", str(self.function))

    @property
    def is_in_place(self) -> bool:
        """Whether it changes a tensor that it is given."""
        name = self.label
        is_operator = name in (
            "__iadd__",
            "__isub__",
            "__imul__",
            "__itruediv__",
            "__ifloordiv__",
            "__imod__",
            "__ipow__",
            "__setitem__",
        )
        return "out" in self.kwargs or is_operator or (name.endswith("_") and not name.endswith("__"))

    def reads(self) -> list[Ref]:
        return list(leaves((self.args, self.kwargs), Ref))


@dataclass(frozen=True, eq=False)
class EdgeApply:
    """An edge value from the values at its ends: ``operation`` is copy, add, sub, mul, div or dot (over the last dimension)."""

    outputs: tuple[Ref, ...]
    operation: str
    operands: tuple[Operand, ...]
    where: str
    grad: bool = True
    relation: int = 0

    @property
    def label(self) -> str:
        """In DGL's manner: ``u_add_v``."""
        return message_name(self.operation, self.operands)

    def reads(self) -> list[Ref]:
        return [operand.ref for operand in self.operands]


@dataclass(frozen=True, eq=False)
class Aggregate:
    """Messages (as in :class:`EdgeApply`) reduced at each destination: sum, mean, max or min; 0 where there are none."""

    outputs: tuple[Ref, ...]
    operation: str
    operands: tuple[Operand, ...]
    reduce: str
    where: str
    grad: bool = True
    relation: int = 0

    @property
    def label(self) -> str:
        """In DGL's manner: ``copy_u → sum``."""
        return f"{message_name(self.operation, self.operands)} → {self.reduce}"

    def reads(self) -> list[Ref]:
        return [operand.ref for operand in self.operands]


@dataclass(frozen=True, eq=False)
class EdgeSoftmax:
    """Softmax of an edge value over the edges with the same destination (``norm_by`` dst) or source (src)."""

    outputs: tuple[Ref, ...]
    logits: Ref
    norm_by: str
    where: str
    grad: bool = True
    relation: int = 0

    label = "edge_softmax"

    def reads(self) -> list[Ref]:
        return [self.logits]


def message_name(operation: str, operands: tuple[Operand, ...]) -> str:
    """Return DGL's name of a message function."""
    targets = [operand.target for operand in operands]
    return f"copy_{targets[0]}" if operation == "copy" else f"{targets[0]}_{operation}_{targets[1]}"


def leaves(structure: Any, kind: type[Leaf]) -> Iterator[Leaf]:
    """Yield what is of a kind in nested lists, tuples and dicts: the Refs or the tensors among a call's arguments."""
    if isinstance(structure, kind):
        yield structure
    elif isinstance(structure, list | tuple):
        for entry in structure:
            yield from leaves(entry, kind)
    elif isinstance(structure, dict):
        yield from leaves(list(structure.values()), kind)


def replace_leaves(structure: Any, kind: type[Leaf], change: Callable[[Leaf], Any]) -> Any:
    """Return nested lists, tuples and dicts with everything of a kind changed."""
    if isinstance(structure, kind):
        return change(structure)
    if isinstance(structure, list | tuple):
        changed = [replace_leaves(entry, kind, change) for entry in structure]
        return changed if isinstance(structure, list) else tuple(changed)
    if isinstance(structure, dict):
        return {key: replace_leaves(entry, kind, change) for key, entry in structure.items()}
    return structure


def trainable(leaves: Mapping[int, Tensor], ops: Iterable[Op]) -> frozenset[int]:
    """Return the numbers of the values that a gradient flows through: parameters, and what ops, in their order, make of them."""
    found = {index for index, tensor in leaves.items() if tensor.requires_grad}
    for op in ops:
        if any(ref.index in found for ref in op.reads()):
            found.update(ref.index for ref in op.outputs)
    return frozenset(found)


@dataclass(frozen=True, eq=False)
class OpGraph:
    """A captured forward: ``features -> output``.

    Attributes:
        adjacency: the graph; of one with several relations, the first.
        values: what each number stands for.
        features: the input.
        leaves: parameters and buffers by value number, the module's own tensors, so that both see each update.
        constants: tensors that depend on the graph only, in the graph's own order of nodes and edges.
        ops: in an order that executes.
        output: the result.
        relations: of a graph with several, each; ``relation`` of an op that passes messages says which it uses.
    """

    adjacency: Adjacency
    values: list[Value]
    features: Ref
    leaves: dict[int, Tensor]
    constants: dict[int, Tensor]
    ops: list[Op] = field(default_factory=list)
    output: Ref = field(default_factory=lambda: Ref(-1))
    relations: tuple[Adjacency, ...] = ()

    def adjacency_of(self, op: Op) -> Adjacency:
        """Return the graph that an op passes messages on."""
        return self.relations[getattr(op, "relation", 0)] if self.relations else self.adjacency

    @property
    def num_edges(self) -> frozenset[int]:
        """How many edges a value of edges may have rows for."""
        return frozenset(graph.num_edges for graph in self.relations or (self.adjacency,))

    @cached_property
    def trainable(self) -> frozenset[int]:
        """Numbers of the values that a gradient flows through: those that depend on a parameter."""
        return trainable(self.leaves, self.ops)

    def bound_to(self, leaves: dict[str, Tensor], adjacency: Adjacency) -> OpGraph:
        """Return the same ops where ``adjacency``, the same graph, is; parameters and buffers are taken by name from ``leaves``."""
        device = adjacency.device

        def moved(argument: Any) -> Any:
            return replace_leaves(argument, torch.device, lambda _: device)

        ops = [
            dataclasses.replace(op, args=moved(op.args), kwargs=moved(op.kwargs)) if isinstance(op, Call) else op
            for op in self.ops
        ]
        return dataclasses.replace(
            self,
            adjacency=adjacency,
            leaves={index: leaves[self.values[index].name] for index in self.leaves},
            constants={index: constant.to(device) for index, constant in self.constants.items()},
            ops=ops,
        )

    def renumbered(self, adjacency: Adjacency, order: Tensor) -> OpGraph:
        """Return the same ops on ``adjacency``, this graph, of one relation, with node ``order[k]`` as node k; edges keep their ids."""
        assert not self.relations
        constants = {
            index: constant[order] if self.values[index].space == "node" else constant
            for index, constant in self.constants.items()
        }
        return dataclasses.replace(self, adjacency=adjacency, constants=constants)

    def __str__(self) -> str:
        lines = [f"features {self._describe(self.features)}"]
        lines += [
            f"{self._describe(Ref(index))} = {'parameter' if tensor.requires_grad else 'buffer'} {self.values[index].name}"
            for index, tensor in self.leaves.items()
        ]
        lines += [f"{self._describe(Ref(index))} = constant" for index in self.constants]
        for op in self.ops:
            outputs = ", ".join(self._describe(ref) for ref in op.outputs)
            reads = ", ".join(f"%{ref.index}" for ref in op.reads())
            lines.append(f"{outputs} = {op.label}({reads})   # {op.where}")
        return "\n".join([*lines, f"return %{self.output.index}"])

    def _describe(self, ref: Ref) -> str:
        value = self.values[ref.index]
        return f"%{ref.index}: {value.space}{list(value.shape)}"
