"""A linear layer on sparse features: ``X W + b`` in 2 · nnz · Fo operations instead of 2 · N · Fi · Fo.

Legend: N rows, Fi features in, Fo features out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from runner.errors import UserError
from runner.kernels.adjacency import Adjacency
from runner.kernels.ops.spmm import spmm


@dataclass(frozen=True, eq=False)
class SparseFeatures:
    """X in CSR.

    Attributes:
        pattern: N × Fi; entry e has id e.
        values: float [nnz], or None where every stored value is 1: then they aren't read.
    """

    pattern: Adjacency
    values: Tensor | None

    @staticmethod
    def from_csr(indptr: Tensor, indices: Tensor, values: Tensor, num_features: int) -> SparseFeatures:
        """Take CSR arrays (``indptr`` int64 [N + 1]; ``indices`` int [nnz]; ``values`` float [nnz]); int64 indices that fit become int32.

        Raises:
            UserError: where they aren't CSR, or ``values`` has another length.
        """
        if values.shape != indices.shape:
            raise UserError(f"values has shape {list(values.shape)}, indices {list(indices.shape)}: both must be [nnz]")
        fits = max(indices.numel(), num_features, indptr.numel()) <= torch.iinfo(torch.int32).max
        pattern = Adjacency.from_csr(indptr.to(torch.int64), indices, num_features, torch.int32 if fits else None)
        are_ones = not values.requires_grad and bool((values == 1).all())
        return SparseFeatures(pattern, None if are_ones else values)

    def to(self, device: torch.device | str) -> SparseFeatures:
        """Return them on another device."""
        return SparseFeatures(self.pattern.to(device), None if self.values is None else self.values.to(device))

    @staticmethod
    def from_dense(x: Tensor) -> SparseFeatures:
        """Keep what is not 0 of x, float [N, Fi]."""
        counts = (x != 0).sum(1)
        indptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        rows, columns = x.nonzero(as_tuple=True)
        return SparseFeatures.from_csr(indptr, columns, x[rows, columns], x.shape[1])


def sparse_linear(features: SparseFeatures, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``X W + b``, [N, Fo]; differentiable in W, b and the stored values.

    Args:
        features: X, [N, Fi].
        weight: W, float32, float64 or bfloat16 [Fi, Fo].
        bias: [Fo], or None.

    Raises:
        UserError: where a shape, dtype or device doesn't fit; it names both shapes.
    """
    if weight.dim() != 2 or weight.shape[0] != features.pattern.num_src:
        shape = [features.pattern.num_dst, features.pattern.num_src]
        raise UserError(
            f"weight has shape {list(weight.shape)}, the features {shape}: weight needs shape [{shape[1]}, …]"
        )
    if features.values is not None and features.values.dtype != weight.dtype:
        raise UserError(
            f"weight is {weight.dtype}, the features' values are {features.values.dtype}: both must be the same"
        )
    return spmm(features.pattern, weight, features.values, bias=bias)
