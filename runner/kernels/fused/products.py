"""Products with fixed matrices, both directions laid out beforehand, and what their stores do: the autograd functions of ``fused``.

Legend: N rows, M columns, E entries, F features; Fi → Fo feature widths.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from runner.kernels.adjacency import Adjacency, Csr
from runner.kernels.ops.registry import launcher
from runner.kernels.parameters import Epilogue


class Times(Protocol):
    """A fixed matrix in one direction."""

    def times(self, x: Tensor, epilogue: Epilogue = ..., values: Tensor | None = None) -> Tensor:
        """Return the epilogue of the product with x [M, F]; ``values`` take the place of its own."""
        ...

    @property
    def num_bytes(self) -> int:
        """What it holds beside the graph's own arrays."""
        ...


@dataclass(frozen=True)
class Side:
    """A matrix in one direction: ``y = row_scale · A x``.

    Attributes:
        csr: entry e has value e.
        values: float [E], or None: 1.
        row_scale: float [N], or None.
        reach: see :attr:`runner.kernels.adjacency.Adjacency.reach`.
    """

    csr: Csr
    values: Tensor | None
    row_scale: Tensor | None
    reach: int

    def times(self, x: Tensor, epilogue: Epilogue = Epilogue(), values: Tensor | None = None) -> Tensor:  # noqa: B008
        """Return the epilogue of the product with x [M, F]; ``values`` take the place of its own."""
        values = self.values if values is None else values
        weight = None if values is None else values.unsqueeze(1)
        told = epilogue._replace(row_scale=self.row_scale)
        y: Tensor = launcher(x).spmm(self.csr, x, weight, None, told, reach=self.reach)[0]
        return y

    @property
    def num_bytes(self) -> int:
        """What it holds beside the graph's own arrays."""
        return sum(part.nbytes for part in (self.values, self.row_scale) if part is not None)


def side_of(
    adjacency: Adjacency, weight: Tensor | None, row_scale: Tensor | None, col_scale: Tensor | None, dtype: torch.dtype
) -> Side:
    """Lay out ``diag(row_scale) A diag(col_scale)``, A's entries weighted: a scale of columns becomes values, one of rows stays apart
    where there are no values.

    Args:
        adjacency: of A.
        weight: float [E], by edge id, or None.
        row_scale, col_scale: float [N] and [M], or None.
        dtype: of the values.
    """
    csr = Csr(adjacency.indptr, adjacency.indices, None, adjacency.row_blocks)
    if weight is None and col_scale is None:
        kept = None if row_scale is None else row_scale.to(dtype).contiguous()
        return Side(csr, None, kept, adjacency.reach)
    values = torch.ones(adjacency.num_edges, dtype=torch.float64, device=adjacency.device)
    if weight is not None:
        values *= weight.double()[adjacency.edge_ids.long()]
    if col_scale is not None:
        values *= col_scale.double()[adjacency.indices.long()]
    if row_scale is not None:
        values *= row_scale.double()[adjacency.rows.long()]
    return Side(csr, values.to(dtype), None, adjacency.reach)


@dataclass(frozen=True)
class FixedMatrix:
    """A propagation with constant factors, for both directions."""

    forward: Times
    backward: Times

    @staticmethod
    def of(
        adjacency: Adjacency,
        weight: Tensor | None,
        row_scale: Tensor | None,
        col_scale: Tensor | None,
        dtype: torch.dtype,
    ) -> FixedMatrix:
        """Lay out both directions; arguments as in :func:`side_of`. Where the matrix is symmetric they are one."""
        there = side_of(adjacency, weight, row_scale, col_scale, dtype)
        back = side_of(adjacency.transposed, weight, col_scale, row_scale, dtype)
        is_one = torch.equal(there.csr.indptr, back.csr.indptr) and torch.equal(there.csr.indices, back.csr.indices)
        if is_one and _equal(there.values, back.values) and _equal(there.row_scale, back.row_scale):
            back = there
        return FixedMatrix(there, back)

    @property
    def num_bytes(self) -> int:
        """What it holds beside the graph's own arrays."""
        return self.forward.num_bytes + (0 if self.backward is self.forward else self.backward.num_bytes)


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other is None or (one is not None and other is not None and torch.equal(one, other))


def finished(x: Tensor, epilogue: Epilogue, matrix: FixedMatrix | None = None) -> Tensor:
    """Return the epilogue of x [N, F], or of its product with a matrix; differentiable in x, addend, addend_scale and bias."""
    bias = None if epilogue.bias is None else epilogue.bias.reshape(-1)
    addend = None if epilogue.addend is None else epilogue.addend.reshape(epilogue.addend.shape[0], -1)
    flat = x.reshape(x.shape[0], x.shape[1:].numel())
    told = Epilogue(None, None, *epilogue[2:6])
    y: Tensor = _Finished.apply(flat, addend, epilogue.addend_scale, bias, told, matrix)
    return y.reshape(y.shape[0], *x.shape[1:])


def _backward_of_epilogue(dy: Tensor, y: Tensor | None, told: Epilogue) -> Tensor:
    dy = dy.contiguous()
    if y is None:
        return dy
    dz: Tensor = launcher(dy).epilogue_backward(dy, y, told)
    return dz


