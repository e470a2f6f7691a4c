"""Sums over edges of several relations: one product for each pair of a node and a relation that occurs.

Legend: N nodes, E edges, P pairs, R relations, Fi → Fo feature widths.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from runner.kernels.adjacency import Adjacency
from runner.kernels.fused.products import FixedMatrix, finished
from runner.kernels.parameters import Epilogue


@dataclass(frozen=True)
class Pairs:
    """How rows come to the pairs, and from there to the destinations.

    Attributes:
        into: P × N.
        counts: pairs of each relation, in the order of the pairs.
        out_of: N × P.
    """

    into: FixedMatrix
    counts: tuple[int, ...]
    out_of: FixedMatrix

    @staticmethod
    def of(
        adjacency: Adjacency, types: Tensor, scale: Tensor | None, is_mean: bool, by_source: bool, dtype: torch.dtype
    ) -> Pairs:
        """Find the pairs of a graph.

        Args:
            adjacency: the graph.
            types: int64 [E], by edge id.
            scale: float [E], by edge id, or None.
            is_mean: whether rows are means.
            by_source: pairs of source and relation: edges lie behind them; else of destination and relation: before them.
            dtype: of the values.
        """
        src, dst = adjacency.src_dst
        num_nodes = adjacency.num_src if by_source else adjacency.num_dst
        key = types.long() * num_nodes + (src if by_source else dst)
        found, pair = torch.unique(key, return_inverse=True)  # by relation, then node
        num_pairs, node = found.numel(), found % num_nodes
        counts = torch.bincount(found // num_nodes).tolist() if num_pairs else []
        number = torch.arange(num_pairs, device=src.device)
        mean = adjacency.mean_scale(dtype) if is_mean else None
        if by_source:
            into = _graph(node, number, adjacency.num_src, num_pairs)
            out_of = _graph(pair, dst, num_pairs, adjacency.num_dst)
            return Pairs(FixedMatrix.of(into, None, None, None, dtype), tuple(counts), FixedMatrix.of(out_of, scale, mean, None, dtype))
        into = _graph(src, pair, adjacency.num_src, num_pairs)
        out_of = _graph(number, node, num_pairs, adjacency.num_dst)
        return Pairs(FixedMatrix.of(into, scale, None, None, dtype), tuple(counts), FixedMatrix.of(out_of, None, mean, None, dtype))

    @property
    def num_bytes(self) -> int:
        """What it holds, its own graphs among it."""
        graphs = [part for matrix in (self.into, self.out_of) for side in (matrix.forward, matrix.backward) for part in side.csr]
        return self.into.num_bytes + self.out_of.num_bytes + sum(part.nbytes for part in graphs if part is not None)


def _graph(src: Tensor, dst: Tensor, num_src: int, num_dst: int) -> Adjacency:
    return Adjacency.from_edges(src.cpu(), dst.cpu(), num_src, num_dst).to(src.device)


def relational(x: Tensor, weight: Tensor, pairs: Pairs) -> Tensor:
    """Return the sum over relations, [N, Fo]; differentiable in x [N, Fi] and weight [R, Fi, Fo]."""
    rows = finished(x, Epilogue(), pairs.into)
    products = [part @ one for part, one in zip(rows.split(pairs.counts), weight.unbind(0), strict=False)]
    joined = torch.cat(products) if products else rows.new_zeros(0, weight.shape[2])
    return finished(joined, Epilogue(), pairs.out_of)
