"""What kernels are told beside their tensors, and how dropout by seed decides what is kept: the same on every backend.

Legend: N rows, F features.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from runner.errors import UserError, suggestion

ACTIVATIONS = ("identity", "relu", "elu", "leaky_relu")
_LOW = 0xFFFFFFFF


class Epilogue(NamedTuple):
    """``dropout(activation(row_scale · y + addend_scale · addend + bias))``.

    Attributes:
        row_scale: float [N], or None.
        bias: float [F], or None.
        activation: identity, relu, elu (``slope`` is its alpha), leaky_relu (``slope`` below 0).
        slope: see ``activation``.
        dropout: probability that an element is dropped, in [0, 1).
        seed: int64; the same seed drops the same elements, on every backend.
        addend: float [N, F], or None.
        addend_scale: one number in a tensor, or None: 1.
    """

    row_scale: Tensor | None = None
    bias: Tensor | None = None
    activation: str = "identity"
    slope: float = 0.0
    dropout: float = 0.0
    seed: int = 0
    addend: Tensor | None = None
    addend_scale: Tensor | None = None

    @property
    def is_linear(self) -> bool:
        """Whether a gradient passes activation and dropout unchanged."""
        return self.activation == "identity" and not self.dropout

    def check(self) -> None:
        """Raise a UserError for an unknown activation or an impossible probability."""
        if self.activation not in ACTIVATIONS:
            raise UserError(f"activation is '{self.activation}': {suggestion(self.activation, ACTIVATIONS)}")
        if self.activation in ("elu", "leaky_relu") and not self.slope >= 0:
            raise UserError(
                f"slope is {self.slope}: at least 0 is needed, so that a result tells on which side of 0 it came from"
            )
        check_dropout(self.dropout, self.seed)


SCORE = {"gatv2": 0, "dot": 1}  # of scores that are made of features: what kernels call them


class Scoring(NamedTuple):
    """How attention scores an edge j → i: ``gat``: LeakyReLU(key_j + query_i); ``gatv2``: <vector, LeakyReLU(value_j + query_i)>;
    ``dot``: scale · <key_j, query_i>.

    Attributes:
        score: gat, gatv2 or dot.
        slope: of the LeakyReLU below 0.
        scale: of dot.
        dropout: probability that an attention weight is dropped, in [0, 1); weight (e, h) is element (edge id e, h).
        seed: int64.
    """

    score: str
    slope: float = 0.2
    scale: float = 1.0
    dropout: float = 0.0
    seed: int = 0


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that values of ``dtype`` are summed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_dropout(probability: float, seed: int) -> None:
    """Raise a UserError for a probability outside [0, 1), or a seed that is no int64."""
    if not 0 <= probability < 1:
        raise UserError(f"dropout is {probability}: a probability in [0, 1) is allowed")
    if not isinstance(seed, int) or not -(2**63) <= seed < 2**63:
        raise UserError(f"seed is {seed}: an integer of 64 bits is allowed")


def activate(y: Tensor, activation: str, slope: float) -> Tensor:
    """Apply an activation of :data:`ACTIVATIONS` in plain torch."""
    match activation:
        case "relu":
            return F.relu(y)
        case "elu":
            return F.elu(y, alpha=slope)
        case "leaky_relu":
            return F.leaky_relu(y, negative_slope=slope)
    return y


def kept(rows: Tensor, num_columns: int, probability: float, seed: int) -> Tensor:
    """Return which elements dropout by seed keeps, bool [n, num_columns].

    Element (row, column) is kept where 32 bits hashed from (seed, row, column) are at least ``probability`` · 2^32.

    Args:
        rows: int64 [n], numbers of the rows.
        num_columns: columns 0 … num_columns - 1.
        probability: of being dropped.
        seed: int64.
    """
    words = torch.tensor([seed & _LOW, (seed >> 32 & _LOW) + 0x9E3779B9 & _LOW], device=rows.device)
    low, high = _mix(words)
    row_key = _mix((_mix(rows & _LOW ^ low) + (rows >> 32 & _LOW) + high) & _LOW)
    columns = torch.arange(num_columns, device=rows.device) * 0x9E3779B9 & _LOW
    bits = _mix((_mix(columns ^ row_key.unsqueeze(-1)) + low) & _LOW)
    return bits >= int(probability * 2**32)


def _mix(x: Tensor) -> Tensor:
    """Mix 32 bits, held in int64: the function of cpu/random.h."""
    x = x ^ x >> 16
    x = _times(x, 0x7FEB352D)
    x = x ^ x >> 15
    x = _times(x, 0x846CA68B)
    return x ^ x >> 16


def _times(x: Tensor, factor: int) -> Tensor:
    """Product modulo 2^32; in two halves, since the whole one may pass 2^63."""
    return x * (factor & 0xFFFF) + (x * (factor >> 16) << 16) & _LOW
