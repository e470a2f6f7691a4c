"""What is checked before a kernel is given pointers: each error names the argument, what it is, and what it must be.

Legend: N destinations, M sources, E edges, F features, H heads, C channels a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runner.errors import UserError
from runner.kernels.adjacency import Adjacency

DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def check_features(name: str, x: Tensor, num_rows: int, adjacency: Adjacency, like: Tensor | None = None) -> None:
    """Check a value per node or edge: rows, dtype, device.

    Raises:
        UserError: naming the argument and both shapes (dtypes, devices).
    """
    if x.dtype not in DTYPES:
        raise UserError(f"{name} is {_name(x.dtype)}: {', '.join(map(_name, DTYPES))} are allowed")
    if x.device != adjacency.device:
        raise UserError(f"{name} is on {x.device}, the adjacency on {adjacency.device}: both must be on one device")
    if x.dim() == 0 or x.shape[0] != num_rows:
        raise UserError(
            f"{name} has shape {list(x.shape)}, the adjacency [{adjacency.num_dst}, {adjacency.num_src}] with "
            f"{adjacency.num_edges} edges: {name} needs {num_rows} rows"
        )
    if like is not None and like.dtype != x.dtype:
        raise UserError(f"{name} is {_name(x.dtype)}, the features are {_name(like.dtype)}: both must be the same")


def check_shape(name: str, given: Tensor, wanted: tuple[int, ...], beside: str, like: Tensor) -> None:
    """Check the exact shape, dtype and device of an argument against those of the features.

    Raises:
        UserError: naming the argument and both shapes (dtypes, devices).
    """
    if tuple(given.shape) != wanted:
        raise UserError(
            f"{name} has shape {list(given.shape)}, {beside} {list(like.shape)}: {name} needs shape {list(wanted)}"
        )
    if given.dtype != like.dtype:
        raise UserError(f"{name} is {_name(given.dtype)}, {beside} {_name(like.dtype)}: both must be the same")
    if given.device != like.device:
        raise UserError(f"{name} is on {given.device}, {beside} on {like.device}: both must be on one device")


def num_heads_of(weight: Tensor, x: Tensor, adjacency: Adjacency) -> int:
    """Return how many weights an edge has: 1, H for features [M, H, …], or F, one for each feature.

    Raises:
        UserError: naming both shapes where the weight is none of these.
    """
    check_features("weight", weight, adjacency.num_edges, adjacency, like=x)
    trailing = weight.shape[1:]
    width = trailing.numel()
    per_head = x.dim() > 2 and trailing[:1] == x.shape[1:2] and width == x.shape[1]
    if width == 1 or per_head or trailing == x.shape[1:]:
        return width
    heads = f", [{adjacency.num_edges}, {x.shape[1]}]" if x.dim() > 2 else ""
    raise UserError(
        f"weight has shape {list(weight.shape)}, x {list(x.shape)}: weight needs shape [{adjacency.num_edges}]{heads} or "
        f"{[adjacency.num_edges, *x.shape[1:]]}"
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_value(adjacency: Adjacency, value: Tensor) -> None:
    """Raise a UserError where attention's ``value`` isn't [M, H, C], with heads and channels, of the adjacency's device."""
    check_features("value", value, adjacency.num_src, adjacency)
    if value.dim() != 3 or 0 in value.shape[1:]:
        raise UserError(f"value has shape {list(value.shape)}: [{adjacency.num_src}, heads, channels] is needed")
