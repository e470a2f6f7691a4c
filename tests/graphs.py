"""Weird graphs, by name: (src, dst, number of nodes)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from runner.kernels.adjacency import Adjacency

Edges = tuple[Tensor, Tensor, int]


def _edges(pairs: list[tuple[int, int]], num_nodes: int) -> Edges:
    both = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2)
    return both[:, 0].clone(), both[:, 1].clone(), num_nodes


def random_edges(num_nodes: int, num_edges: int, seed: int = 0) -> Edges:
    """Directed, with duplicates and loops as chance has it."""
    generator = torch.Generator().manual_seed(seed)
    src = torch.randint(0, num_nodes, (num_edges,), generator=generator)
    return src, torch.randint(0, num_nodes, (num_edges,), generator=generator), num_nodes


def symmetric(edges: Edges) -> Edges:
    """Both directions of every edge."""
    src, dst, num_nodes = edges
    return torch.cat([src, dst]), torch.cat([dst, src]), num_nodes


def _hub(num_nodes: int) -> Edges:
    others = torch.arange(1, num_nodes)
    return others, torch.zeros_like(others), num_nodes


WEIRD: dict[str, Edges] = {
    "one node, no edge": _edges([], 1),
    "no edges": _edges([], 5),
    "one loop": _edges([(0, 0)], 1),
    "isolated nodes": _edges([(0, 1), (1, 0)], 6),
    "duplicates and loops": _edges([(0, 1), (0, 1), (1, 0), (2, 2), (2, 2), (1, 2)], 3),
    "directed path": _edges([(k, k + 1) for k in range(9)], 10),
    "hub": _hub(40),
    "as many edges as nodes": _edges([(k, (3 * k + 1) % 12) for k in range(12)], 12),
    "random directed": random_edges(33, 150),
    "random symmetric": symmetric(random_edges(47, 160, seed=1)),
}


def adjacency(edges: Edges) -> Adjacency:
    src, dst, num_nodes = edges
    return Adjacency.from_edges(src, dst, num_nodes, num_nodes)


def dense(edges: Edges, weight: Tensor | None = None) -> Tensor:
    """float64 [N, N], A[i, j] = sum of the weights of the edges j → i."""
    src, dst, num_nodes = edges
    matrix = torch.zeros(num_nodes, num_nodes, dtype=torch.float64)
    values = torch.ones(len(src), dtype=torch.float64) if weight is None else weight.double()
    return matrix.index_put((dst, src), values, accumulate=True)


def named() -> Iterator[str]:
    yield from WEIRD