class _Finished(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        addend: Tensor | None,
        scale: Tensor | None,
        bias: Tensor | None,
        told: Epilogue,
        matrix: FixedMatrix | None,
    ) -> Tensor:
        given = None if addend is None else addend.contiguous()
        epilogue = told._replace(bias=bias, addend=given, addend_scale=scale)
        y: Tensor = launcher(x).finish(x, epilogue) if matrix is None else matrix.forward.times(x, epilogue)
        ctx.told, ctx.matrix = told, matrix
        needs_addend = scale is not None and ctx.needs_input_grad[2]
        ctx.save_for_backward(None if told.is_linear else y, given if needs_addend else None, scale)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        y, addend, scale = ctx.saved_tensors
        dz = _backward_of_epilogue(dy, y, ctx.told)
        needs_x, needs_addend, needs_scale, needs_bias = ctx.needs_input_grad[:4]
        dx = dz if ctx.matrix is None else ctx.matrix.backward.times(dz) if needs_x else None
        daddend = None if not needs_addend else dz if scale is None else dz * scale
        dscale = (dz * addend).sum().reshape(scale.shape) if needs_scale else None
        return dx if needs_x else None, daddend, dscale, dz.sum(0) if needs_bias else None, None, None


def graph_linear(
    x: Tensor, weight: Tensor, is_turned: bool, matrix: FixedMatrix, order: str, back: str, epilogue: Epilogue
) -> Tensor:
    """Return the epilogue of ``A x W``, [N, Fo]; differentiable in x and W, and what the epilogue reads.

    Args:
        x: [N, Fi].
        weight: W [Fi, Fo], or [Fo, Fi] where ``is_turned``.
        is_turned: how W is stored.
        matrix: A.
        order, back: of the forward and the backward, as :class:`~runner.kernels.rewrite.ops.GraphLinear` has them.
        epilogue: what follows.
    """
    product: Tensor = _GraphLinear.apply(x, weight.t() if is_turned else weight, matrix, order, back)
    is_bare = epilogue.is_linear and epilogue.bias is None and epilogue.addend is None
    return product if is_bare else finished(product, epilogue)


class _GraphLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, matrix: FixedMatrix, order: str, back: str) -> Tensor:
        ctx.matrix, ctx.back = matrix, back
        propagated = matrix.forward.times(x) if order == "propagate first" else None
        keeps = (
            propagated if back == "propagate first" else None
        )  # A x, where the backward multiplies by it and it is there
        ctx.save_for_backward(x if keeps is None else None, keeps, weight)
        return matrix.forward.times(x @ weight) if propagated is None else propagated @ weight

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, propagated, weight = ctx.saved_tensors
        dy = dy.contiguous()
        if ctx.back == "transform first":
            shared = ctx.matrix.backward.times(dy)
            return shared @ weight.t(), x.t() @ shared, None, None, None
        if propagated is None:
            propagated = ctx.matrix.forward.times(x)
        return ctx.matrix.backward.times(dy @ weight.t()), propagated.t() @ dy, None, None, None


@dataclass(frozen=True)
class SparseMatrix:
    """Fixed features [N, Fi] that are mostly 0: theirs and their transpose's entries.

    Attributes:
        forward, backward: X and Xᵀ; values None where all that is stored is 1.
    """

    forward: Side
    backward: Side

    @staticmethod
    def of(x: Tensor) -> SparseMatrix:
        """Keep what isn't 0 of x, float [N, Fi]."""
        counts = (x != 0).sum(1)
        indptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        rows, columns = x.nonzero(as_tuple=True)
        pattern = Adjacency.from_csr(indptr, columns.int(), x.shape[1])
        values = x[rows, columns]
        weight = None if bool((values == 1).all()) else values
        return SparseMatrix(
            side_of(pattern, weight, None, None, x.dtype), side_of(pattern.transposed, weight, None, None, x.dtype)
        )

    @property
    def num_bytes(self) -> int:
        """What it holds."""
        arrays = [*self.forward.csr, *self.backward.csr]
        return (
            self.forward.num_bytes + self.backward.num_bytes + sum(part.nbytes for part in arrays if part is not None)
        )

    def dropped(self, is_turned: bool, dropout: tuple[float, int] | None) -> Tensor | None:
        """Return the values of a direction under dropout (probability, seed) of the features; None: its own."""
        if dropout is None:
            return None
        side = self.backward if is_turned else self.forward
        values: Tensor = launcher(side.csr.indptr).drop_entries(side.csr, side.values, is_turned, *dropout)
        return values


def sparse_product(
    x: SparseMatrix, weight: Tensor, is_turned: bool, input_drop: tuple[float, int] | None, epilogue: Epilogue
) -> Tensor:
    """Return the epilogue of ``dropout(x) W``, [N, Fo]; differentiable in W, addend and bias.

    Args:
        x: features.
        weight: W [Fi, Fo], or [Fo, Fi] where ``is_turned``.
        is_turned: how W is stored.
        input_drop: probability and seed of the dropout of x, or None.
        epilogue: without an addend.
    """
    bias = None if epilogue.bias is None else epilogue.bias.reshape(-1)
    told = Epilogue(None, None, *epilogue[2:6])
    y: Tensor = _SparseProduct.apply(weight, bias, x, is_turned, input_drop, told)
    return y


class _SparseProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        bias: Tensor | None,
        x: SparseMatrix,
        is_turned: bool,
        drop: tuple[float, int] | None,
        told: Epilogue,
    ) -> Tensor:
        columns = weight.t().contiguous() if is_turned else weight.contiguous()
        y = x.forward.times(columns, told._replace(bias=bias), x.dropped(False, drop))
        ctx.x, ctx.is_turned, ctx.drop, ctx.told = x, is_turned, drop, told
        ctx.save_for_backward(None if told.is_linear else y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        (y,) = ctx.saved_tensors
        dz = _backward_of_epilogue(dy, y, ctx.told)
        dweight = None
        if ctx.needs_input_grad[0]:
            dweight = ctx.x.backward.times(dz, values=ctx.x.dropped(True, ctx.drop))
            dweight = dweight.t() if ctx.is_turned else dweight
        return dweight, dz.sum(0) if ctx.needs_input_grad[1] else None, None, None, None, None
