"""Run METIS on a CSR file and write each node's part: ``python -m runner.kernels.density.metis_worker GRAPH.npz PART.npy``.

Each finished step is a line ``DONE TOTAL`` on standard output, and the last line is ``peak BYTES``.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import numpy as np
import pymetis
from scipy import sparse


def main(given: str, found: str) -> None:
    """Read ``indptr, indices, num_parts, district_size``, write int64 [N]. pymetis repeats itself exactly for equal input."""
    with np.load(given, allow_pickle=False) as stored:
        shape = (stored["indptr"].size - 1,) * 2
        indices = stored["indices"]
        graph = sparse.csr_array((np.ones(indices.size, np.int8), indices, stored["indptr"]), shape=shape)
        num_parts, district_size = int(stored["num_parts"]), int(stored["district_size"])
    num_districts = -(-shape[0] // district_size)
    part = _cut(graph, num_parts) if num_districts == 1 else _cut_twice(graph, num_parts, num_districts)
    np.save(found, part)
    print("peak", _peak_bytes(), flush=True)


def _peak_bytes() -> int:
    """Return the most memory that this program has held. Where the system tells it: ``ru_maxrss`` begins with the parent's."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _cut(graph: sparse.csr_array, num_parts: int) -> np.ndarray:
    if num_parts == 1:
        return np.zeros(graph.shape[0], dtype=np.int64)
    adjacency = pymetis.CSRAdjacency(adj_starts=graph.indptr, adjacent=graph.indices)
    _, part = pymetis.part_graph(num_parts, adjacency=adjacency)
    return np.asarray(part, dtype=np.int64)


def _cut_twice(graph: sparse.csr_array, num_parts: int, num_districts: int) -> np.ndarray:
    """Cut into districts, and those into parts that are numbered district by district: parts with many edges between them are near."""
    district = _cut(graph, num_districts)
    print(1, num_districts + 1, flush=True)
    members = np.split(
        np.argsort(district, kind="stable"), np.cumsum(np.bincount(district, minlength=num_districts))[:-1]
    )
    part, first = np.empty(graph.shape[0], dtype=np.int64), 0
    for number, nodes in enumerate(members):
        share = max(1, round(num_parts * nodes.size / graph.shape[0]))
        if nodes.size:
            inner = _cut(graph[nodes][:, nodes].tocsr(), share)
            part[nodes], first = first + inner, first + share
        print(number + 2, num_districts + 1, flush=True)
    return part


if __name__ == "__main__":
    main(*sys.argv[1:])
