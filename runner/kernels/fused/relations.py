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
        graphs: theirs.
    """

    into: FixedMatrix
    counts: tuple[int, ...]
    out_of: FixedMatrix
    graphs: tuple[Adjacency, Adjacency]

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
        first: tuple[Tensor | None, Tensor | None]
        if by_source:
            into, out_of = (
                _graph(node, number, adjacency.num_src, num_pairs),
                _graph(pair, dst, num_pairs, adjacency.num_dst),
            )
            first, second = (None, None), (scale, mean)
        else:
            into, out_of = (
                _graph(src, pair, adjacency.num_src, num_pairs),
                _graph(number, node, num_pairs, adjacency.num_dst),
            )
            first, second = (scale, None), (None, mean)
        return Pairs(
            FixedMatrix.of(into, *first, None, dtype),
            tuple(counts),
            FixedMatrix.of(out_of, *second, None, dtype),
            (into, out_of),
        )

    @property
    def num_bytes(self) -> int:
        """What it holds, its own graphs among it."""
        sides = [side for graph in self.graphs for side in (graph, graph.transposed)]
        arrays = [part for side in sides for part in side.csr if part is not None]
        return self.into.num_bytes + self.out_of.num_bytes + sum(part.nbytes for part in arrays)


def _graph(src: Tensor, dst: Tensor, num_src: int, num_dst: int) -> Adjacency:
    return Adjacency.from_edges(src.cpu(), dst.cpu(), num_src, num_dst).to(src.device)


def relational(x: Tensor, weight: Tensor, pairs: Pairs) -> Tensor:
    """Return the sum over relations, [N, Fo]; differentiable in x [N, Fi] and weight [R, Fi, Fo]."""
    rows = finished(x, Epilogue(), pairs.into)
    products = [part @ one for part, one in zip(rows.split(pairs.counts), weight.unbind(0), strict=False)]
    joined = torch.cat(products) if products else rows.new_zeros(0, weight.shape[2])
    return finished(joined, Epilogue(), pairs.out_of)
