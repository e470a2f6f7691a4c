"""SpMM on a part of the graph, one function a storage format: ``Y = A X``.

Legend: N rows, M columns, E edges, F features, P blocks, B rows of the largest block.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from runner.kernels.adjacency import Adjacency
from runner.kernels.ops import spmm
from runner.kernels.ops.backend import has_kernels

SpMM = Callable[[Tensor], Tensor]
Factory = Callable[["Part"], "Kernel | None"]
_MAX_DENSE_BYTES = 2**30  # dense blocks above this are never worth their memory: they'd be streamed on each call


@dataclass(frozen=True)
class Part:
    """A part of the matrix in the renumbered graph: the whole, the edges inside blocks, or those between them.

    Attributes:
        adjacency: its entries, shape and edge ids as in the whole graph.
        values: float32 [E of the part], in the order of the entries.
        part_ptr: int64 [P + 1], the boundaries of communities, where there are some; None for the edges between them.
    """

    adjacency: Adjacency
    values: Tensor
    part_ptr: Tensor | None = None


@dataclass(frozen=True)
class Kernel:
    """One way to multiply a part.

    Attributes:
        name: format and library: ``csr_torch``.
        run: float32 [M, F] -> [N, F].
        num_bytes: what it keeps in memory.
    """

    name: str
    run: SpMM
    num_bytes: int


def num_bytes_of(*tensors: Tensor) -> int:
    """Return the memory that tensors take."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def csr_torch(part: Part) -> Kernel:
    """CSR rows, torch's sparse product."""
    adjacency = part.adjacency
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support")
        # column ids ascend within a row but repeat for duplicate edges, which torch's invariants forbid and its product takes
        matrix = torch.sparse_csr_tensor(
            adjacency.indptr.to(adjacency.indices.dtype),
            adjacency.indices,
            part.values,
            (adjacency.num_dst, adjacency.num_src),
            check_invariants=False,
        )
    held = num_bytes_of(adjacency.indptr, adjacency.indices, part.values)
    return Kernel("csr_torch", lambda x: matrix @ x, held)


def csr_native(part: Part) -> Kernel | None:
    """CSR rows, our own kernel; None where it can't be built."""
    adjacency = part.adjacency
    if not has_kernels(adjacency.device):
        return None
    in_order = Adjacency.from_csr(adjacency.indptr, adjacency.indices, adjacency.num_src)
    weight = None if bool((part.values == 1).all()) else part.values
    held = num_bytes_of(adjacency.indptr, adjacency.indices, *([] if weight is None else [weight]))
    return Kernel("csr_native", lambda x: spmm(in_order, x, weight), held)


def coo_torch(part: Part) -> Kernel:
    """One message an edge, stored, then summed by destination. Pays where there are few edges."""
    rows, columns, values = part.adjacency.rows, part.adjacency.indices, part.values.unsqueeze(1)
    num_rows = part.adjacency.num_dst

    def run(x: Tensor) -> Tensor:
        return x.new_zeros(num_rows, x.shape[1]).index_add_(0, rows, x[columns] * values)

    return Kernel("coo_torch", run, num_bytes_of(rows, columns, values))


def dense_blocks(part: Part) -> Kernel | None:
    """Blocks as dense B × B tiles, one batched product; None where the tiles would take too much memory."""
    assert part.part_ptr is not None
    adjacency, sizes = part.adjacency, part.part_ptr.diff()
    num_blocks, width = sizes.numel(), int(sizes.max())
    num_bytes = 4 * num_blocks * width * width
    if num_bytes > _MAX_DENSE_BYTES:
        return None
    block = torch.searchsorted(part.part_ptr, adjacency.rows, right=True) - 1
    first = part.part_ptr[block]
    place = (block * width + adjacency.rows - first) * width + adjacency.indices - first
    tiles = torch.zeros(num_blocks * width * width).index_add_(0, place, part.values).view(num_blocks, width, width)
    inside = torch.arange(width) < sizes.unsqueeze(1)
    slots = inside.flatten().nonzero().flatten()  # where each row of X lies among the padded rows
    padded = num_blocks * width

    def run(x: Tensor) -> Tensor:
        filled = x if slots.numel() == padded else x.new_zeros(padded, x.shape[1]).index_copy_(0, slots, x)
        product = torch.bmm(tiles, filled.view(num_blocks, width, -1)).view(padded, -1)
        return product if slots.numel() == padded else product[slots]

    return Kernel("dense_blocks", run, num_bytes_of(tiles, slots))
