"""The graph as every kernel sees it: in-edges in CSR.

Legend: N destination nodes (rows), M source nodes (columns), E edges. A[i, j] = edge j → i.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property, wraps
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from scipy import sparse
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from runner.errors import DataError, UserError

_BLOCK_WORK = 2048


class Csr(NamedTuple):
    """What a kernel is given of an adjacency: see there. ``entry_ids`` None means that entry e is edge e."""

    indptr: Tensor
    indices: Tensor
    entry_ids: Tensor | None
    row_blocks: Tensor


Derive = TypeVar("Derive", bound=Callable[..., Any])


def _outside_of_modes(derive: Derive) -> Derive:
    """Derive plain tensors whatever the caller is in the middle of: they are kept, and must serve training after inference too."""

    @wraps(derive)
    def plainly(*arguments: Any) -> Any:
        with torch.inference_mode(False), torch.no_grad(), temporarily_clear_interpreter_stack():
            return derive(*arguments)

    return plainly  # type: ignore[return-value]


@dataclass(frozen=True, eq=False)
class Adjacency:
    """In-edges of each destination in CSR. Duplicate edges and self loops are kept; nothing here changes after construction.

    Attributes:
        indptr: int64 [N + 1].
        indices: int32 or int64 [E], source node of each entry.
        edge_ids: [E], dtype of ``indices``: the entry's place in the graph's own list of edges; values per edge come in that order.
        num_src: M.
    """

    indptr: Tensor
    indices: Tensor
    edge_ids: Tensor
    num_src: int

    @staticmethod
    def from_edges(
        src: Tensor, dst: Tensor, num_src: int, num_dst: int, index_dtype: torch.dtype | None = None
    ) -> Adjacency:
        """Build from edge arrays (integer [E] each, on the CPU); entries of a row are in ascending order of their source, then edge id.

        Args:
            src, dst: the ends of each edge.
            num_src, num_dst: M and N; unequal for a bipartite graph.
            index_dtype: of ``indices`` and ``edge_ids``; default: int32 where M, N and E allow it, half the memory to read.

        Raises:
            DataError: where the arrays differ in length or an id is out of range.
            UserError: where ``src`` or ``dst`` holds no integers, or ``index_dtype`` is too narrow or no index type.
        """
        for name, ends in (("src", src), ("dst", dst)):
            _check_ids(name, ends)
        if src.numel() != dst.numel():
            raise DataError(f"src has {src.numel()} entries, dst {dst.numel()}")
        for name, ends, bound in (("src", src, num_src), ("dst", dst, num_dst)):
            _check_range(name, ends, bound)
        dtype = _index_dtype(index_dtype, max(num_src, num_dst, src.numel()))
        order = _row_order(dst, src, num_dst, num_src)
        counts = torch.bincount(dst, minlength=num_dst)
        return Adjacency(_offsets(counts), src[order].to(dtype), order.to(dtype), num_src)

    @staticmethod
    def from_csr(indptr: Tensor, indices: Tensor, num_src: int, index_dtype: torch.dtype | None = None) -> Adjacency:
        """Build from CSR arrays, copied; edge e is entry e, rows keep the order they have.

        Args:
            indptr: int64 [N + 1].
            indices: int32 or int64 [E].
            num_src: M.
            index_dtype: of the copy; default: that of ``indices``.

        Raises:
            DataError: where ``indptr`` doesn't ascend from 0 to E, or a column is out of range.
            UserError: where a dtype or shape is another.
        """
        if indptr.dtype != torch.int64 or indices.dtype not in (torch.int32, torch.int64):
            raise UserError(
                f"indptr is {indptr.dtype}, indices {indices.dtype}: int64, and int32 or int64, are allowed"
            )
        if indptr.dim() != 1 or indices.dim() != 1:
            raise UserError(
                f"indptr has shape {list(indptr.shape)}, indices {list(indices.shape)}: both need one dimension"
            )
        steps = indptr.diff()
        if indptr.numel() == 0 or int(indptr[0]) != 0 or int(indptr[-1]) != indices.numel() or bool((steps < 0).any()):
            raise DataError(
                f"indptr (shape {list(indptr.shape)}) must ascend from 0 to the {indices.numel()} of indices"
            )
        _check_range("indices", indices, num_src)
        dtype = _index_dtype(index_dtype or indices.dtype, max(num_src, indptr.numel(), indices.numel()))
        copied = indices.to(dtype, copy=True).contiguous()
        edge_ids = torch.arange(indices.numel(), dtype=dtype, device=indices.device)
        return Adjacency(indptr.clone(memory_format=torch.contiguous_format), copied, edge_ids, num_src)

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled and copied: not what was derived."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def num_dst(self) -> int:
        """N."""
        return self.indptr.numel() - 1

    @property
    def num_edges(self) -> int:
        """E."""
        return self.indices.numel()

    @property
    def device(self) -> torch.device:
        """Where its arrays are."""
        return self.indptr.device

    @cached_property
    @_outside_of_modes
    def rows(self) -> Tensor:
        """[E], dtype of ``indices``: destination of each entry."""
        nodes = torch.arange(self.num_dst, dtype=self.indices.dtype, device=self.device)
        return torch.repeat_interleave(nodes, self.in_degrees)

    @cached_property
    @_outside_of_modes
    def in_degrees(self) -> Tensor:
        """int64 [N]."""
        return self.indptr.diff()

    @cached_property
    @_outside_of_modes
    def out_degrees(self) -> Tensor:
        """int64 [M]."""
        return torch.bincount(self.indices, minlength=self.num_src)

    @cached_property
    @_outside_of_modes
    def entry_ids(self) -> Tensor | None:
        """``edge_ids``, or None where entry e is edge e and kernels need not look it up."""
        if self.num_edges and int(self.edge_ids.max()) >= self.num_edges:
            raise UserError(
                f"a selection of {self.num_edges} edges keeps its graph's edge ids, up to {int(self.edge_ids.max())}, so values per edge "
                "can't be told apart; Adjacency.from_csr(indptr, indices, num_src) numbers them anew"
            )
        entries = torch.arange(self.num_edges, dtype=self.indices.dtype, device=self.device)
        return None if bool((self.edge_ids == entries).all()) else self.edge_ids

    @cached_property
    @_outside_of_modes
    def row_blocks(self) -> Tensor:
        """int64 [B + 1], ascending from 0 to N: blocks of whole rows with about equally many edges and rows each."""
        work = self.indptr + torch.arange(self.num_dst + 1, device=self.device)
        num_blocks = max(1, -(-int(work[-1]) // _BLOCK_WORK))
        cuts = torch.linspace(0, int(work[-1]), num_blocks + 1, dtype=torch.float64, device=self.device)
        blocks = torch.searchsorted(work, cuts.long()).unique()
        return blocks if blocks.numel() > 1 else torch.tensor([0, self.num_dst], device=self.device)

    @cached_property
    def reach(self) -> int:
        """Sources, about, that the edges of neighbouring destinations come from: what a cache must hold for them to be read once."""
        if self.num_src != self.num_dst or not self.num_edges:
            return self.num_src
        return min(self.num_src, 1 + int(2 * (self.rows - self.indices).abs().double().mean()))

    @cached_property
    @_outside_of_modes
    def csr(self) -> Csr:
        """What kernels read."""
        return Csr(self.indptr, self.indices, self.entry_ids, self.row_blocks)

    @cached_property
    @_outside_of_modes
    def transposed(self) -> Adjacency:
        """The graph with its edges turned, same edge ids; made once. Its own ``transposed`` is this graph."""
        order = self.turned_entries.long()
        turned = Adjacency(_offsets(self.out_degrees), self.rows[order], self.edge_ids[order], self.num_dst)
        turned.__dict__["transposed"], turned.__dict__["turned_entries"] = self, _inverse(self.turned_entries)
        return turned

    @cached_property
    @_outside_of_modes
    def turned_entries(self) -> Tensor:
        """[E], dtype of ``indices``: the entry of this graph that each entry of ``transposed`` is; ascending within its rows."""
        # rows ascend, so with a stable sort they stay ascending within each column
        return torch.argsort(self.indices, stable=True).to(self.indices.dtype)

    @cached_property
    @_outside_of_modes
    def incidence(self) -> Adjacency:
        """N × E: each destination's in-edges as its sources, so that an SpMM with it sums values per edge."""
        by_edge = torch.argsort(self.edge_ids).to(self.indices.dtype)
        place = torch.arange(self.num_edges, dtype=self.indices.dtype, device=self.device)
        incidence = Adjacency(self.indptr, self.edge_ids, place, self.num_edges)
        one_each = torch.arange(self.num_edges + 1, device=self.device)
        turned = Adjacency(one_each, self.rows[by_edge.long()], by_edge, self.num_dst)
        incidence.__dict__["transposed"], turned.__dict__["transposed"] = turned, incidence
        incidence.__dict__["turned_entries"], turned.__dict__["turned_entries"] = by_edge, self.edge_ids
        return incidence

    @cached_property
    @_outside_of_modes
    def src_dst(self) -> tuple[Tensor, Tensor]:
        """(src, dst), int64 [E] each, in the order of the edge ids."""
        by_edge = torch.argsort(self.edge_ids)
        return self.indices[by_edge].long(), self.rows[by_edge].long()

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the shape and the entries, edge ids apart: equal for equal matrices of ones."""
        found = hashlib.sha256(f"{self.num_dst} {self.num_src}".encode())
        for part in (self.indptr, self.indices.int() if self.num_src < 2**31 else self.indices):
            found.update(part.cpu().numpy().data)
        return found.hexdigest()

    def mean_scale(self, dtype: torch.dtype) -> Tensor:
        """float [N]: 1 / in-degree, 1 where there is no edge; the row scale that makes a sum a mean. Kept for each dtype."""
        if dtype not in self._mean_scales:
            self._mean_scales[dtype] = self._mean_scale(dtype)
        return self._mean_scales[dtype]

    @_outside_of_modes
    def _mean_scale(self, dtype: torch.dtype) -> Tensor:
        return (1 / self.in_degrees.clamp(min=1).double()).to(dtype)

    @cached_property
    def ready(self) -> dict[Any, Callable[..., Tensor] | None]:
        """Calls on this graph with all but the call itself done, by what they depend on; for ops to keep."""
        return {}

    @cached_property
    def _mean_scales(self) -> dict[torch.dtype, Tensor]:
        return {}

    def to(self, device: torch.device | str) -> Adjacency:
        """Return it on another device; what was derived is derived there anew."""
        wanted = torch.device(device)
        if self.device.type == wanted.type and wanted.index in (None, self.device.index):
            return self
        return Adjacency(self.indptr.to(device), self.indices.to(device), self.edge_ids.to(device), self.num_src)

    def values(self, edge_weight: Tensor | None) -> Tensor:
        """Return float [E] in the order of the entries: ones, or a weight per edge in the order of the edge ids."""
        return torch.ones(self.num_edges) if edge_weight is None else edge_weight.reshape(-1)[self.edge_ids]

    def matrix(self, values: Tensor) -> sparse.csr_array:
        """Return the N × M matrix with ``values`` (float [E], in the order of the entries); duplicate entries stay separate.

        The index arrays are copies: scipy sums duplicates in place, in ``abs`` and ``astype`` too.
        """
        parts = (values.numpy(), self.indices.numpy().copy(), self.indptr.numpy().copy())
        return sparse.csr_array(parts, shape=(self.num_dst, self.num_src))

    def is_symmetric(self, edge_weight: Tensor | None = None) -> bool:
        """Whether A equals its transpose in structure and values (float [E], by edge id), duplicates summed; a bipartite graph doesn't."""
        if self.num_src != self.num_dst:
            return False
        matrix = self.matrix(self.values(edge_weight).clone())
        matrix.sum_duplicates()
        turned = matrix.T.tocsr()
        turned.sort_indices()
        return bool(
            np.array_equal(matrix.indptr, turned.indptr)
            and np.array_equal(matrix.indices, turned.indices)
            and np.array_equal(matrix.data, turned.data)
        )

    def permuted(self, order: Tensor) -> Adjacency:
        """Renumber the nodes of a square graph: new node k is old node ``order[k]``; edge ids stay."""
        assert self.num_src == self.num_dst
        rank = torch.empty_like(order)
        rank[order] = torch.arange(order.numel(), dtype=order.dtype)
        dtype = self.indices.dtype
        return self._from_entries(rank[self.rows].to(dtype), rank[self.indices].to(dtype), self.edge_ids)

    def select(self, keep: Tensor) -> Adjacency:
        """Return the graph with only the entries where ``keep`` (bool [E], in the order of the entries) holds; order and edge ids stay."""
        counts = torch.bincount(self.rows[keep], minlength=self.num_dst)
        return Adjacency(_offsets(counts), self.indices[keep], self.edge_ids[keep], self.num_src)

    def _from_entries(self, rows: Tensor, columns: Tensor, edge_ids: Tensor) -> Adjacency:
        order = _row_order(rows, columns, self.num_dst, self.num_src)
        counts = torch.bincount(rows, minlength=self.num_dst)
        return Adjacency(_offsets(counts), columns[order], edge_ids[order], self.num_src)


