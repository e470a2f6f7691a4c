"""What the launchers of both backends say to kernels: the numbers that stand for names, and rows a kernel can walk."""

from __future__ import annotations

import torch
from torch import Tensor

from runner.kernels.parameters import ACTIVATIONS, Epilogue

STORAGE = {torch.float32: "float", torch.float64: "double", torch.bfloat16: "bf16"}  # what kernels call a dtype
REDUCE = {"sum": 0, "max": 1, "min": 2}
OPERATION = {"dot": 0, "add": 1, "sub": 2, "mul": 3}
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
