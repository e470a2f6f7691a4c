"""SpMM on a part of the graph, one function a storage format: ``Y = A X``.

Legend: N rows, M columns, E edges, F features, P blocks, B rows of the largest block.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from runner.kernels.adjacency import Adjacency
from runner.kernels.cpu.binned import bin_rows, binned_spmm
from runner.kernels.cpu.library import last_cache_bytes
from runner.kernels.ops import spmm
from runner.kernels.ops.backend import has_kernels

SpMM = Callable[[Tensor], Tensor]
Factory = Callable[["Part"], "Format | None"]
_filler = torch.empty(0)
_MAX_DENSE_BYTES = 2**30  # dense blocks above this are never worth their memory: they'd be streamed on each call


@dataclass(frozen=True)
class Part:
    """A part of the matrix in the renumbered graph: the whole, the edges inside blocks, or those between them.

    Attributes:
        adjacency: its entries, shape and edge ids as in the whole graph.
        values: float32 [E of the part], in the order of the entries.
        part_ptr: int64 [P + 1], the boundaries of communities, where there are some; None for the edges between them.
        device: where products run; the part itself is on the CPU.
    """

    adjacency: Adjacency
    values: Tensor
    part_ptr: Tensor | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @cached_property
    def is_weighted(self) -> bool:
        """Whether a value isn't 1."""
        return not bool((self.values == 1).all())

    @cached_property
    def inside(self) -> Tensor:
        """bool [E]: whether an entry's two ends are of one community; none is without communities."""
        if self.part_ptr is None:
            return torch.zeros(self.adjacency.num_edges, dtype=torch.bool)
        return self.community[self.adjacency.rows] == self.community[self.adjacency.indices]

    @cached_property
    def community(self) -> Tensor:
        """int64 [N]: the community of each node."""
        assert self.part_ptr is not None
        return torch.repeat_interleave(torch.arange(self.part_ptr.numel() - 1), self.part_ptr.diff())

    def work(self, entries: int | None = None, near: int | None = None, cells: int = 0) -> Work:
        """Return what a product does here; by default all entries are read one by one."""
        return Work(
            rows=self.adjacency.num_dst,
            entries=self.adjacency.num_edges if entries is None else entries,
            near=int(self.inside.sum()) if near is None else near,
            cells=cells,
            is_weighted=self.is_weighted,
        )


@dataclass(frozen=True)
class Work:
    """What a product has to do whatever the width.

    Attributes:
        rows: N.
        entries: that are read one by one.
        near: of those, whose source is of the row's community.
        cells: of dense tiles.
        is_weighted: whether entries have values.
    """

    rows: int = 0
    entries: int = 0
    near: int = 0
    cells: int = 0
    is_weighted: bool = False


@dataclass(frozen=True)
class Format:
    """A way to store a part that is possible but not built yet.

    Attributes:
        name: format and library: ``csr_torch``.
        work: for the cost model.
        build: stores the part; this is what costs time and memory.
    """

    name: str
    work: Work
    build: Callable[[], Kernel]


@dataclass(frozen=True)
class Kernel:
    """One way to multiply a part.

    Attributes:
        name: format and library: ``csr_torch``.
        run: float32 [M, F] -> [N, F].
        num_bytes: what it keeps in memory.
        unit: ``tf32`` or ``bf16`` where a matrix unit rounds its factors to that, else ``fp32``.
    """

    name: str
    run: SpMM
    num_bytes: int
    unit: str = "fp32"


def seconds(work: Callable[[], Any], device: torch.device, between_bytes: int = 0) -> float:
    """Return how long a call takes, what it starts on a GPU included.

    Args:
        work: the call.
        device: where it runs.
        between_bytes: other data that is touched before it, as other ops of a training step do: a kernel that jumps about in its
            arrays does well in a loop of its own, where they stay in caches.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    else:
        touch(between_bytes)
    start = time.perf_counter()
    result = work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    took = time.perf_counter() - start
    del result  # freed outside the measurement
    return took


def touch(num_bytes: int) -> None:
    """Read and write so much other data on the CPU, at most what fills its caches twice."""
    size = min(num_bytes, 2 * last_cache_bytes()) // 4
    if _filler.numel() < size:
        _filler.resize_(size).zero_()
    _filler[:size].add_(1)


def num_bytes_of(*tensors: Tensor) -> int:
    """Return the memory that tensors take."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def csr_torch(part: Part) -> Format:
    """CSR rows, torch's sparse product."""
    return Format("csr_torch", part.work(), partial(_csr_torch, part))


