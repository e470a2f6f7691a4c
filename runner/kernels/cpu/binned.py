"""CSR whose rows are taken in the order of their degrees: what ``binned.cpp`` is given.

Legend: N rows, M columns, E entries, F features.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from runner.kernels.cpu.library import core_cache_bytes, function
from runner.kernels.cpu.memory import empty
from runner.kernels.launching import check_values

_SEGMENT = 2048  # entries of a hub that a thread takes at a time
_NUM_CHUNKS = 256  # of the other rows


@dataclass(frozen=True, kw_only=True)
class Binned:
    """CSR and the order of its rows.

    Attributes:
        indptr, indices, weight: int64 [N + 1], int32 or int64 [E], float [E] or None.
        num_columns: M.
        rows: dtype of ``indices``: rows of at most a segment's entries, by degree.
        chunks: int64: boundaries in ``rows``, about equal in work.
        segments: int64 [G, 2]: the other rows' entries, from and to.
        hubs: int64 [H, 3]: each of those rows, its segments from and to.
    """

    indptr: Tensor
    indices: Tensor
    weight: Tensor | None
    num_columns: int
    rows: Tensor
    chunks: Tensor
    segments: Tensor
    hubs: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        """What it holds."""
        return tuple(entry for entry in self.__dict__.values() if isinstance(entry, Tensor))


class BinnedCall(ctypes.Structure):
    """The layout of ``Call`` in binned.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("indptr", "indices", "weight")),
        ("num_entries", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("rows", "chunks")),
        ("num_chunks", ctypes.c_int64),
        ("segments", ctypes.c_void_p),
        ("num_segments", ctypes.c_int64),
        ("hubs", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("num_hubs", "num_features", "is_far")),
    )


def bin_rows(indptr: Tensor, indices: Tensor, weight: Tensor | None, num_columns: int) -> Binned:
    """Sort the rows of CSR by degree, long ones cut into segments."""
    degree = indptr.diff()
    is_hub = degree > _SEGMENT
    order = torch.argsort(degree, stable=True)
    rows = order[~is_hub[order]]
    done = (degree[rows] + 1).cumsum(0)
    wanted = torch.linspace(0, int(done[-1]) if done.numel() else 0, _NUM_CHUNKS + 1, dtype=torch.float64)
    chunks = torch.searchsorted(done, wanted.long()) if done.numel() else torch.zeros(1, dtype=torch.int64)
    chunks = torch.unique(torch.cat([chunks.clamp(max=rows.numel()), torch.tensor([0, rows.numel()])]))
    hub_rows = is_hub.nonzero().flatten()
    pieces = -(-degree[hub_rows] // _SEGMENT)
    ends = pieces.cumsum(0)
    place = torch.arange(int(pieces.sum())) - (ends - pieces).repeat_interleave(pieces)
    begin = indptr[hub_rows].repeat_interleave(pieces) + place * _SEGMENT
    end = torch.minimum(begin + _SEGMENT, indptr[hub_rows + 1].repeat_interleave(pieces))
    return Binned(
        indptr=indptr, indices=indices, weight=weight, num_columns=num_columns, rows=rows.to(indices.dtype), chunks=chunks,
        segments=torch.stack([begin, end], 1), hubs=torch.stack([hub_rows, ends - pieces, ends], 1),
    )  # fmt: skip


def binned_spmm(binned: Binned) -> Callable[[Tensor], Tensor]:
    """Return the product with a matrix: contiguous float [M, F] -> [N, F]."""
    calls: dict[tuple[int, torch.dtype], BinnedCall] = {}
    num_rows, weighted = binned.indptr.numel() - 1, int(binned.weight is not None)

    def run(x: Tensor) -> Tensor:
        width, dtype = x.shape[1], x.dtype
        if (width, dtype) not in calls:
            check_values(dtype, binned.weight)
            calls[width, dtype] = _call(binned, width, x.element_size())
        kernel = function("binned", "binned", dtype, binned.indices.dtype, ("WEIGHTED", weighted))
        y = empty(num_rows, width, dtype=dtype)
        scratch = torch.empty(
            len(binned.segments), width, dtype=torch.float64 if dtype == torch.float64 else torch.float32
        )
        kernel(
            ctypes.addressof(calls[width, dtype]),
            x.data_ptr(),
            y.data_ptr(),
            scratch.data_ptr(),
            torch.get_num_threads(),
        )
        return y

    return run


def _call(binned: Binned, width: int, element_bytes: int) -> BinnedCall:
    return BinnedCall(
        indptr=binned.indptr.data_ptr(), indices=binned.indices.data_ptr(),
        weight=None if binned.weight is None else binned.weight.data_ptr(), num_entries=binned.indices.numel(),
        rows=binned.rows.data_ptr(), chunks=binned.chunks.data_ptr(), num_chunks=binned.chunks.numel() - 1,
        segments=binned.segments.data_ptr(), num_segments=len(binned.segments),
        hubs=binned.hubs.data_ptr(), num_hubs=len(binned.hubs), num_features=width,
        is_far=int(binned.num_columns * width * element_bytes > core_cache_bytes()),
    )  # fmt: skip
