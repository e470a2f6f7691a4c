"""Where training batches and evaluations come from: one full graph, sampled blocks, or batches of graphs.

Legend: N nodes, E edges, F features, K classes, n items of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from runner.gnn.data.graph_data import GraphData, Split
from runner.gnn.dgl_compat import import_dgl


class BatchSource(Protocol):
    """What a training loop needs of the data."""

    def train_batches(self, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (logits [n, K], labels [n]) of each batch of an epoch; the order is drawn from ``seed``."""
        ...

    def evaluate(self, parts: tuple[str, ...]) -> dict[str, tuple[Tensor, Tensor]]:
        """Return (logits [n, K], labels [n]) of the named parts of the split; the caller has switched to eval and no_grad."""
        ...


def to_dgl(data: GraphData, device: torch.device) -> Any:
    """Return the graph as DGL has it, edge e with id e, its weights under ``edata["weight"]``."""
    graph = import_dgl().graph((data.src, data.dst), num_nodes=data.num_nodes)
    if data.edge_weight is not None:
        graph.edata["weight"] = data.edge_weight
    return graph.to(device) if device.type != "cpu" else graph


class FullGraph:
    """Every epoch is one step over the whole graph.

    Args:
        forward: features [N, F] -> logits [N, K], in the order of ``features``.
        features: float32 [N, F].
        labels: int64 [N], in the same order.
        split: indices into that order.
    """

    def __init__(self, forward: Callable[[Tensor], Tensor], features: Tensor, labels: Tensor, split: Split) -> None:
        self._forward, self._features, self._labels, self._split = forward, features, labels, split

    def train_batches(self, seed: int) -> Iterator[tuple[Tensor, Tensor]]:  # noqa: ARG002 (nothing is drawn)
        rows = self._split.train
        yield self._forward(self._features)[rows], self._labels[rows]

    def evaluate(self, parts: tuple[str, ...]) -> dict[str, tuple[Tensor, Tensor]]:
        logits = self._forward(self._features)
        return {part: (logits[rows], self._labels[rows]) for part in parts for rows in [getattr(self._split, part)]}


class SampledNodes:
    """Batches of seed nodes with their neighbour-sampled blocks (DGL's NeighborSampler); evaluation is on the full graph, exact.

    Args:
        module: takes a list of blocks, one a layer.
        graph: that is sampled from.
        data: its features, labels and split.
        fanouts: in-neighbours sampled a layer.
        batch_size: seed nodes a batch.
        full: evaluates on the full graph.
    """

    def __init__(
        self, module: nn.Module, graph: Any, data: GraphData, fanouts: list[int], batch_size: int, full: BatchSource
    ) -> None:
        dgl = import_dgl()
        self._module, self._graph, self._data, self._batch_size = module, graph, data, batch_size
        self._sampler = dgl.dataloading.NeighborSampler(fanouts)
        self._edge_id = dgl.EID
        self._full = full

    def train_batches(self, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        import_dgl().seed(seed)
        rows = self._data.split.train
        order = rows[torch.randperm(rows.numel(), generator=torch.Generator().manual_seed(seed))]
        for seeds in _cut(order, self._batch_size):
            with _one_thread():
                inputs, outputs, blocks = self._sampler.sample_blocks(self._graph, seeds.to(self._graph.device))
            if self._data.edge_weight is not None:
                for block in blocks:
                    block.edata["weight"] = self._graph.edata["weight"][block.edata[self._edge_id]]
            features = self._data.dense_features(inputs.cpu()).to(self._graph.device)
            yield self._module(blocks, features), self._data.labels[outputs.cpu()].to(self._graph.device)

    def evaluate(self, parts: tuple[str, ...]) -> dict[str, tuple[Tensor, Tensor]]:
        return self._full.evaluate(parts)


class GraphBatches:
    """Batches of whole graphs, each one disconnected DGL graph."""

    def __init__(self, module: nn.Module, data: GraphData, split: Split, batch_size: int, device: torch.device) -> None:
        assert data.graph_offsets is not None
        self._module, self._data, self._split, self._batch_size, self._device = module, data, split, batch_size, device
        self._sizes = data.graph_offsets.diff()
        graph_of_edge = torch.searchsorted(data.graph_offsets, data.dst, right=True) - 1
        self._edges = torch.argsort(graph_of_edge, stable=True)
        self._num_edges = torch.bincount(graph_of_edge, minlength=self._sizes.numel())
        self._edge_offsets = torch.cat([torch.zeros(1, dtype=torch.int64), self._num_edges.cumsum(0)])
        self._kept: dict[str, list[tuple[Any, Tensor, Tensor]]] = {}

    def train_batches(self, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        rows = self._split.train
        order = rows[torch.randperm(rows.numel(), generator=torch.Generator().manual_seed(seed))]
        for graphs in _cut(order, self._batch_size):
            batch, features, labels = self._collate(graphs)
            yield self._module(batch, features), labels

    def evaluate(self, parts: tuple[str, ...]) -> dict[str, tuple[Tensor, Tensor]]:
        found = {}
        for part in parts:
            if not getattr(self._split, part).numel():
                continue
            if part not in self._kept:
                self._kept[part] = [
                    self._collate(graphs) for graphs in getattr(self._split, part).split(8 * self._batch_size)
                ]
            batches = self._kept[part]
            logits = [self._module(batch, features) for batch, features, _ in batches]
            found[part] = (torch.cat(logits), torch.cat([labels for _, _, labels in batches]))
        return found

    def _collate(self, graphs: Tensor) -> tuple[Any, Tensor, Tensor]:
        """Join graphs into one DGL graph; returns it, its features [N, F] and the graphs' labels [n]."""
        data = self._data
        assert data.graph_offsets is not None
        nodes = _ranges(data.graph_offsets[graphs], self._sizes[graphs])
        edges = self._edges[_ranges(self._edge_offsets[graphs], self._num_edges[graphs])]
        first = self._sizes[graphs].cumsum(0) - self._sizes[graphs]
        shift = (first - data.graph_offsets[graphs]).repeat_interleave(self._num_edges[graphs])
        batch = import_dgl().graph((data.src[edges] + shift, data.dst[edges] + shift), num_nodes=nodes.numel())
        batch.set_batch_num_nodes(self._sizes[graphs])
        batch.set_batch_num_edges(self._num_edges[graphs])
        return batch.to(self._device), data.dense_features(nodes).to(self._device), data.labels[graphs].to(self._device)


def _cut(order: Tensor, size: int) -> list[Tensor]:
    """Cut into batches; a rest of one joins the batch before it, since a batch norm can't take a single row."""
    batches = list(order.split(size))
    if size > 1 and len(batches) > 1 and batches[-1].numel() == 1:
        batches[-2:] = [torch.cat(batches[-2:])]
    return batches


@contextmanager
def _one_thread() -> Iterator[None]:
    """Sample with one thread: DGL seeds each thread's generator, and which thread gets which node changes from call to call."""
    utils = import_dgl().utils
    before = utils.get_num_threads()
    utils.set_num_threads(1)
    try:
        yield
    finally:
        utils.set_num_threads(before)


def _ranges(starts: Tensor, counts: Tensor) -> Tensor:
    """Return ``start, start + 1, … `` for each pair, joined."""
    first = counts.cumsum(0) - counts
    return torch.arange(int(counts.sum())) + (starts - first).repeat_interleave(counts)
