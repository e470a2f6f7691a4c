"""The graph as every kernel sees it: in-edges in CSR.

Legend: N destination nodes (rows), M source nodes (columns), E edges. A[i, j] = edge j → i.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from runner.errors import DataError


@dataclass(frozen=True, eq=False)
class Adjacency:
    """In-edges of each destination in CSR. Duplicate edges and self loops are kept; nothing here changes after construction.

    Attributes:
        indptr: int64 [N + 1].
        indices: int64 [E], source node of each entry.
        edge_ids: int64 [E], the entry's place in the graph's own list of edges; values per edge come in that order.
        num_src: M.
    """

    indptr: Tensor
    indices: Tensor
    edge_ids: Tensor
    num_src: int

    @staticmethod
    def from_edges(src: Tensor, dst: Tensor, num_src: int, num_dst: int) -> Adjacency:
        """Build from edge arrays (int64 [E] each); entries of a row are in ascending order of their source.

        Raises:
            DataError: where the arrays differ in length or an id is out of range.
        """
        if src.numel() != dst.numel():
            raise DataError(f"src has {src.numel()} entries, dst {dst.numel()}")
        for name, ends, bound in (("src", src, num_src), ("dst", dst, num_dst)):
            if ends.numel() and (int(ends.min()) < 0 or int(ends.max()) >= bound):
                raise DataError(
                    f"{name} holds ids from {int(ends.min())} to {int(ends.max())}, allowed are 0 … {bound - 1}"
                )
        order = torch.from_numpy(np.lexsort((src.numpy(), dst.numpy())))
        counts = torch.bincount(dst, minlength=num_dst)
        return Adjacency(_offsets(counts), src[order].contiguous(), order, num_src)

    @property
    def num_dst(self) -> int:
        """N."""
        return self.indptr.numel() - 1

    @property
    def num_edges(self) -> int:
        """E."""
        return self.indices.numel()

    @cached_property
    def rows(self) -> Tensor:
        """int64 [E]: destination of each entry."""
        return torch.repeat_interleave(torch.arange(self.num_dst), self.in_degrees)

    @cached_property
    def in_degrees(self) -> Tensor:
        """int64 [N]."""
        return self.indptr.diff()

    @cached_property
    def out_degrees(self) -> Tensor:
        """int64 [M]."""
        return torch.bincount(self.indices, minlength=self.num_src)

    @cached_property
    def transposed(self) -> Adjacency:
        """The graph with its edges turned, same edge ids; made once."""
        order = torch.argsort(self.indices, stable=True)  # rows ascend, so they stay ascending within each column
        return Adjacency(_offsets(self.out_degrees), self.rows[order], self.edge_ids[order], self.num_dst)

    @cached_property
    def src_dst(self) -> tuple[Tensor, Tensor]:
        """(src, dst), int64 [E] each, in the order of the edge ids."""
        src, dst = torch.empty_like(self.indices), torch.empty_like(self.indices)
        src[self.edge_ids], dst[self.edge_ids] = self.indices, self.rows
        return src, dst

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
        rank[order] = torch.arange(order.numel())
        return self._from_entries(rank[self.rows], rank[self.indices], self.edge_ids)

    def select(self, keep: Tensor) -> Adjacency:
        """Return the graph with only the entries where ``keep`` (bool [E], in the order of the entries) holds; edge ids stay."""
        return self._from_entries(self.rows[keep], self.indices[keep], self.edge_ids[keep])

    def _from_entries(self, rows: Tensor, columns: Tensor, edge_ids: Tensor) -> Adjacency:
        order = torch.from_numpy(np.lexsort((columns.numpy(), rows.numpy())))
        counts = torch.bincount(rows, minlength=self.num_dst)
        return Adjacency(_offsets(counts), columns[order], edge_ids[order], self.num_src)


def _offsets(counts: Tensor) -> Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