def _row_order(rows: Tensor, columns: Tensor, num_rows: int, num_columns: int) -> Tensor:
    """Return int64 [E]: entries by row, then column, then as they come. One sort of both is ten times as fast as two."""
    if num_rows * num_columns >= 2**63:
        return torch.from_numpy(np.lexsort((columns.numpy(), rows.numpy())))
    return torch.sort(rows.long() * num_columns + columns, stable=True).indices


def _offsets(counts: Tensor) -> Tensor:
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def _inverse(order: Tensor) -> Tensor:
    inverse = torch.empty_like(order)
    inverse[order.long()] = torch.arange(order.numel(), dtype=order.dtype, device=order.device)
    return inverse


def _check_ids(name: str, ids: Tensor) -> None:
    if ids.dim() != 1 or ids.dtype not in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
        raise UserError(f"{name} is {ids.dtype} of shape {list(ids.shape)}: one dimension of integers is needed")


def _check_range(name: str, ids: Tensor, bound: int) -> None:
    if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= bound):
        raise DataError(f"{name} holds ids from {int(ids.min())} to {int(ids.max())}, allowed are 0 … {bound - 1}")


def _index_dtype(wanted: torch.dtype | None, largest: int) -> torch.dtype:
    narrow = largest <= torch.iinfo(torch.int32).max
    if wanted is None:
        return torch.int32 if narrow else torch.int64
    if wanted not in (torch.int32, torch.int64):
        raise UserError(f"index_dtype is {wanted}: torch.int32 and torch.int64 are allowed")
    if wanted == torch.int32 and not narrow:
        raise UserError(f"index_dtype is torch.int32, too narrow for {largest} nodes or edges: use torch.int64")
    return wanted
