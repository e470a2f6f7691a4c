"""The typed ops that rewrites work on, each with its meaning in plain torch.

Torch calls of a captured graph become these ops where :mod:`runner.kernels.rewrite.canonical` knows them; what rewrites make of them, and
strategies have kernels for, is in :mod:`runner.kernels.rewrite.made`. ``plain`` is what an op means, in any dtype: the reference of its
kernel.

Legend: N nodes, E edges, F features, H heads, C channels a head. A value's rows are its first dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from runner.kernels import reference
from runner.kernels.adjacency import Adjacency
from runner.kernels.opgraph import Ref
from runner.kernels.parameters import kept
from runner.kernels.seeds import Seeds

MAPS: dict[str, Callable[..., Tensor]] = {
    "relu": F.relu,
    "leaky_relu": lambda x, slope: F.leaky_relu(x, slope),
    "elu": lambda x, alpha: F.elu(x, alpha),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softplus": F.softplus,
    "silu": F.silu,
    "exp": torch.exp,
    "log": torch.log,
    "log1p": torch.log1p,
    "sqrt": torch.sqrt,
    "abs": torch.abs,
    "neg": torch.neg,
    "square": torch.square,
    "scale": lambda x, factor: x * factor,
    "shift": lambda x, term: x + term,
}
BINARIES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
}


@dataclass(frozen=True)
class Drop:
    """A dropout that is switched on.

    Attributes:
        probability: of an element being dropped, inside (0, 1).
        number: which dropout of the forward it is, from 0; its seed goes by that.
    """

    probability: float
    number: int

    def mask(self, rows: Tensor, num_columns: int, seeds: Seeds) -> Tensor:
        """Return which elements are kept, bool [n, num_columns]; see :func:`runner.kernels.parameters.kept`."""
        return kept(rows, num_columns, self.probability, seeds(self.number))

    def apply(self, x: Tensor, seeds: Seeds) -> Tensor:
        """Drop elements of x [N, …] in plain torch."""
        rows = torch.arange(x.shape[0], device=x.device)
        mask = self.mask(rows, x.shape[1:].numel(), seeds).view(x.shape)
        return x * mask / (1 - self.probability)


@dataclass(frozen=True, eq=False, kw_only=True)
class TypedOp:
    """What all typed ops have: one output, where in the model's code it comes from, and, where it passes messages, on which relation."""

    output: Ref
    where: str
    grad: bool = True
    relation: int = 0

    @property
    def outputs(self) -> tuple[Ref, ...]:
        """The output, as other ops have theirs."""
        return (self.output,)

    @property
    def label(self) -> str:
        """What it does, in a word or two."""
        raise AssertionError

    def reads(self) -> tuple[Ref, ...]:
        """The values that it reads, in the order in which ``plain`` takes them."""
        raise AssertionError

    def plain(self, adjacency: Adjacency, seeds: Seeds, *tensors: Tensor) -> Tensor:  # noqa: ARG002
        """Compute it in plain torch."""
        raise AssertionError

    @property
    def obstacle(self) -> str | None:
        """Why a product from the right can't pass, where that is tempting."""
        return None

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers."""
        return any(isinstance(value, Drop) for value in self.__dict__.values())

    def key(self) -> tuple[Any, ...] | None:
        """What two ops share that give the same value; None where they never do."""
        if self.draws:
            return None
        settings = tuple(value for name, value in self.__dict__.items() if name not in ("output", "where"))
        return (type(self), *settings)


@dataclass(frozen=True, eq=False, kw_only=True)
class Linear(TypedOp):
    """``x W + b``; ``is_turned``: W is stored as [Fo, Fi], as torch's layers do."""

    x: Ref
    weight: Ref
    bias: Ref | None = None
    is_turned: bool = False

    @property
    def label(self) -> str:
        return "linear"

    def reads(self) -> tuple[Ref, ...]:
        return tuple(ref for ref in (self.x, self.weight, self.bias) if ref is not None)

    def plain(self, adjacency: Adjacency, seeds: Seeds, *tensors: Tensor) -> Tensor:  # noqa: ARG002
        x, weight, *bias = tensors
        return F.linear(x, weight if self.is_turned else weight.t(), bias[0] if bias else None)


