"""Communities of a graph, and the order of nodes that puts each community's nodes side by side.

METIS (pymetis) runs in a process of its own: it can end the process that calls it, and must not end ours.

Legend: N nodes, P communities.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from runner.errors import UserError
from runner.kernels.adjacency import Adjacency


@dataclass(frozen=True)
class Partition:
    """An order of the nodes and where each community begins in it.

    Attributes:
        order: int64 [N]; new node k is old node ``order[k]``.
        part_ptr: int64 [P + 1]; community p owns new nodes ``part_ptr[p]`` … ``part_ptr[p + 1] - 1``; none is empty.
    """

    order: Tensor
    part_ptr: Tensor

    @property
    def part_of_row(self) -> Tensor:
        """int64 [N]: community of each new node."""
        return torch.repeat_interleave(torch.arange(self.part_ptr.numel() - 1), self.part_ptr.diff())


def partition(adjacency: Adjacency, method: str, block_size: int) -> Partition:
    """Split a square graph into communities of about ``block_size`` nodes.

    Args:
        adjacency: any square graph; communities are found on a symmetric, simple, loop-free copy.
        method: ``metis``, or ``none``: the nodes as they are, cut every ``block_size``.
        block_size: nodes a community, on average.

    Raises:
        UserError: where the METIS process fails.
    """
    num_nodes = adjacency.num_dst
    num_parts = max(1, -(-num_nodes // block_size))
    if method == "none" or num_parts == 1:
        cuts = torch.arange(0, num_nodes, block_size)
        return Partition(torch.arange(num_nodes), torch.cat([cuts, torch.tensor([num_nodes])]))
    part = _run_metis(simple_copy(adjacency), num_parts)
    order = torch.argsort(part, stable=True)
    counts = torch.bincount(part, minlength=num_parts)
    counts = counts[counts > 0]  # METIS leaves parts empty
    return Partition(order, torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]))


def simple_copy(adjacency: Adjacency) -> sparse.csr_array:
    """Return the pattern of A + Aᵀ without loops and duplicates: what METIS can take."""
    pattern = adjacency.matrix(adjacency.values(None))
    both = (pattern + pattern.T).tocsr()
    both.sum_duplicates()
    both.setdiag(0)
    both.eliminate_zeros()
    return both


def _run_metis(graph: sparse.csr_array, num_parts: int) -> Tensor:
    """Return int64 [N]: the part of each node."""
    with tempfile.TemporaryDirectory(prefix="gearsail-metis-") as folder:
        given, found = Path(folder, "graph.npz"), Path(folder, "part.npy")
        np.savez(given, indptr=graph.indptr, indices=graph.indices, num_parts=num_parts)
        command = [sys.executable, "-m", "runner.kernels.density.metis_worker", str(given), str(found)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[3])
        if done.returncode != 0:
            last = done.stderr.strip().splitlines()[-1:] or ["no message"]
            raise UserError(
                f"METIS failed with exit code {done.returncode} on {graph.shape[0]} nodes ({last[0]}); "
                "kernel.partition=none goes without it"
            )
        part = np.load(found, allow_pickle=False) if found.is_file() else np.empty(0, np.int64)
        if part.shape != (graph.shape[0],) or part.min() < 0 or part.max() >= num_parts:
            raise UserError(
                f"METIS returned {part.shape} parts for {graph.shape[0]} nodes; kernel.partition=none goes without it"
            )
        return torch.from_numpy(part.astype(np.int64))
