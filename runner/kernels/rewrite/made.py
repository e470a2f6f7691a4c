"""The typed ops that rewrites make, which strategies have kernels for; ``plain`` is what each means.

Legend: N nodes, E edges, F features, H heads, C channels a head. A value's rows are its first dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from runner.kernels import reference
from runner.kernels.adjacency import Adjacency
from runner.kernels.opgraph import Ref
from runner.kernels.parameters import Epilogue, Scoring
from runner.kernels.rewrite.ops import Drop, TypedOp
from runner.kernels.seeds import Seeds


@dataclass(frozen=True, eq=False, kw_only=True)
class Finishing(TypedOp):
    """An op whose store does more: ``dropout(activation(result + addend_scale · addend + bias))``.

    Attributes:
        addend: of the result's shape, or None.
        addend_scale: one number, or None: 1.
        bias: of the shape of a row, ones in front allowed, or None.
        activation, slope: see :class:`runner.kernels.parameters.Epilogue`.
        drop: dropout, or None.
    """

    addend: Ref | None = None
    addend_scale: Ref | None = None
    bias: Ref | None = None
    activation: str = "identity"
    slope: float = 0.0
    drop: Drop | None = None

    @property
    def name(self) -> str:
        """What it does before that."""
        return ""

    @property
    def label(self) -> str:
        parts = [self.name] if self.name else []
        parts += ["add"] if self.addend is not None else []
        parts += ["bias"] if self.bias is not None else []
        parts += [self.activation] if self.activation != "identity" else []
        parts += [f"dropout {self.drop.probability:g}"] if self.drop is not None else []
        return " → ".join(parts)

    @property
    def is_bare(self) -> bool:
        """Whether its store does nothing more."""
        return self.is_open and self.bias is None and self.addend is None

    @property
    def is_open(self) -> bool:
        """Whether more can be added to its result: no activation or dropout follows yet."""
        return self.activation == "identity" and self.drop is None

    def operands(self) -> tuple[Ref | None, ...]:
        """What it reads before that, None for what is missing."""
        raise AssertionError

    def reads(self) -> tuple[Ref, ...]:
        every = (*self.operands(), self.addend, self.addend_scale, self.bias)
        return tuple(ref for ref in every if ref is not None)

    def fill(
        self, tensors: Sequence[Tensor]
    ) -> tuple[list[Tensor | None], Tensor | None, Tensor | None, Tensor | None]:
        """Return (operands, addend, addend_scale, bias) from the tensors that it reads, None for what is missing."""
        given = iter(tensors)
        every = [
            None if ref is None else next(given)
            for ref in (*self.operands(), self.addend, self.addend_scale, self.bias)
        ]
        return every[:-3], every[-3], every[-2], every[-1]

    def epilogue(self, tensors: Sequence[Tensor], seeds: Seeds) -> Epilogue:
        """Return what its store does."""
        _, addend, addend_scale, bias = self.fill(tensors)
        dropout, seed = (0.0, 0) if self.drop is None else (self.drop.probability, seeds(self.drop.number))
        return Epilogue(None, bias, self.activation, self.slope, dropout, seed, addend, addend_scale)


@dataclass(frozen=True, eq=False, kw_only=True)
class Finish(Finishing):
    """Only what a store does, in a pass of its own; x [N, …]."""

    x: Ref

    def operands(self) -> tuple[Ref | None, ...]:
        return (self.x,)

    def plain(self, adjacency: Adjacency, seeds: Seeds, *tensors: Tensor) -> Tensor:  # noqa: ARG002
        return reference.finish(tensors[0], self.epilogue(tensors, seeds))


@dataclass(frozen=True, eq=False, kw_only=True)
class Propagate(Finishing):
    """``row_scale · reduce over edges of weight · col_scale · x[source]``.

    Attributes:
        x: [N, …].
        weight: by edge id: [E], [E, 1, …] or, by head, [E, H, 1]; None: 1.
        row_scale, col_scale: constants [N, 1, …], or None.
        reduce: sum, mean, max or min.
    """

    x: Ref
    weight: Ref | None = None
    row_scale: Ref | None = None
    col_scale: Ref | None = None
    reduce: str = "sum"

    @property
    def name(self) -> str:
        scales = (("row", self.row_scale), ("edge", self.weight), ("column", self.col_scale))
        given = " · ".join(name for name, ref in scales if ref is not None)
        return f"propagate {self.reduce}{f' of {given}' if given else ''}"

    @property
    def is_linear(self) -> bool:
        """Whether nothing follows the reduction but scales, and it is a sum or mean."""
        return self.is_bare and self.reduce in ("sum", "mean")

    def operands(self) -> tuple[Ref | None, ...]:
        return (self.x, self.weight, self.row_scale, self.col_scale)

    def plain(self, adjacency: Adjacency, seeds: Seeds, *tensors: Tensor) -> Tensor:
        x, weight, row_scale, col_scale = self.fill(tensors)[0]
        assert x is not None
        if col_scale is not None:
            x = reference.edge_apply("mul", x, col_scale)
        message = reference.gather(adjacency, x, "u")
        y = reference.aggregate(
            adjacency, message if weight is None else reference.edge_apply("mul", message, weight), self.reduce
        )
        if row_scale is not None:
            y = reference.edge_apply("mul", y, row_scale)
        return reference.finish(y, self.epilogue(tensors, seeds))


@dataclass(frozen=True, eq=False, kw_only=True)
class GraphLinear(Finishing):
    """``A (x W) = (A x) W`` for a propagation A with fixed factors, forward and backward each in an order of its own.

    Attributes:
        x: [N, Fi].
        weight, is_turned: as of :class:`Linear`.
        edge_weight, row_scale, col_scale: as of :class:`Propagate`, constants.
        order, back: of the forward and of the backward: ``propagate first`` or ``transform first``. A backward that transforms first
            propagates the gradient at Fo, and shares that between both operands; one that propagates first does it at Fi, and needs A x.
    """

    x: Ref
    weight: Ref
    is_turned: bool = False
    edge_weight: Ref | None = None
    row_scale: Ref | None = None
    col_scale: Ref | None = None
    order: str = "transform first"
    back: str = "transform first"

    @property
    def name(self) -> str:
        return f"graph linear, {self.order}, backward {self.back}"

    def operands(self) -> tuple[Ref | None, ...]:
        return (self.x, self.weight, self.edge_weight, self.row_scale, self.col_scale)

    def plain(self, adjacency: Adjacency, seeds: Seeds, *tensors: Tensor) -> Tensor:
        x, weight, edge_weight, row_scale, col_scale = self.fill(tensors)[0]
        assert x is not None
        assert weight is not None
        h = F.linear(x, weight if self.is_turned else weight.t())
        h = h if col_scale is None else reference.edge_apply("mul", h, col_scale)
        message = reference.gather(adjacency, h, "u")
        message = message if edge_weight is None else reference.edge_apply("mul", message, edge_weight)
        y = reference.aggregate(adjacency, message, "sum")
        y = y if row_scale is None else reference.edge_apply("mul", y, row_scale)
        return reference.finish(y, self.epilogue(tensors, seeds))


@dataclass(frozen=True, eq=False, kw_only=True)
class Attend(TypedOp):
    """Attention over in-edges: score, softmax and weighted sum; see :class:`runner.kernels.parameters.Scoring`.

    Attributes:
        value: [N, H, C].
        key: gat: [N, H, 1]; dot: [N, H, C]; gatv2: None.
        query: as ``key``; gatv2: [N, H, C].
        vector: gatv2: [1, H, C].
    """

    score: Literal["gat", "gatv2", "dot"]
    value: Ref
    query: Ref
    key_: Ref | None = None
    vector: Ref | None = None
    slope: float = 0.2
    scale: float = 1.0
    drop: Drop | None = None

    @property
    def label(self) -> str:
        return f"attention {self.score}" + (f", dropout {self.drop.probability:g}" if self.drop else "")

    def reads(self) -> tuple[Ref, ...]:
        return tuple(ref for ref in (self.value, self.key_, self.query, self.vector) if ref is not None)

    def operands(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        """Return (value, key, query, vector) in the shapes that the ops take."""
        given = iter(tensors)
        value, key, query, vector = (
            None if ref is None else next(given) for ref in (self.value, self.key_, self.query, self.vector)
        )
        assert value is not None
        assert query is not None
        if self.score == "gat":
            assert key is not None
            return value, key.reshape(key.shape[:2]), query.reshape(query.shape[:2]), None
        return value, key, query, None if vector is None else vector.reshape(value.shape[1:])

    def scoring(self, seeds: Seeds) -> Scoring:
        """Return how it scores, with the seed of its dropout."""
        dropout, seed = (0.0, 0) if self.drop is None else (self.drop.probability, seeds(self.drop.number))
        return Scoring(self.score, self.slope, self.scale, dropout, seed)

    def plain(self, adjacency: Adjacency, seeds: Seeds, *tensors: Tensor) -> Tensor:
        return reference.attention(adjacency, *self.operands(tensors), self.scoring(seeds))


@dataclass(frozen=True, eq=False, kw_only=True)
class HeadMatrix(TypedOp):
    """The matrix [H · C, H] that takes the product of each head with its own vector: column h has vector[h] in head h's rows."""

    vector: Ref

    @property
    def label(self) -> str:
        return "matrix of heads"

    def reads(self) -> tuple[Ref, ...]:
        return (self.vector,)

    def plain(self, adjacency: Adjacency, seeds: Seeds, *tensors: Tensor) -> Tensor:  # noqa: ARG002
        vector = tensors[0].reshape(tensors[0].shape[-2:])
        num_heads, channels = vector.shape
        own = torch.eye(num_heads, dtype=vector.dtype, device=vector.device)
        return (vector.unsqueeze(2) * own.unsqueeze(1)).reshape(num_heads * channels, num_heads)


