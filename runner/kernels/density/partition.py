"""Communities of a graph, and the order of nodes that puts each community's nodes side by side; found once, then kept on disk.

METIS (pymetis) runs in a process of its own: it can end the process that calls it, and must not end ours.

Legend: N nodes, P communities.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from runner.errors import UserError
from runner.kernels.adjacency import Adjacency
from runner.kernels.cache import keep, kept
from runner.kernels.density import orders

_FORMAT = 1  # of what is kept: part of its name
# Above so many nodes METIS cuts in two levels. A district's rows of 64 features take 2 MiB, so that parts which follow one another find
# each other's in a core's cache; METIS itself needs no second level for speed (1 M nodes, 20 M edges at once: 45 s, 2 GiB; measured).
_DISTRICT_FROM, _DISTRICT_SIZE = 100_000, 8192
_ORDERS = {"degree": orders.by_degree, "rcm": orders.by_bandwidth, "label_propagation": orders.by_label}

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Partition:
    """An order of the nodes and where each community begins in it.

    Attributes:
        order: int64 [N]; new node k is old node ``order[k]``.
        part_ptr: int64 [P + 1]; community p owns new nodes ``part_ptr[p]`` … ``part_ptr[p + 1] - 1``; none is empty.
        seconds: that finding it took, also where it was kept since.
        peak_bytes: memory of METIS's process at its highest; None for other methods.
        is_kept: whether it came from disk.
    """

    order: Tensor
    part_ptr: Tensor
    seconds: float = 0.0
    peak_bytes: int | None = None
    is_kept: bool = False

    @property
    def part_of_row(self) -> Tensor:
        """int64 [N]: community of each new node."""
        return torch.repeat_interleave(torch.arange(self.part_ptr.numel() - 1), self.part_ptr.diff())


def partition(adjacency: Adjacency, method: str, block_size: int, on_progress: Progress | None = None) -> Partition:
    """Split a square graph into communities of about ``block_size`` nodes.

    Args:
        adjacency: any square graph; communities are found on a symmetric, simple, loop-free copy.
        method: ``metis``; or an order of the nodes, cut every ``block_size``: ``label_propagation``, ``rcm`` (reverse Cuthill-McKee),
            ``degree`` (hubs first), ``none`` (as they are).
        block_size: nodes a community, on average.
        on_progress: called with steps done and steps in all, where METIS cuts in several.

    Raises:
        UserError: where the METIS process fails.
    """
    num_nodes = adjacency.num_dst
    if method == "none" or num_nodes <= block_size:
        return Partition(torch.arange(num_nodes), _cuts(num_nodes, block_size))
    name = f"partitions/{adjacency.digest[:24]}-{method}-{block_size}-{_FORMAT}.npz"
    found = _kept(name, num_nodes)
    if found is not None:
        return found
    start = time.perf_counter()
    pattern = simple_copy(adjacency)
    if method == "metis":
        part, peak_bytes = _run_metis(pattern, -(-num_nodes // block_size), on_progress)
        counts = torch.bincount(part)
        counts = counts[counts > 0]  # METIS leaves parts empty
        order, part_ptr = (
            torch.argsort(part, stable=True),
            torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]),
        )
    else:
        order, part_ptr, peak_bytes = _ORDERS[method](pattern), _cuts(num_nodes, block_size), None
    made = Partition(order, part_ptr, time.perf_counter() - start, peak_bytes)
    keep(
        name,
        lambda file: np.savez(file, order=order, part_ptr=part_ptr, seconds=made.seconds, peak_bytes=peak_bytes or 0),
    )
    return made


def _cuts(num_nodes: int, block_size: int) -> Tensor:
    return torch.cat([torch.arange(0, num_nodes, block_size), torch.tensor([num_nodes])])


def _kept(name: str, num_nodes: int) -> Partition | None:
    """Return what an earlier run found; None where it isn't there, or is no such thing."""
    path = kept(name)
    if path is None:
        return None
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            order, part_ptr = (torch.from_numpy(stored[key].astype(np.int64)) for key in ("order", "part_ptr"))
            seconds, peak_bytes = float(stored["seconds"]), int(stored["peak_bytes"]) or None
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    is_order = order.shape == (num_nodes,) and torch.equal(order.sort().values, torch.arange(num_nodes))
    if (
        not is_order
        or part_ptr.numel() < 2
        or part_ptr[0] != 0
        or part_ptr[-1] != num_nodes
        or not bool((part_ptr.diff() > 0).all())
    ):
        return None
    return Partition(order, part_ptr, seconds, peak_bytes, is_kept=True)


def simple_copy(adjacency: Adjacency) -> sparse.csr_array:
    """Return the pattern of A + Aᵀ without loops and duplicates: what METIS can take."""
    pattern = adjacency.matrix(adjacency.values(None))
    both = (pattern + pattern.T).tocsr()
    both.sum_duplicates()
    both.setdiag(0)
    both.eliminate_zeros()
    return both


def _run_metis(graph: sparse.csr_array, num_parts: int, on_progress: Progress | None) -> tuple[Tensor, int | None]:
    """Return int64 [N], the part of each node, and the bytes that it took."""
    num_nodes = graph.shape[0]
    with tempfile.TemporaryDirectory(prefix="gearsail-metis-") as folder:
        given, found, errors = (Path(folder, name) for name in ("graph.npz", "part.npy", "errors.txt"))
        district_size = _DISTRICT_SIZE if num_nodes > _DISTRICT_FROM else num_nodes
        np.savez(given, indptr=graph.indptr, indices=graph.indices, num_parts=num_parts, district_size=district_size)
        command = [sys.executable, "-m", "runner.kernels.density.metis_worker", str(given), str(found)]
        with (
            errors.open("w") as stderr,
            subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=stderr, text=True, cwd=Path(__file__).parents[3]
            ) as worker,
        ):
            peak_bytes = _follow(worker, on_progress)
        if worker.returncode != 0:
            last = errors.read_text().strip().splitlines()[-1:] or ["no message"]
            raise UserError(
                f"METIS failed with exit code {worker.returncode} on {num_nodes} nodes ({last[0]}); kernel.partition=none goes without it"
            )
        part = np.load(found, allow_pickle=False) if found.is_file() else np.empty(0, np.int64)
        if part.shape != (num_nodes,) or part.min() < 0 or part.max() >= num_nodes:
            raise UserError(
                f"METIS returned {part.shape} parts for {num_nodes} nodes; kernel.partition=none goes without it"
            )
        return torch.from_numpy(part.astype(np.int64)), peak_bytes


def _follow(worker: subprocess.Popen[str], on_progress: Progress | None) -> int | None:
    """Read what the worker says until it ends, and end it if we are ended; returns its peak memory."""
    peak_bytes = None
    try:
        assert worker.stdout is not None
        for line in worker.stdout:
            match line.split():
                case ["peak", number]:
                    peak_bytes = int(number)
                case [done, total] if on_progress is not None:
                    on_progress(int(done), int(total))
        worker.wait()
    finally:
        if worker.poll() is None:
            worker.kill()
            worker.wait()
    return peak_bytes
