"""What the models are put together from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "elu": F.elu,
    "leaky_relu": F.leaky_relu,
    "tanh": torch.tanh,
}


def graphs_of(graph: Any, num_layers: int) -> list[Any]:
    """Return one graph for each layer: the blocks as sampled, or the same graph every time."""
    return list(graph) if isinstance(graph, list | tuple) else [graph] * num_layers


def norm_of(kind: str, width: int) -> nn.Module:
    """Return the normalisation of rows of ``width`` features."""
    match kind:
        case "batch":
            return nn.BatchNorm1d(width)
        case "layer":
            return nn.LayerNorm(width)
    return nn.Identity()
