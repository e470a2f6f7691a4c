"""Kernels in which a community owns its rows: edges inside it in a format of their own, then the rest of the row, then one store.

Legend: N nodes, E edges, F features, P communities, B nodes of a community.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from runner.kernels.cpu.blocks import blocks_spmm
from runner.kernels.formats import Format, Kernel, Part, SpMM, num_bytes_of
from runner.kernels.launching import Blocks
from runner.kernels.ops.backend import has_kernels

_NUM_CHUNKS = 256  # of communities, about equal in work: enough for threads to share, few enough to cost nothing
_MAX_TILE_BYTES = 2**30
_WORD = 64


class Owned:
    """The matrix of a part of the graph, cut into communities, and the kernels that can be made of it.

    Args:
        part: the whole matrix, with ``part_ptr``.
    """

    def __init__(self, part: Part) -> None:
        assert part.part_ptr is not None
        self._part, self.part_ptr = part, part.part_ptr
        self._community = part.community[part.adjacency.rows]
        self._local = part.adjacency.indices - self.part_ptr[self._community]
        self.inside, self.is_weighted = part.inside, part.is_weighted

    @property
    def sizes(self) -> Tensor:
        """int64 [P]: B of each community."""
        return self.part_ptr.diff()

    @cached_property
    def density(self) -> Tensor:
        """float64 [P]: pairs of a community that an edge joins, duplicates counted once, over all its pairs."""
        return self._pairs.double() / self.sizes.double().square()

    @cached_property
    def _pairs(self) -> Tensor:
        largest, rows = int(self.sizes.max()), self._part.adjacency.rows[self.inside].long()
        pairs = torch.unique(
            rows * largest + self._local[self.inside]
        )  # a CSR of others' may have its columns in any order
        community = torch.searchsorted(self.part_ptr, pairs // largest, right=True) - 1
        return torch.bincount(community, minlength=self.sizes.numel())

    def formats(self, tile_densities: Sequence[float], unit: str = "fp32") -> list[Format]:
        """Return all that are possible here.

        Args:
            tile_densities: from which communities are dense tiles.
            unit: ``tf32`` or ``bf16``: tiles on a GPU's matrix units too.
        """
        if not has_kernels(self._part.device):
            return []
        units = ("fp32", unit) if unit != "fp32" and _has_matrix_units(self._part.device) else ("fp32",)
        tiles = [self.tiles(density, one) for density in tile_densities for one in units]
        return [entry for entry in (self.rest(), self.local(), self.bits(), *tiles) if entry is not None]

    def rest(self) -> Format:
        """All edges in CSR: what ownership alone gives."""
        return Format(
            "owned_csr", self._part.work(), lambda: self._kernel("owned_csr", torch.zeros_like(self.inside), {})
        )

    def tiles(self, least_density: float, unit: str = "fp32") -> Format | None:
        """Communities of at least this density as dense tiles; None where there is none, or they would take too much memory."""
        has_tile = (self.density >= least_density) & (self._pairs > 0)
        cells = torch.where(has_tile, self.sizes.square(), 0)
        num_cells = int(cells.sum())
        if not num_cells or 4 * num_cells > _MAX_TILE_BYTES:
            return None
        in_tile = self.inside & has_tile[self._community]
        num_held = int(in_tile.sum())
        work = self._part.work(self.inside.numel() - num_held, int(self.inside.sum()) - num_held, num_cells)
        name = f"owned_tiles_{least_density:g}" + (f"_{unit}" if unit != "fp32" else "")
        return Format(name, work, lambda: self._tiles(name, unit, has_tile, cells, in_tile))

    def _tiles(self, name: str, unit: str, has_tile: Tensor, cells: Tensor, in_tile: Tensor) -> Kernel:
        starts = cells.cumsum(0) - cells
        community, adjacency = self._community[in_tile], self._part.adjacency
        row = adjacency.rows[in_tile] - self.part_ptr[community]
        place = starts[community] + row * self.sizes[community] + self._local[in_tile]
        tiles = torch.zeros(int(cells.sum())).index_add_(0, place, self._part.values[in_tile])
        inside: dict[str, Tensor | str] = {
            "intra": "tiles",
            "starts": torch.where(has_tile, starts, -1),
            "inside": tiles,
        }
        return self._kernel(name, in_tile, inside, unit)

    def local(self) -> Format | None:
        """Ids of one byte inside communities of up to 256 nodes, of two up to 65 536; None beyond."""
        return Format("owned_local", self._part.work(), self._local_ids) if int(self.sizes.max()) <= 2**16 else None

    def _local_ids(self) -> Kernel:
        dtype = torch.uint8 if int(self.sizes.max()) <= 2**8 else torch.uint16
        counts = torch.bincount(self._part.adjacency.rows[self.inside], minlength=self._part.adjacency.num_dst)
        inside = {"starts": _offsets(counts), "inside": self._local[self.inside].to(dtype)}
        if self.is_weighted:
            inside["inside_weight"] = self._part.values[self.inside]
        return self._kernel("owned_local", self.inside, {"intra": "local", **inside})

    def bits(self) -> Format | None:
        """A bit a pair inside communities; None for weights, duplicate edges inside, or words that would outweigh ids."""
        num_inside = int(self.inside.sum())
        words = self.sizes * -(-self.sizes // _WORD)
        if self.is_weighted or int(self._pairs.sum()) != num_inside or 2 * int(words.sum()) > max(num_inside, 1):
            return None
        return Format("owned_bits", self._part.work(), lambda: self._bits(words))

    def _bits(self, words: Tensor) -> Kernel:
        starts, adjacency = words.cumsum(0) - words, self._part.adjacency
        community, local = self._community[self.inside], self._local[self.inside].long()
        row = adjacency.rows[self.inside] - self.part_ptr[community]
        place = starts[community] + row * -(-self.sizes[community] // _WORD) + local // _WORD
        # each bit occurs once, so a sum sets it; bit 63 is the sign
        bits = torch.zeros(int(words.sum()), dtype=torch.int64).index_add_(
            0, place, torch.ones_like(local) << local % _WORD
        )
        return self._kernel("owned_bits", self.inside, {"intra": "bits", "starts": starts, "inside": bits})

    def _kernel(self, name: str, held: Tensor, inside: dict[str, Tensor | str], unit: str = "fp32") -> Kernel:
        """Return the kernel whose edges but those that ``held`` marks are in CSR."""
        adjacency, kept = self._part.adjacency, ~held
        counts = torch.bincount(adjacency.rows[kept], minlength=adjacency.num_dst)
        blocks = Blocks(
            part_ptr=self.part_ptr,
            chunks=self._chunks(),
            indptr=_offsets(counts),
            indices=adjacency.indices[kept],
            weight=self._part.values[kept] if self.is_weighted else None,
            **inside,  # type: ignore[arg-type]
        )
        return Kernel(name, _runner(blocks, self._part.device, unit), num_bytes_of(*blocks.tensors()), unit)

    def _chunks(self) -> Tensor:
        """Boundaries of communities, about equal in edges and rows."""
        work = torch.bincount(self._community, minlength=self.sizes.numel()) + self.sizes
        done = work.cumsum(0)
        wanted = torch.arange(1, _NUM_CHUNKS) * (int(done[-1]) / _NUM_CHUNKS)
        inner = torch.searchsorted(done, wanted.to(done.dtype)) + 1
        ends = torch.tensor([0, done.numel()])
        return torch.unique(torch.cat([ends, inner.clamp(max=done.numel())]))


def tile_density(name: str) -> float | None:
    """Return from which density on a kernel has tiles; None for one without."""
    found = re.fullmatch(r"owned_tiles_([\d.]+)(_\w+)?", name)
    return None if found is None else float(found[1])


def _has_matrix_units(device: torch.device) -> bool:
    """Whether a device multiplies tf32 and bf16: from compute capability 8 on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 8


def _runner(blocks: Blocks, device: torch.device, unit: str) -> SpMM:
    if device.type != "cuda":
        return blocks_spmm(blocks)
    from runner.kernels.cuda import blocks as cuda

    there = blocks.to(device)
    return cuda.blocks_spmm(there) if unit == "fp32" else cuda.blocks_mma_spmm(there, unit)


def _offsets(counts: Tensor) -> Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
