"""Generated kernels at work: built once for a description, called forward and backward on flat arrays.

Legend: N nodes, E edges, C channels.
"""

from __future__ import annotations

import ctypes
import math
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
from runner.kernels.generate.cpp import Walk
from runner.kernels.generate.description import Description
from runner.kernels.launching import STORAGE


class GraphArgument(ctypes.Structure):
    """The layout of ``Graph`` in generated.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("indptr", "indices", "edge_ids", "blocks")),
        *((name, ctypes.c_int64) for name in ("num_blocks", "num_entries")),
    )


class EdgeKernel:
    """The kernels of one description on one graph."""

    def __init__(self, description: Description, adjacency: Adjacency) -> None:
        self.description, self._adjacency = description, adjacency
        self._walks = {walk.name: walk for walk in cpp.walks(description)}
        self._source = cpp.source(description)

    def __call__(self, operands: Sequence[Tensor]) -> Tensor:
        """Return the result [N, K · C] from the operands, one a slot; differentiable in those that need it."""
        result: Tensor = _Generated.apply(self, *operands)
        return result

    def forward(self, operands: Sequence[Tensor]) -> Tensor:
        """Compute the result [N, K · C]."""
        width = len(self.description.message) * self.description.channels
        out = empty(self._adjacency.num_dst, width, dtype=operands[0].dtype)
        self._run(self._walks["forward"], self._adjacency, operands, [out])
        return out

    def backward(self, operands: Sequence[Tensor], upstream: Tensor) -> list[Tensor | None]:
        """Compute the gradient of each operand that needs one, from that of the result."""
        if self.description.is_mean:
            upstream = upstream * self._adjacency.mean_scale(upstream.dtype).unsqueeze(1)
        given = [*operands, upstream.contiguous()]
        slots = self.description.slots
        found: list[Tensor | None] = [
            torch.zeros_like(entry) if slot.needs_gradient else None
            for slot, entry in zip(slots, operands, strict=True)
        ]
        for name, graph in (
            ("backward_destinations", self._adjacency),
            ("backward_sources", self._adjacency.transposed),
        ):
            if name in self._walks:
                walk = self._walks[name]
                parts = self._run(walk, graph, given, found)
                self._add_totals(walk, parts, found)
        return found

    def _run(self, walk: Walk, graph: Adjacency, given: Sequence[Tensor], out: Sequence[Tensor | None]) -> Tensor:
        dtype = given[0].dtype
        num_parts = sum(self.description.channels if formula.is_wide else 1 for _, _, formula in walk.totals)
        csr = graph.csr
        parts = torch.zeros(csr.row_blocks.numel() - 1, num_parts, dtype=torch.float64)
        argument = GraphArgument(
            *(None if part is None else part.data_ptr() for part in csr), csr.row_blocks.numel() - 1, graph.num_edges
        )
        run = _function(self._source, walk.name, dtype, csr.indices.dtype)
        run(
            ctypes.byref(argument),
            _pointers(given),
            _pointers(out),
            parts.data_ptr(),
            num_parts,
            torch.get_num_threads(),
        )
        return parts

    def _add_totals(self, walk: Walk, parts: Tensor, found: Sequence[Tensor | None]) -> None:
        """Put the sums over all edges where they belong."""
        sums, at, channels = parts.sum(0), 0, self.description.channels
        for slot, index, formula in walk.totals:
            width, begin = (channels, index * channels) if formula.is_wide else (1, index)
            gradient = found[slot]
            assert gradient is not None
            gradient.view(-1)[begin : begin + width] = sums[at : at + width].to(gradient.dtype)
            at += width


def _pointers(tensors: Sequence[Tensor | None]) -> Any:
    return (ctypes.c_void_p * max(len(tensors), 1))(*(None if entry is None else entry.data_ptr() for entry in tensors))


@lru_cache(1024)
def _function(source: str, name: str, dtype: torch.dtype, index_dtype: torch.dtype) -> Any:
    library = build.load("generated", source, STORAGE=STORAGE[dtype], INDEX=INDEX_TYPES[index_dtype])
    found = getattr(prepared(library), name)
    pointer = ctypes.c_void_p
    found.argtypes = [pointer, pointer, pointer, pointer, ctypes.c_int64, ctypes.c_int]
    found.restype = None
    return found


class _Generated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernel: EdgeKernel, *operands: Tensor) -> Tensor:
        flat = [operand.detach().contiguous() for operand in operands]
        ctx.kernel = kernel
        ctx.save_for_backward(*flat)
        return kernel.forward(flat)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        return None, *ctx.kernel.backward(ctx.saved_tensors, upstream)


def generated(kernel: EdgeKernel, values: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """Return a chain's result in its own shape, [N, …].

    Args:
        kernel: of the chain.
        values: one a slot of its description.
        shape: of a row of the result.
    """
    flat = kernel(values)
    assert flat.shape[1] == math.prod(shape)
    return flat.reshape(flat.shape[0], *shape)