@dataclass(frozen=True, eq=False, kw_only=True)
class Relational(TypedOp):
    """``sum (or mean) over j → i of scale · W[type] x_j``, the product for each pair of a node and a relation that occurs.

    Attributes:
        x: [N, Fi].
        weight: [R, Fi, Fo].
        types: constant, int64 [E].
        scale: constant, one number an edge, or None.
        is_mean: a mean over edges.
        order: transform first: pairs of source and relation; propagate first: of destination and relation.
    """

    x: Ref
    weight: Ref
    types: Ref
    scale: Ref | None = None
    is_mean: bool = False
    order: str = "transform first"

    @property
    def label(self) -> str:
        end = "source" if self.order == "transform first" else "destination"
        return f"relations, a product for each {end} and relation"

    def reads(self) -> tuple[Ref, ...]:
        return tuple(ref for ref in (self.x, self.weight, self.types, self.scale) if ref is not None)

    def plain(self, adjacency: Adjacency, seeds: Seeds, *tensors: Tensor) -> Tensor:  # noqa: ARG002
        x, weight, types, *scale = tensors
        message = reference.typed_linear(reference.gather(adjacency, x, "u"), weight, types)
        if scale:
            message = message * scale[0].reshape(-1, 1)
        return reference.aggregate(adjacency, message, "mean" if self.is_mean else "sum")


