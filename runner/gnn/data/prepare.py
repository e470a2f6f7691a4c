"""RawGraph → GraphData: edges merged and added, features and labels made or normalised, the split drawn. Each step reports itself.

Legend: N nodes, E edges, F features, C classes.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from runner.errors import DataError
from runner.gnn.data.graph_data import Features, GraphData, RawGraph, Split
from runner.schema import DatasetConfig, parse_sized

_DEGREE_COLUMNS = 64  # one-hot degrees: larger ones share the last column
_MAX_ENTRIES = 2 * 10**9  # made features: 8 GB
_SPARSE_BELOW = 0.1  # features with fewer non-zeros than this are kept as CSR


def prepare(raw: RawGraph, config: DatasetConfig) -> GraphData:
    """Apply ``config`` to a graph as its file has it.

    Raises:
        DataError: where no edge, feature, label or training node is left, or a label is out of range.
    """
    report = list(raw.notes)
    edges = _Edges(raw.src, raw.dst, raw.edge_weight)
    if config.task == "graph":
        _check_graphs_apart(raw)
    if config.merge_duplicates:
        edges = _merge(edges, raw.num_nodes, report)
    if config.undirected:
        edges = _add_reverse(edges, raw.num_nodes, report)
    edges = _change_loops(edges, raw.num_nodes, config.self_loops, report)
    if not edges.src.numel():
        raise DataError(f"{_of(raw)}: the graph has no edges; dataset.self_loops=add gives every node one to itself")
    features = _normalize(_features(raw, edges, config, report), config.normalize, report)
    labels = _labels(raw, edges, config, report)
    split, folds = _split(raw, labels, config, report)
    return GraphData(
        name=raw.name,
        task=config.task,
        src=edges.src,
        dst=edges.dst,
        num_nodes=raw.num_nodes,
        edge_weight=edges.weight,
        features=features,
        labels=labels,
        num_classes=int(labels.max()) + 1,
        split=split,
        folds=folds,
        graph_offsets=raw.graph_offsets if config.task == "graph" else None,
        node_ids=raw.node_ids,
        report=tuple(report),
    )


def _of(raw: RawGraph) -> str:
    """What messages call a graph: its file, or its name."""
    return raw.origin or raw.name


def _check_graphs_apart(raw: RawGraph) -> None:
    if raw.graph_offsets is None:
        return
    graph = [torch.searchsorted(raw.graph_offsets, ends, right=True) - 1 for ends in (raw.src, raw.dst)]
    crossing = (graph[0] != graph[1]).nonzero().flatten()
    if crossing.numel():
        edge = int(crossing[0])
        raise DataError(
            f"{_of(raw)}: edge {edge} goes from node {int(raw.src[edge])} of graph {int(graph[0][edge])} to node "
            f"{int(raw.dst[edge])} of graph {int(graph[1][edge])}; graphs of a set must not be connected"
        )


@dataclasses.dataclass(frozen=True)
class _Edges:
    src: Tensor
    dst: Tensor
    weight: Tensor | None

    def pick(self, index: Tensor) -> _Edges:
        return _Edges(self.src[index], self.dst[index], None if self.weight is None else self.weight[index])

    def plus(self, src: Tensor, dst: Tensor, weight: Tensor | None) -> _Edges:
        joined = None if self.weight is None or weight is None else torch.cat([self.weight, weight])
        return _Edges(torch.cat([self.src, src]), torch.cat([self.dst, dst]), joined)


def _merge(edges: _Edges, num_nodes: int, report: list[str]) -> _Edges:
    codes, position = torch.unique(edges.src * num_nodes + edges.dst, return_inverse=True)
    merged = edges.src.numel() - codes.numel()
    if not merged:
        return edges
    report.append(f"{merged} merged: edges with the same source and destination")
    weight = None if edges.weight is None else torch.zeros(codes.numel()).index_add_(0, position, edges.weight)
    return _Edges(codes // num_nodes, codes % num_nodes, weight)


def _add_reverse(edges: _Edges, num_nodes: int, report: list[str]) -> _Edges:
    """Add the reverse of each edge that has none; a graph that is symmetric already stays as it is."""
    missing = ~torch.isin(edges.dst * num_nodes + edges.src, edges.src * num_nodes + edges.dst)
    if not missing.any():
        return edges
    report.append(f"{int(missing.sum())} added: reverse edges")
    one_way = edges.pick(missing)
    return edges.plus(one_way.dst, one_way.src, one_way.weight)


def _change_loops(edges: _Edges, num_nodes: int, mode: str, report: list[str]) -> _Edges:
    loops = edges.src == edges.dst
    if mode == "remove" and loops.any():
        report.append(f"{int(loops.sum())} dropped: self loops")
        return edges.pick(~loops)
    if mode == "add":
        without = torch.ones(num_nodes, dtype=torch.bool)
        without[edges.src[loops]] = False
        nodes = without.nonzero().flatten()
        if nodes.numel():
            report.append(f"{nodes.numel()} added: self loops")
        return edges.plus(nodes, nodes, None if edges.weight is None else torch.ones(nodes.numel()))
    return edges


def _features(raw: RawGraph, edges: _Edges, config: DatasetConfig, report: list[str]) -> Features:
    kind, width = parse_sized("dataset.features", config.features, ("given", "degree", "tags"), "random")
    if kind == "random" and raw.num_nodes * width > _MAX_ENTRIES:
        raise DataError(
            f"{_of(raw)}: dataset.features={config.features} for {raw.num_nodes} nodes exceeds {_MAX_ENTRIES} numbers"
        )
    if kind == "random":
        generator = torch.Generator().manual_seed(config.seed)
        report.append(f"features: {width} random numbers a node, seed {config.seed}")
        return torch.randn(raw.num_nodes, width, generator=generator)
    if kind == "degree":
        degree = torch.bincount(edges.dst, minlength=raw.num_nodes).clamp(max=_DEGREE_COLUMNS - 1)
        report.append(f"features: one-hot in-degree, {_DEGREE_COLUMNS - 1} and above together")
        return _one_hot(degree, _DEGREE_COLUMNS)
    if kind == "tags" and raw.tags is None:
        raise DataError(f"{_of(raw)}: no node tags are stored; use dataset.features=degree or random:WIDTH")
    if raw.tags is not None and (kind == "tags" or config.task == "graph"):
        tags = _one_hot(raw.tags, int(raw.tags.max()) + 1)
        joined = None if kind == "tags" else raw.features
        report.append(
            f"features: one-hot node tags, {tags.shape[1]} kinds" + ("" if joined is None else ", then the file's")
        )
        if joined is None:
            return tags
        given = joined.numpy() if isinstance(joined, Tensor) else joined.toarray()
        return torch.from_numpy(np.concatenate([tags.toarray(), given], axis=1).astype(np.float32))
    if raw.features is None:
        raise DataError(f"{_of(raw)}: no features are stored; use dataset.features=degree or random:WIDTH")
    return _compact(raw.features)


def _one_hot(values: Tensor, width: int) -> sparse.csr_array:
    count = values.numel()
    return sparse.csr_array((np.ones(count, np.float32), values.numpy(), np.arange(count + 1)), shape=(count, width))


def _compact(features: Features) -> Features:
    """Keep as CSR what is mostly zeros, whatever form the file has."""
    if not isinstance(features, Tensor) or not features.numel():
        return features
    if torch.count_nonzero(features) < _SPARSE_BELOW * features.numel():
        return sparse.csr_array(features.numpy())
    return features


def _normalize(features: Features, mode: str, report: list[str]) -> Features:
    if mode == "row":
        report.append("features: rows divided by their sum")
        if isinstance(features, Tensor):
            total = features.sum(dim=1, keepdim=True)
            return features / torch.where(total == 0, torch.ones_like(total), total)
        sums = np.asarray(features.sum(axis=1)).reshape(-1)
        scaled = features.copy()
        scaled.data = scaled.data / np.repeat(np.where(sums == 0, 1, sums), np.diff(scaled.indptr)).astype(np.float32)
        return scaled
    if mode == "standard":
        report.append("features: columns to mean 0 and deviation 1")
        dense = features if isinstance(features, Tensor) else torch.from_numpy(features.toarray())
        deviation = dense.std(dim=0, correction=0)
        return (dense - dense.mean(dim=0)) / torch.where(deviation == 0, torch.ones_like(deviation), deviation)
    return features


def _labels(raw: RawGraph, edges: _Edges, config: DatasetConfig, report: list[str]) -> Tensor:
    kind, num_classes = parse_sized("dataset.labels", config.labels, ("given",), "degree")
    if config.task == "graph":
        if raw.graph_offsets is None or raw.graph_labels is None:
            raise DataError(f"{_of(raw)}: one graph, not a labelled set of graphs; use dataset.task=node")
        if kind == "degree":
            raise DataError(
                f"{_of(raw)}: dataset.labels={config.labels} labels nodes, dataset.task=graph needs the file's graph labels"
            )
        return _checked(raw.graph_labels, _of(raw), "graph", int(raw.graph_labels.numel()))
    if kind == "degree":
        if num_classes > raw.num_nodes:
            raise DataError(f"{_of(raw)}: dataset.labels={config.labels} for {raw.num_nodes} nodes")
        degree = torch.bincount(edges.dst, minlength=raw.num_nodes)
        # nodes of equal degree share a class, so there can be fewer classes than asked for
        place = torch.searchsorted(degree.sort().values, degree)
        labels = torch.unique(place * num_classes // raw.num_nodes, return_inverse=True)[1]
        report.append(f"labels: {int(labels.max()) + 1} classes of nodes by in-degree")
        return labels
    if raw.labels is None:
        raise DataError(
            f"{_of(raw)}: no node labels are stored; use dataset.labels=degree:CLASSES"
            + (", or dataset.task=graph" if raw.graph_labels is not None else "")
        )
    return _checked(raw.labels, _of(raw), "node", raw.num_nodes)


def _checked(labels: Tensor, name: str, item: str, bound: int) -> Tensor:
    bad = ((labels < -1) | (labels >= max(bound, 2))).nonzero().flatten()
    if bad.numel():
        first = int(bad[0])
        raise DataError(
            f"{name}: {item} {first} has label {int(labels[first])}, out of range: 0 … below the number of {item}s, "
            "or -1 for unlabelled"
        )
    if int(labels.max()) < 0:
        raise DataError(f"{name}: no {item} is labelled")
    return labels


def _split(raw: RawGraph, labels: Tensor, config: DatasetConfig, report: list[str]) -> tuple[Split, tuple[Split, ...]]:
    of_items = raw.splits if (raw.graph_offsets is not None) == (config.task == "graph") else ()
    is_folds = bool(of_items) and all(not split.val.numel() for split in of_items) and len(of_items) > 1
    folds = of_items if is_folds else ()
    public = () if is_folds else of_items
    if config.split == "public" and not public:
        raise DataError(f"{_of(raw)}: no public split is stored; use dataset.split=random")
    if public and config.split != "random":
        if config.split_index >= len(public):
            raise DataError(f"{_of(raw)}: dataset.split_index={config.split_index}, the file has {len(public)} splits")
        split = public[config.split_index]
        report.append(
            f"split: public, number {config.split_index} of {len(public)}; fractions and split_seed are not used"
        )
    else:
        split = random_split(labels, config.train_fraction, config.val_fraction, config.split_seed)
        report.append(f"split: random, seed {config.split_seed}")
    return _check_split(_of(raw), split, labels, config, report), folds


def random_split(labels: Tensor, train_fraction: float, val_fraction: float, seed: int) -> Split:
    """Draw a split of the labelled items; the same seed draws the same split.

    Args:
        labels: int64 [n], -1 for unlabelled.
        train_fraction, val_fraction: shares of the labelled items; the rest is for testing.
        seed: of the draw.
    """
    labelled = (labels >= 0).nonzero().flatten()
    order = labelled[torch.randperm(labelled.numel(), generator=torch.Generator().manual_seed(seed))]
    first = round(train_fraction * order.numel())
    second = first + round(val_fraction * order.numel())
    return Split(
        train=order[:first].sort().values, val=order[first:second].sort().values, test=order[second:].sort().values
    )


def _check_split(name: str, split: Split, labels: Tensor, config: DatasetConfig, report: list[str]) -> Split:
    if torch.isin(split.train, torch.cat([split.val, split.test])).any():
        raise DataError(f"{name}: the split has nodes both in training and in validation or test")
    if torch.isin(split.val, split.test).any():
        raise DataError(f"{name}: the split has nodes both in validation and in test")
    parts = {part: indices[labels[indices] >= 0] for part, indices in vars(split).items()}
    dropped = sum(indices.numel() for indices in vars(split).values()) - sum(part.numel() for part in parts.values())
    if dropped:
        report.append(f"{dropped} dropped: unlabelled, from the split")
    for part, indices in parts.items():
        if not indices.numel() and not (part == "val" and config.val_fraction == 0):
            raise DataError(
                f"{name}: the {part} split is empty ({int((labels >= 0).sum())} labelled); "
                "change dataset.train_fraction, dataset.val_fraction or dataset.split"
            )
    report.append("split sizes: " + ", ".join(f"{part} {indices.numel()}" for part, indices in parts.items()))
    return Split(**parts)
