"""Generated kernels on CPU tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from runner.kernels.adjacency import Adjacency
from runner.kernels.cpu import build
from runner.kernels.cpu.library import INDEX_TYPES, prepared
from runner.kernels.cpu.memory import empty
from runner.kernels.generate import cpp
from runner.kernels.generate.description import Description
from runner.kernels.generate.walks import Walk
from runner.kernels.launching import STORAGE

source = cpp.source


class GraphArgument(ctypes.Structure):
    """The layout of ``Graph`` in generated.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("indptr", "indices", "edge_ids", "blocks")),
        *((name, ctypes.c_int64) for name in ("num_blocks", "num_entries")),
    )


def new(num_rows: int, width: int, like: Tensor) -> Tensor:
    """Return a result that a kernel is to fill, [num_rows, width]."""
    return empty(num_rows, width, dtype=like.dtype)


def run(
    text: str,
    walk: Walk,
    description: Description,
    graph: Adjacency,
    given: Sequence[Tensor],
    out: Sequence[Tensor | None],
) -> Tensor:
    """Walk a graph's edges.

    Args:
        text: the source.
        walk: what is computed.
        description: what it belongs to.
        graph: the graph, or, for a walk over sources, its transpose.
        given: the operands.
        out: where gradients go, one a slot; the result alone, for the forward.

    Returns:
        float64 [blocks, totals]: the parts that the gradients of weights are the sums of.
    """
    dtype, csr = given[0].dtype, graph.csr
    num_totals = walk.num_totals(description.channels)
    parts = torch.zeros(csr.row_blocks.numel() - 1, num_totals, dtype=torch.float64)
    arrays = (None if part is None else part.data_ptr() for part in csr)
    argument = GraphArgument(*arrays, csr.row_blocks.numel() - 1, graph.num_edges)
    call = _function(text, walk.name, dtype, csr.indices.dtype)
    call(
        ctypes.byref(argument), _pointers(given), _pointers(out), parts.data_ptr(), num_totals, torch.get_num_threads()
    )
    return parts


def _pointers(tensors: Sequence[Tensor | None]) -> Any:
    return (ctypes.c_void_p * max(len(tensors), 1))(*(None if entry is None else entry.data_ptr() for entry in tensors))


@lru_cache(1024)
def _function(text: str, name: str, dtype: torch.dtype, index_dtype: torch.dtype) -> Any:
    library = build.load("generated", text, STORAGE=STORAGE[dtype], INDEX=INDEX_TYPES[index_dtype])
    found = getattr(prepared(library), name)
    pointer = ctypes.c_void_p
    found.argtypes = [pointer, pointer, pointer, pointer, ctypes.c_int64, ctypes.c_int]
    found.restype = None
    return found
