"""Orders of the nodes of a graph in which neighbours, or likes, come near each other.

Each takes a symmetric, simple, loop-free pattern and returns int64 [N]: new node k is old node ``order[k]``.

Legend: N nodes, E edges.
"""

from __future__ import annotations

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

_ROUNDS = 12  # of label propagation; labels have settled by then, or never will


def by_degree(pattern: sparse.csr_array) -> Tensor:
    """Return hubs first; nodes of equal degree stay as they are."""
    return torch.from_numpy(np.argsort(-np.diff(pattern.indptr), kind="stable").astype(np.int64))


def by_bandwidth(pattern: sparse.csr_array) -> Tensor:
    """Return the reverse Cuthill-McKee order: neighbours get near numbers.

    Source: Cuthill and McKee, 1969; George, 1971.
    """
    found = sparse.csgraph.reverse_cuthill_mckee(sparse.csr_matrix(pattern), symmetric_mode=True)
    return torch.from_numpy(np.asarray(found).astype(np.int64))


def by_label(pattern: sparse.csr_array, seed: int = 0) -> Tensor:
    """Return nodes that agreed on a label side by side: each takes the label that most of its neighbours have, the least of several.

    A random half of the nodes moves at a time: were all to move at once, the sides of a bipartite graph would swap labels for ever.

    Source: Raghavan et al., 2007.
    """
    num_nodes = pattern.shape[0]
    rng, labels = np.random.default_rng(seed), np.arange(num_nodes, dtype=np.int64)
    rows = np.repeat(np.arange(num_nodes, dtype=np.int64), np.diff(pattern.indptr))
    for _ in range(_ROUNDS):
        moves = rng.random(num_nodes) < 0.5
        winners = _most_frequent(rows, labels[pattern.indices], labels)
        changed = moves & (winners != labels)
        labels = np.where(changed, winners, labels)
        if not (winners != labels).any():
            break
    return torch.from_numpy(np.argsort(labels, kind="stable"))


def _most_frequent(rows: np.ndarray, seen: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return for each node the label that occurs most among ``seen`` in its rows; its own where it has none."""
    pairs, counts = np.unique(rows * labels.size + seen, return_counts=True)
    owners, found = pairs // labels.size, pairs % labels.size
    best = np.lexsort((found, -counts, owners))
    first = np.ones(best.size, dtype=bool)
    first[1:] = owners[best][1:] != owners[best][:-1]
    winners = labels.copy()
    winners[owners[best][first]] = found[best][first]
    return winners
