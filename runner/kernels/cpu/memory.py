"""Memory for results on the CPU."""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

# malloc takes an allocation of this size or more anew from the system each time: its pages are then faulted in one by one while the kernel
# writes, which costs more than the kernel (335 000 × 64 floats: 35 ms instead of 11). With huge pages it is 20 ms (measured, 2 cores).
_HUGE_BYTES = 32 * 2**20
_PAGE_BYTES = 4096
_MADV_HUGEPAGE = 14


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    """Return a tensor on the CPU whose pages, where it is large, the system is asked to make huge."""
    out = torch.empty(shape, dtype=dtype, device="cpu")
    if out.nbytes >= _HUGE_BYTES:
        _ask_for_huge_pages(out)
    return out


def _ask_for_huge_pages(out: Tensor) -> None:
    libc = _libc()
    if libc is not None:
        first = -(-out.data_ptr() // _PAGE_BYTES) * _PAGE_BYTES
        length = (out.data_ptr() + out.nbytes - first) // _PAGE_BYTES * _PAGE_BYTES
        libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), _MADV_HUGEPAGE)  # advice: it may be refused


@cache
def _libc() -> ctypes.CDLL | None:
    library = ctypes.CDLL(None)
    return library if hasattr(library, "madvise") else None