@dataclass(frozen=True, eq=False, kw_only=True)
class Map(TypedOp):
    """A function of each element; ``arguments`` are its numbers."""

    x: Ref
    function: str
    arguments: tuple[float, ...] = ()

    @property
    def label(self) -> str:
        return " ".join([self.function, *(f"{argument:g}" for argument in self.arguments)])

    def reads(self) -> tuple[Ref, ...]:
        return (self.x,)

    def plain(self, adjacency: Adjacency, seeds: Seeds, *tensors: Tensor) -> Tensor:  # noqa: ARG002
        return MAPS[self.function](*tensors, *self.arguments)


@dataclass(frozen=True, eq=False, kw_only=True)
class Binary(TypedOp):
    """Sum, difference, product or quotient, element by element, shapes broadcast as torch does."""

    operation: str
    a: Ref
    b: Ref

    @property
    def label(self) -> str:
        return self.operation

    def reads(self) -> tuple[Ref, ...]:
        return (self.a, self.b)

    def plain(self, adjacency: Adjacency, seeds: Seeds, *tensors: Tensor) -> Tensor:  # noqa: ARG002
        return BINARIES[self.operation](*tensors)


@dataclass(frozen=True, eq=False, kw_only=True)
class View(TypedOp):
    """The same elements, each row in another shape."""

    x: Ref
    shape: tuple[int, ...]

    @property
    def label(self) -> str:
        return "view"

    def reads(self) -> tuple[Ref, ...]:
        return (self.x,)

    def plain(self, adjacency: Adjacency, seeds: Seeds, *tensors: Tensor) -> Tensor:  # noqa: ARG002
        return tensors[0].reshape(tensors[0].shape[0], *self.shape)


@dataclass(frozen=True, eq=False, kw_only=True)
class Total(TypedOp):
    """Sum (or mean) over some dimensions of each row; ``dims`` are counted with the rows as 0."""

    x: Ref
    dims: tuple[int, ...]
    keeps_dims: bool
    is_mean: bool = False

    @property
    def label(self) -> str:
        return "mean" if self.is_mean else "sum"

    def reads(self) -> tuple[Ref, ...]:
        return (self.x,)

    def plain(self, adjacency: Adjacency, seeds: Seeds, *tensors: Tensor) -> Tensor:  # noqa: ARG002
        reduce = torch.mean if self.is_mean else torch.sum
        return reduce(tensors[0], self.dims, self.keeps_dims)


@dataclass(frozen=True, eq=False, kw_only=True)
class Concat(TypedOp):
    """Values [N, F] side by side."""

    parts: tuple[Ref, ...]

    @property
    def label(self) -> str:
        return "concat"

    def reads(self) -> tuple[Ref, ...]:
        return self.parts

    def plain(self, adjacency: Adjacency, seeds: Seeds, *tensors: Tensor) -> Tensor:  # noqa: ARG002
        return torch.cat(tensors, -1)


@dataclass(frozen=True, eq=False, kw_only=True)
class Dropout(TypedOp):
    """Dropout by seed: element (row, column) of a value is kept or not, whatever computes it."""

    x: Ref
    drop: Drop

    @property
    def label(self) -> str:
        return f"dropout {self.drop.probability:g}"

    def reads(self) -> tuple[Ref, ...]:
        return (self.x,)

    def plain(self, adjacency: Adjacency, seeds: Seeds, *tensors: Tensor) -> Tensor:  # noqa: ARG002
        return self.drop.apply(tensors[0], seeds)


@dataclass(frozen=True, eq=False, kw_only=True)
class TypedLinear(TypedOp):
    """``x[e] W[types[e]]``: rows of several types, a weight for each."""

    x: Ref
    weight: Ref
    types: Ref

    @property
    def label(self) -> str:
        return "linear by type"

    def reads(self) -> tuple[Ref, ...]:
        return (self.x, self.weight, self.types)

    def plain(self, adjacency: Adjacency, seeds: Seeds, *tensors: Tensor) -> Tensor:  # noqa: ARG002
        return reference.typed_linear(*tensors)
