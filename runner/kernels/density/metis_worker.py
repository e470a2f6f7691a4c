"""Run METIS on a CSR file and write each node's part: ``python -m runner.kernels.density.metis_worker GRAPH.npz PART.npy``."""

from __future__ import annotations

import sys

import numpy as np
import pymetis


def main(given: str, found: str) -> None:
    """Read ``indptr, indices, num_parts``, write int64 [N]. pymetis repeats itself exactly for equal input."""
    with np.load(given, allow_pickle=False) as graph:
        adjacency = pymetis.CSRAdjacency(adj_starts=graph["indptr"], adjacent=graph["indices"])
        _, part = pymetis.part_graph(int(graph["num_parts"]), adjacency=adjacency)
    np.save(found, np.asarray(part, dtype=np.int64))


if __name__ == "__main__":
    main(*sys.argv[1:])
