"""npz files: scipy CSR parts, edge arrays, undirected edge pairs with masks, and Gearsail's own layout.

Gearsail's layout (``format = "gearsail-graph-1"``), written by :func:`write_npz`; all but the first four are optional:

====================  =======================  =====================================================
array                 shape, dtype             is
====================  =======================  =====================================================
format                (), str                  ``gearsail-graph-1``
src, dst              [E] int64                edge e goes from src[e] to dst[e]
num_nodes             () int64                 N
edge_weight           [E] float32              weights
features              [N, F] float32           dense features
features_data,        [nnz], [nnz],            sparse features (CSR) instead of dense ones
  indices, _indptr,    [N + 1], [2]
  _shape
tags                  [N] int64                small categorical node labels
labels                [N] int64                classes 0 … C-1, -1 unlabelled
train, val, test      [n] int64                node indices of the split (train_0, val_0, … for several)
node_ids              [N] int64 or str         the nodes' own names
graph_offsets         [G + 1] int64            a set of graphs: graph g owns nodes offsets[g] … offsets[g+1]-1
graph_labels          [G] int64                class of each graph
====================  =======================  =====================================================
"""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import torch

from runner.errors import DataError
from runner.gnn.data.archive import check_num_nodes, read_npz
from runner.gnn.data.graph_data import Array, Features, RawGraph
from runner.gnn.data.npz_arrays import (
    Arrays,
    declared_nodes,
    read_csr,
    read_dense,
    read_ends,
    read_index_split,
    read_indices,
    read_labels,
    read_node_ids,
    read_offsets,
    read_offsets_of_sizes,
    read_splits,
    read_tags,
    read_weight,
)
from runner.results import write_atomically

FORMAT = "gearsail-graph-1"
_LAYOUTS = (
    "known: adj_data, adj_indices, adj_indptr, adj_shape; src/dst, src_li/dst_li or edge_index; edges, node_labels; "
    + FORMAT
)


def load_npz(path: Path) -> RawGraph:
    """Read any of the layouts above, told apart by the names of the arrays.

    Raises:
        DataError: where the file is no npz, has none of the layouts, or its arrays don't fit together.
    """
    arrays = Arrays(path, read_npz(path))
    if "format" in arrays:
        if str(arrays["format"]) != FORMAT:
            raise DataError(f"{path}: format '{arrays['format']}'; this version reads '{FORMAT}'")
        return _read_own(arrays)
    if "adj_indptr" in arrays:
        return _read_csr_parts(arrays)
    if "edges" in arrays:
        return _read_pairs(arrays)
    if any(name in arrays for name in ("src", "src_li", "edge_index", "row")):
        return _read_edge_arrays(arrays)
    raise DataError(f"{path}: no graph in its arrays ({', '.join(sorted(arrays.names)[:12])}); {_LAYOUTS}")


def write_npz(path: Path, graph: RawGraph) -> None:
    """Write a graph in Gearsail's layout; the file appears whole or not at all."""
    arrays: dict[str, Array] = {
        "format": np.array(FORMAT),
        "src": graph.src.numpy(),
        "dst": graph.dst.numpy(),
        "num_nodes": np.array(graph.num_nodes),
    }
    for name in ("edge_weight", "tags", "labels", "graph_offsets", "graph_labels"):
        tensor = getattr(graph, name)
        if tensor is not None:
            arrays[name] = tensor.numpy()
    if isinstance(graph.features, torch.Tensor):
        arrays["features"] = graph.features.numpy()
    elif graph.features is not None:
        csr = graph.features
        arrays |= {
            "features_data": csr.data,
            "features_indices": csr.indices,
            "features_indptr": csr.indptr,
            "features_shape": np.array(csr.shape),
        }
    if graph.node_ids is not None:
        ids = graph.node_ids
        arrays["node_ids"] = np.array([str(value) for value in ids]) if ids.dtype.hasobject else ids
    for index, split in enumerate(graph.splits):
        suffix = "" if len(graph.splits) == 1 else f"_{index}"
        for part in ("train", "val", "test"):
            arrays[f"{part}{suffix}"] = getattr(split, part).numpy()
    content = io.BytesIO()
    np.savez_compressed(content, allow_pickle=False, **arrays)
    write_atomically(path, content.getvalue())


def _read_own(arrays: Arrays) -> RawGraph:
    num_nodes = arrays.count("num_nodes")
    src, dst = read_ends(arrays, "src", "dst", num_nodes)
    features: Features | None = None
    if "features_indptr" in arrays:
        features = read_csr(arrays, "features", num_nodes)
    elif "features" in arrays:
        features = read_dense(arrays, "features", num_nodes)
    offsets = read_offsets(arrays, "graph_offsets", num_nodes) if "graph_offsets" in arrays else None
    num_items = num_nodes if offsets is None else len(offsets) - 1
    graph_labels = read_labels(arrays, "graph_labels", num_items, "graph") if "graph_labels" in arrays else None
    suffixes = (
        [""] if "train" in arrays else [f"_{index}" for index in range(len(arrays.names)) if f"train_{index}" in arrays]
    )
    return RawGraph(
        name=arrays.path.stem,
        src=src,
        dst=dst,
        num_nodes=num_nodes,
        edge_weight=read_weight(arrays, "edge_weight", len(src)) if "edge_weight" in arrays else None,
        features=features,
        labels=read_labels(arrays, "labels", num_nodes, "node") if "labels" in arrays else None,
        splits=tuple(read_index_split(arrays, f"train{end}", f"val{end}", f"test{end}", num_items) for end in suffixes),
        tags=read_tags(arrays, "tags", num_nodes) if "tags" in arrays else None,
        graph_offsets=offsets,
        graph_labels=graph_labels,
        node_ids=read_node_ids(arrays, num_nodes),
        notes=arrays.notes(FORMAT),
    )


