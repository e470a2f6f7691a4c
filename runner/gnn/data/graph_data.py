"""The graph records that every loader produces and every task consumes.

Legend: N nodes, E edges, F features, G graphs.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy import sparse
from torch import Tensor

Array = npt.NDArray[Any]
Features = Tensor | sparse.csr_array


@dataclass(frozen=True, kw_only=True)
class Split:
    """Node or graph indices of one split, each int64; ``val`` may be empty."""

    train: Tensor
    val: Tensor
    test: Tensor


@dataclass(frozen=True, kw_only=True)
class RawGraph:
    """A graph as its file has it: checked, but nothing added, merged or dropped.

    Attributes:
        name: for results.
        origin: its file, for messages; empty for a graph that has none.
        src, dst: int64 [E]; edge e goes from ``src[e]`` to ``dst[e]``. Duplicates and self loops are kept.
        num_nodes: N; isolated nodes count.
        edge_weight: float32 [E], or None where the file has no weights.
        features: float32 [N, F], dense or CSR, or None.
        tags: int64 [N] small categorical node labels (TU archives), or None.
        labels: int64 [N], -1 for unlabelled, or None.
        splits: public splits of the nodes (of the graphs where ``graph_offsets`` is set).
        graph_offsets: int64 [G + 1] for a set of graphs: graph g owns nodes ``graph_offsets[g]:graph_offsets[g + 1]``.
        graph_labels: int64 [G], or None.
        node_ids: the file's own id of each node, where they aren't 0 … N-1.
        notes: what was read and what was left out.
    """

    name: str
    src: Tensor
    dst: Tensor
    num_nodes: int
    origin: str = ""
    edge_weight: Tensor | None = None
    features: Features | None = None
    tags: Tensor | None = None
    labels: Tensor | None = None
    splits: tuple[Split, ...] = ()
    graph_offsets: Tensor | None = None
    graph_labels: Tensor | None = None
    node_ids: Array | None = None
    notes: tuple[str, ...] = ()

    @property
    def num_edges(self) -> int:
        """E, each direction of an undirected edge counted."""
        return int(self.src.numel())


@dataclass(frozen=True, kw_only=True)
class GraphData:
    """A graph ready for a model; made by :func:`runner.gnn.data.prepare.prepare`.

    Attributes:
        src, dst, num_nodes, edge_weight, graph_offsets, node_ids: as in :class:`RawGraph`.
        features: float32 [N, F]; CSR where few entries are non-zero. They stay so until a model asks for rows.
        labels: int64 [N] (node task) or [G] (graph task), -1 for unlabelled.
        num_classes: classes.
        split: of nodes or of graphs.
        folds: the file's own cross-validation folds, if any; ``val`` is empty in each.
        report: what was done to the graph, a line each.
    """

    name: str
    task: str
    src: Tensor
    dst: Tensor
    num_nodes: int
    edge_weight: Tensor | None
    features: Features
    labels: Tensor
    num_classes: int
    split: Split
    folds: tuple[Split, ...] = ()
    graph_offsets: Tensor | None = None
    node_ids: Array | None = None
    report: tuple[str, ...] = field(default=())

    @property
    def num_edges(self) -> int:
        """E, each direction of an undirected edge counted."""
        return int(self.src.numel())

    @property
    def num_features(self) -> int:
        """F."""
        return int(self.features.shape[1])

    @property
    def feature_format(self) -> str:
        """``csr`` or ``dense``."""
        return "dense" if isinstance(self.features, Tensor) else "csr"

    @cached_property
    def feature_density(self) -> float:
        """Share of feature entries that are not zero."""
        size = self.features.shape[0] * self.features.shape[1]
        if isinstance(self.features, Tensor):
            nonzero = int(torch.count_nonzero(self.features))
        else:
            nonzero = int(np.count_nonzero(self.features.data))
        return nonzero / size if size else 0.0

    def dense_features(self, nodes: Tensor | None = None) -> Tensor:
        """Return float32 [N, F] (or the rows of ``nodes``) as a model takes them; CSR becomes dense here and nowhere else."""
        if isinstance(self.features, Tensor):
            return self.features.contiguous() if nodes is None else self.features[nodes]
        rows = self.features if nodes is None else self.features[nodes.numpy()]
        return torch.from_numpy(np.ascontiguousarray(rows.toarray()))

    @cached_property
    def content_hash(self) -> str:
        """Hash of all that a training sees: edges, weights, features, labels, graphs, split and folds."""
        arrays: list[Tensor | None] = [torch.tensor(self.num_nodes), self.src, self.dst, self.edge_weight]
        arrays += [self.labels, self.graph_offsets]
        if isinstance(self.features, Tensor):
            arrays.append(self.features)
        else:
            csr = self.features
            arrays += [torch.from_numpy(part) for part in (csr.indptr, csr.indices, csr.data)]
        for split in (self.split, *self.folds):
            arrays += [split.train, split.val, split.test]
        digest = hashlib.sha256()
        for array in arrays:
            digest.update(f"{None if array is None else tuple(array.shape)};".encode())
            digest.update(b"" if array is None else np.ascontiguousarray(array.numpy()).data)
        return digest.hexdigest()[:16]
