"""What the launchers of both backends say to kernels: the numbers that stand for names, rows a kernel can walk, cut matrices.

Legend: N nodes, E edges, P communities, B nodes of a community.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from runner.errors import UserError
from runner.kernels.parameters import ACTIVATIONS, Epilogue

STORAGE = {torch.float32: "float", torch.float64: "double", torch.bfloat16: "bf16"}  # what kernels call a dtype
REDUCE = {"sum": 0, "max": 1, "min": 2}
OPERATION = {"dot": 0, "add": 1, "sub": 2, "mul": 3}
INTRA = {"rest": 0, "tiles": 1, "local": 2, "bits": 3}
UNWEIGHTED, PER_EDGE, PER_HEAD, PER_CHANNEL = range(4)


def weighting(is_weighted: bool, col_scale: Tensor | None, num_heads: int, num_features: int) -> int:
    """Return the WEIGHTING of spmm: none, a factor an edge, a weight per edge and head, a weight per edge and feature."""
    if num_heads > 1:
        return PER_CHANNEL if num_heads == num_features else PER_HEAD
    return PER_EDGE if is_weighted or col_scale is not None else UNWEIGHTED


def activation_of(epilogue: Epilogue) -> tuple[int, float, float, int]:
    """Return (activation, slope, dropout, seed) as kernels take them. CuPy passes on an int as an int, so these are floats."""
    return ACTIVATIONS.index(epilogue.activation), float(epilogue.slope), float(epilogue.dropout), epilogue.seed


def walkable(x: Tensor) -> Tensor:
    """Return x [M, F] with each row's elements side by side; the rows themselves may be apart."""
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def check_values(dtype: torch.dtype, *held: Tensor | None) -> None:
    """Raise UserError where a matrix's values are of another dtype than what it multiplies: kernels read both as one type."""
    for values in held:
        if values is not None and values.dtype != dtype:
            raise UserError(f"x is {dtype}, the matrix's values are {values.dtype}: they must be the same")


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """A square matrix over renumbered nodes, edges inside communities apart where ``intra`` says so.

    Attributes:
        part_ptr: int64 [P + 1]; community p owns nodes ``part_ptr[p]`` … ``part_ptr[p + 1] - 1``.
        chunks: int64, communities that a thread takes at a time, as boundaries.
        indptr, indices, weight: CSR of the edges that ``intra`` doesn't hold: int64 [N + 1], int32 or int64, one value each or None.
        intra: rest, tiles, local or bits: how edges inside communities are held.
        starts: int64: tiles and bits [P], where a community's begin (-1: it has no tile); local [N + 1], row pointers.
        inside: tiles: float, [B, B] a community; local: uint8 or uint16 ids; bits: int64 words, [B, ceil(B / 64)] a community.
        inside_weight: local: one value an edge, where ``weight`` isn't None.
    """

    part_ptr: Tensor
    chunks: Tensor
    indptr: Tensor
    indices: Tensor
    weight: Tensor | None
    intra: str = "rest"
    starts: Tensor | None = None
    inside: Tensor | None = None
    inside_weight: Tensor | None = None

    def to(self, device: torch.device) -> Blocks:
        """Return it with its arrays on a device."""
        moved = {name: entry.to(device) for name, entry in self.__dict__.items() if isinstance(entry, Tensor)}
        return Blocks(**(self.__dict__ | moved))

    def tensors(self) -> tuple[Tensor, ...]:
        """What it holds."""
        return tuple(entry for entry in self.__dict__.values() if isinstance(entry, Tensor))