def _read_csr_parts(arrays: Arrays) -> RawGraph:
    shape = arrays.ints("adj_shape")
    if shape.shape != (2,) or shape[0] != shape[1]:
        raise DataError(f"{arrays.path}: adj_shape is {shape.tolist()}; an adjacency matrix is square")
    matrix = read_csr(arrays, "adj", int(shape[0]))
    num_nodes = int(shape[0])
    features: Features | None = None
    if "attr_indptr" in arrays:
        features = read_csr(arrays, "attr", num_nodes)
    elif "attr_matrix" in arrays:
        features = read_dense(arrays, "attr_matrix", num_nodes)
    weight = None if (matrix.data == 1).all() else torch.from_numpy(matrix.data)
    labels = read_labels(arrays, "labels", num_nodes, "node") if "labels" in arrays else None
    if labels is not None and "unlabeled" in arrays:
        labels[read_indices(arrays, "unlabeled", num_nodes)] = -1
    rows = np.repeat(np.arange(num_nodes), np.diff(matrix.indptr))
    return RawGraph(
        name=arrays.path.stem,
        src=torch.from_numpy(rows),
        dst=torch.from_numpy(matrix.indices.astype(np.int64)),
        num_nodes=num_nodes,
        edge_weight=weight,
        features=features,
        labels=labels,
        splits=read_splits(arrays, num_nodes),
        notes=arrays.notes(f"CSR parts, {matrix.nnz} edges"),
    )


def _read_edge_arrays(arrays: Arrays) -> RawGraph:
    if "edge_index" in arrays:
        pair = arrays.ints("edge_index", ndim=2)
        if pair.shape[0] != 2:
            raise DataError(f"{arrays.path}: edge_index has shape {pair.shape}; (2, edges) expected")
        arrays.add("src", pair[0])
        arrays.add("dst", pair[1])
    source, target = next(pair for pair in (("src", "dst"), ("src_li", "dst_li"), ("row", "col")) if pair[0] in arrays)
    features = arrays.first("node_features", "features", "x", "feat")
    labels = arrays.first("node_labels", "labels", "y")
    num_nodes = declared_nodes(arrays, features, labels)
    src, dst = read_ends(arrays, source, target, num_nodes)
    if num_nodes is None:
        num_nodes = check_num_nodes(arrays.path, int(max(src.max(), dst.max())) + 1 if len(src) else 0)
    offsets = graph_labels = None
    if "graph_sizes" in arrays:
        offsets = read_offsets_of_sizes(arrays, num_nodes)
        if "graph_labels" in arrays:
            graph_labels = read_labels(arrays, "graph_labels", len(offsets) - 1, "graph")
            # {-1, 1} are two classes here, as in TU sets
            graph_labels = torch.unique(graph_labels, return_inverse=True)[1]
    weight = arrays.first("edge_weight", "weight")
    return RawGraph(
        name=arrays.path.stem,
        src=src,
        dst=dst,
        num_nodes=num_nodes,
        edge_weight=read_weight(arrays, weight, len(src)) if weight else None,
        features=read_dense(arrays, features, num_nodes) if features else None,
        tags=read_tags(arrays, "node_tags", num_nodes) if "node_tags" in arrays else None,
        labels=read_labels(arrays, labels, num_nodes, "node") if labels else None,
        splits=read_splits(arrays, num_nodes),
        graph_offsets=offsets,
        graph_labels=graph_labels,
        notes=arrays.notes(f"edge arrays, {len(src)} edges"),
    )


def _read_pairs(arrays: Arrays) -> RawGraph:
    """Undirected edges, one row a pair; both directions are made here, since the format means both."""
    pairs = arrays.ints("edges", ndim=2)
    if pairs.shape[1] != 2:
        raise DataError(f"{arrays.path}: edges has shape {pairs.shape}; (pairs, 2) expected")
    features, labels = arrays.first("node_features", "features"), arrays.first("node_labels", "labels")
    num_nodes = declared_nodes(arrays, features, labels)
    if num_nodes is None:
        num_nodes = check_num_nodes(arrays.path, int(pairs.max()) + 1 if len(pairs) else 0)
    ends = Arrays(arrays.path, {"edges[:, 0]": pairs[:, 0], "edges[:, 1]": pairs[:, 1]})
    u, v = read_ends(ends, "edges[:, 0]", "edges[:, 1]", num_nodes)
    again = torch.isin(u * num_nodes + v, v * num_nodes + u) & (u > v)  # the same pair, stored the other way round too
    u, v = u[~again], v[~again]
    back = u != v  # a loop is its own reverse
    return RawGraph(
        name=arrays.path.stem,
        src=torch.cat([u, v[back]]),
        dst=torch.cat([v, u[back]]),
        num_nodes=num_nodes,
        features=read_dense(arrays, features, num_nodes) if features else None,
        labels=read_labels(arrays, labels, num_nodes, "node") if labels else None,
        splits=read_splits(arrays, num_nodes),
        notes=(*arrays.notes(f"{len(u)} undirected edges, both directions made"),)
        + ((f"{int(again.sum())} pairs were stored both ways, kept once",) if again.any() else ()),
    )
