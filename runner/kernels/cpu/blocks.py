"""The kernels whose communities own their rows: what ``blocks.cpp`` is given.

Legend: N nodes, E edges, F features, P communities, B nodes of a community.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from runner.kernels.cpu.library import core_cache_bytes, function
from runner.kernels.cpu.memory import empty
from runner.kernels.launching import INTRA, Blocks, check_values


class BlocksCall(ctypes.Structure):
    """The layout of ``Call`` in blocks.cpp."""

    _fields_ = (
        ("part_ptr", ctypes.c_void_p),
        ("chunks", ctypes.c_void_p),
        ("num_chunks", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("indptr", "indices", "weight", "tile_at", "tiles")),
        *((name, ctypes.c_void_p) for name in ("local_indptr", "local_indices", "local_weight", "bits_at", "bits")),
        ("num_features", ctypes.c_int64),
        ("is_far", ctypes.c_int64),
    )


def blocks_spmm(blocks: Blocks) -> Callable[[Tensor], Tensor]:
    """Return the product with a matrix: contiguous float32 [N, F] -> [N, F]; float64 where the matrix is."""
    calls: dict[tuple[int, torch.dtype], Callable[[Tensor], Tensor]] = {}

    def run(x: Tensor) -> Tensor:
        key = (x.shape[1], x.dtype)
        if key not in calls:
            calls[key] = _ready(blocks, *key)
        return calls[key](x)

    return run


def _ready(blocks: Blocks, num_features: int, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    check_values(dtype, blocks.weight, blocks.inside if blocks.intra == "tiles" else None, blocks.inside_weight)
    num_nodes = blocks.indptr.numel() - 1
    call = BlocksCall(
        part_ptr=_pointer(blocks.part_ptr), chunks=_pointer(blocks.chunks), num_chunks=blocks.chunks.numel() - 1,
        indptr=_pointer(blocks.indptr), indices=_pointer(blocks.indices), weight=_pointer(blocks.weight),
        num_features=num_features,
        is_far=int(num_nodes * num_features * torch.empty((), dtype=dtype).element_size() > core_cache_bytes()),
        **_inside(blocks),
    )  # fmt: skip
    local = "uint16_t" if blocks.inside is not None and blocks.inside.dtype == torch.uint16 else "uint8_t"
    variant = (("INTRA", INTRA[blocks.intra]), ("WEIGHTED", int(blocks.weight is not None)), ("LOCAL", local))
    kernel = function("blocks", "blocks", dtype, blocks.indices.dtype, *variant)
    held, address = (call, blocks), ctypes.addressof(call)  # what is pointed to

    def run(x: Tensor, _held: Any = held) -> Tensor:
        y = empty(num_nodes, num_features, dtype=dtype)
        kernel(address, x.data_ptr(), y.data_ptr(), torch.get_num_threads())
        return y

    return run


def _inside(blocks: Blocks) -> dict[str, int | None]:
    starts, inside = _pointer(blocks.starts), _pointer(blocks.inside)
    match blocks.intra:
        case "tiles":
            return {"tile_at": starts, "tiles": inside}
        case "local":
            return {"local_indptr": starts, "local_indices": inside, "local_weight": _pointer(blocks.inside_weight)}
        case "bits":
            return {"bits_at": starts, "bits": inside}
    return {}


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