@dataclass(frozen=True, eq=False, kw_only=True)
class Part(TypedOp):
    """Columns [begin, end) of a value [N, F], or of its rows (``dim`` 0) where it is a weight."""

    x: Ref
    begin: int
    end: int
    dim: int = 1

    @property
    def label(self) -> str:
        return f"part {self.begin}:{self.end}"

    def reads(self) -> tuple[Ref, ...]:
        return (self.x,)

    def plain(self, adjacency: Adjacency, seeds: Seeds, *tensors: Tensor) -> Tensor:  # noqa: ARG002
        return tensors[0].narrow(self.dim, self.begin, self.end - self.begin)


@dataclass(frozen=True, eq=False, kw_only=True)
class Split(TypedOp):
    """A value [N, F] cut into parts of ``widths`` columns: ``output``, then ``others``."""

    x: Ref
    widths: tuple[int, ...]
    others: tuple[Ref, ...]

    @property
    def outputs(self) -> tuple[Ref, ...]:
        return (self.output, *self.others)

    @property
    def label(self) -> str:
        return "split"

    def reads(self) -> tuple[Ref, ...]:
        return (self.x,)

    def plain(self, adjacency: Adjacency, seeds: Seeds, *tensors: Tensor) -> Any:  # noqa: ARG002
        return tensors[0].split(self.widths, 1)


@dataclass(frozen=True, eq=False, kw_only=True)
class Stack(TypedOp):
    """Weights side by side along their output dimension (``dim``)."""

    parts: tuple[Ref, ...]
    dim: int

    @property
    def label(self) -> str:
        return "stack"

    def reads(self) -> tuple[Ref, ...]:
        return self.parts

    def plain(self, adjacency: Adjacency, seeds: Seeds, *tensors: Tensor) -> Tensor:  # noqa: ARG002
        return torch.cat(tensors, self.dim)


@dataclass(frozen=True, eq=False, kw_only=True)
class SparseProduct(Finishing):
    """``dropout(x) W``, where x is fixed and mostly 0: only its stored values are read."""

    x: Ref
    weight: Ref
    is_turned: bool = False
    input_drop: Drop | None = None

    @property
    def name(self) -> str:
        dropped = "" if self.input_drop is None else f"dropout {self.input_drop.probability:g} → "
        return f"{dropped}sparse linear"

    def operands(self) -> tuple[Ref | None, ...]:
        return (self.x, self.weight)

    def plain(self, adjacency: Adjacency, seeds: Seeds, *tensors: Tensor) -> Tensor:  # noqa: ARG002
        x, weight = tensors[:2]
        x = x if self.input_drop is None else self.input_drop.apply(x, seeds)
        y = F.linear(x, weight if self.is_turned else weight.t())
        return reference.finish(y, self.epilogue(tensors, seeds))