def _csr_torch(part: Part) -> Kernel:
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
        ).to(part.device)
    held = num_bytes_of(adjacency.indptr, adjacency.indices, part.values)
    return Kernel("csr_torch", lambda x: matrix @ x, held)


def csr_native(part: Part) -> Format | None:
    """CSR rows, our own kernel; None where it can't be built."""
    return Format("csr_native", part.work(), partial(_csr_native, part)) if has_kernels(part.device) else None


def _csr_native(part: Part) -> Kernel:
    adjacency = part.adjacency
    in_order = Adjacency.from_csr(adjacency.indptr, adjacency.indices, adjacency.num_src).to(part.device)
    weight = part.values.to(part.device) if part.is_weighted else None
    held = num_bytes_of(adjacency.indptr, adjacency.indices, *([] if weight is None else [weight]))
    return Kernel("csr_native", lambda x: spmm(in_order, x, weight), held)


def csr_binned(part: Part) -> Format | None:
    """CSR on the CPU, rows in the order of their degrees, hubs shared out; None where it can't be built."""
    if part.device.type != "cpu" or not has_kernels(part.device):
        return None
    return Format("csr_binned", part.work(), partial(_csr_binned, part))


def _csr_binned(part: Part) -> Kernel:
    adjacency = part.adjacency
    weight = part.values if part.is_weighted else None
    binned = bin_rows(adjacency.indptr, adjacency.indices, weight, adjacency.num_src)
    return Kernel("csr_binned", binned_spmm(binned), num_bytes_of(*binned.tensors()))


def coo_torch(part: Part) -> Format:
    """One message an edge, stored, then summed by destination. Pays where there are few edges."""
    return Format("coo_torch", part.work(), partial(_coo_torch, part))


def _coo_torch(part: Part) -> Kernel:
    rows, columns = part.adjacency.rows.to(part.device), part.adjacency.indices.to(part.device)
    values = part.values.unsqueeze(1).to(part.device)
    num_rows = part.adjacency.num_dst

    def run(x: Tensor) -> Tensor:
        return x.new_zeros(num_rows, x.shape[1]).index_add_(0, rows, x[columns] * values)

    return Kernel("coo_torch", run, num_bytes_of(rows, columns, values))


def coo_atomic(part: Part) -> Format | None:
    """One group of lanes an entry on a GPU, added atomically: not for those who want equal bits from equal inputs."""
    if part.device.type != "cuda" or not has_kernels(part.device):
        return None
    return Format("coo_atomic", part.work(), partial(_coo_atomic, part))


def _coo_atomic(part: Part) -> Kernel:
    from runner.kernels.cuda.blocks import coo_spmm

    held = [part.adjacency.rows.to(part.device), part.adjacency.indices.to(part.device)]
    weight = part.values.to(part.device) if part.is_weighted else None
    run = coo_spmm(held[0], held[1], weight, part.adjacency.num_dst)
    return Kernel("coo_atomic", run, num_bytes_of(*held, *([] if weight is None else [weight])))


def dense_blocks(part: Part) -> Format | None:
    """Blocks as dense B × B tiles, one batched product; None where the tiles would take too much memory."""
    assert part.part_ptr is not None
    sizes = part.part_ptr.diff()
    num_cells = sizes.numel() * int(sizes.max()) ** 2
    if 4 * num_cells > _MAX_DENSE_BYTES:
        return None
    return Format("dense_blocks", part.work(entries=0, near=0, cells=num_cells), partial(_dense_blocks, part))


def _dense_blocks(part: Part) -> Kernel:
    assert part.part_ptr is not None
    adjacency, sizes = part.adjacency, part.part_ptr.diff()
    num_blocks, width = sizes.numel(), int(sizes.max())
    block = torch.searchsorted(part.part_ptr, adjacency.rows, right=True) - 1
    first = part.part_ptr[block]
    place = (block * width + adjacency.rows - first) * width + adjacency.indices - first
    tiles = torch.zeros(num_blocks * width * width).index_add_(0, place, part.values).view(num_blocks, width, width)
    tiles = tiles.to(part.device)
    inside = torch.arange(width) < sizes.unsqueeze(1)
    slots = inside.flatten().nonzero().flatten().to(part.device)  # where each row of X lies among the padded rows
    padded = num_blocks * width

    def run(x: Tensor) -> Tensor:
        filled = x if slots.numel() == padded else x.new_zeros(padded, x.shape[1]).index_copy_(0, slots, x)
        product = torch.bmm(tiles, filled.view(num_blocks, width, -1)).view(padded, -1)
        return product if slots.numel() == padded else product[slots]

    return Kernel("dense_blocks", run, num_bytes_of(tiles, slots))
