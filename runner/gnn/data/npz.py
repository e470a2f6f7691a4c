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
  _indices, _indptr,    [N + 1], [2]
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

import tempfile
from pathlib import Path

import numpy as np
import torch
from scipy import sparse

from runner.errors import DataError
from runner.gnn.data.archive import read_npz
from runner.gnn.data.graph_data import Array, Features, RawGraph, Split

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
    arrays = _Arrays(path, read_npz(path))
    if "format" in arrays and str(arrays["format"]) == FORMAT:
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
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as stream:
        np.savez_compressed(stream, allow_pickle=False, **arrays)
    Path(stream.name).replace(path)


class _Arrays:
    """The arrays of one file, with checks that name the file."""

    def __init__(self, path: Path, arrays: dict[str, Array]) -> None:
        self.path, self._arrays = path, arrays

    @property
    def names(self) -> list[str]:
        return list(self._arrays)

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    def __getitem__(self, name: str) -> Array:
        if name not in self._arrays:
            raise DataError(f"{self.path}: array '{name}' is missing; it has {', '.join(sorted(self._arrays)[:12])}")
        return self._arrays[name]

    def get(self, name: str) -> Array | None:
        """An array that may be missing."""
        return self._arrays.get(name)

    def ints(self, name: str, ndim: int = 1) -> np.ndarray:
        """An integer array as int64 (floats are taken where they are whole)."""
        array = self[name]
        if array.ndim != ndim:
            raise DataError(f"{self.path}: '{name}' has shape {array.shape}; {ndim} dimension(s) expected")
        if array.dtype.kind == "f" and np.array_equal(array, np.floor(array)):
            array = array.astype(np.int64)
        if array.dtype.kind not in "iub":
            raise DataError(f"{self.path}: '{name}' holds {array.dtype}; integers expected")
        return array.astype(np.int64)

    def count(self, name: str) -> int:
        """A non-negative integer scalar."""
        array = self[name]
        if array.size != 1 or array.dtype.kind not in "iuf" or int(array.reshape(())) < 0:
            raise DataError(f"{self.path}: '{name}' must be one non-negative integer, it is {array.reshape(-1)[:3]}")
        return int(array.reshape(()))

    def floats(self, name: str, ndim: int = 1) -> np.ndarray:
        """A numeric array as float32."""
        array = self[name]
        if array.ndim != ndim or array.dtype.kind not in "fiub":
            raise DataError(
                f"{self.path}: '{name}' has shape {array.shape} and type {array.dtype}; {ndim} dimension(s) of numbers expected"
            )
        return array.astype(np.float32)


def _read_own(arrays: _Arrays) -> RawGraph:
    num_nodes = arrays.count("num_nodes")
    src, dst = _ends(arrays, "src", "dst", num_nodes)
    features: Features | None = None
    if "features_indptr" in arrays:
        features = _csr(arrays, "features", num_nodes)
    elif "features" in arrays:
        features = _dense(arrays, "features", num_nodes)
    offsets = _offsets(arrays, "graph_offsets", num_nodes) if "graph_offsets" in arrays else None
    num_items = num_nodes if offsets is None else len(offsets) - 1
    graph_labels = _labels(arrays, "graph_labels", num_items, "graph") if "graph_labels" in arrays else None
    suffixes = (
        [""] if "train" in arrays else [f"_{index}" for index in range(len(arrays.names)) if f"train_{index}" in arrays]
    )
    return RawGraph(
        name=arrays.path.stem,
        src=src,
        dst=dst,
        num_nodes=num_nodes,
        edge_weight=_weight(arrays, "edge_weight", len(src)),
        features=features,
        labels=_labels(arrays, "labels", num_nodes, "node") if "labels" in arrays else None,
        splits=tuple(_index_split(arrays, f"train{end}", f"val{end}", f"test{end}", num_items) for end in suffixes),
        tags=torch.from_numpy(arrays.ints("tags")) if "tags" in arrays else None,
        graph_offsets=offsets,
        graph_labels=graph_labels,
        node_ids=arrays.get("node_ids"),
        notes=(f"read {arrays.path.name} ({FORMAT})",),
    )


def _read_csr_parts(arrays: _Arrays) -> RawGraph:
    shape = arrays.ints("adj_shape")
    if shape.shape != (2,) or shape[0] != shape[1]:
        raise DataError(f"{arrays.path}: adj_shape is {shape.tolist()}; an adjacency matrix is square")
    matrix = _csr(arrays, "adj", int(shape[0]))
    num_nodes = int(shape[0])
    features: Features | None = None
    if "attr_indptr" in arrays:
        features = _csr(arrays, "attr", num_nodes)
    elif "attr_matrix" in arrays:
        features = _dense(arrays, "attr_matrix", num_nodes)
    weight = None if (matrix.data == 1).all() else torch.from_numpy(matrix.data)
    labels = _labels(arrays, "labels", num_nodes, "node") if "labels" in arrays else None
    if labels is not None and "unlabeled" in arrays:
        labels[_indices(arrays, "unlabeled", num_nodes)] = -1
    split = (_index_split(arrays, "idx_train", "idx_val", "idx_test", num_nodes),) if "idx_train" in arrays else ()
    rows = np.repeat(np.arange(num_nodes), np.diff(matrix.indptr))
    return RawGraph(
        name=arrays.path.stem,
        src=torch.from_numpy(rows),
        dst=torch.from_numpy(matrix.indices.astype(np.int64)),
        num_nodes=num_nodes,
        edge_weight=weight,
        features=features,
        labels=labels,
        splits=split,
        notes=(f"read {arrays.path.name} (CSR parts): {matrix.nnz} edges",),
    )


def _read_edge_arrays(arrays: _Arrays) -> RawGraph:
    if "edge_index" in arrays:
        pair = arrays.ints("edge_index", ndim=2)
        if pair.shape[0] != 2:
            raise DataError(f"{arrays.path}: edge_index has shape {pair.shape}; (2, edges) expected")
        ends = {"src": pair[0], "dst": pair[1]}
        arrays = _Arrays(arrays.path, {**{name: arrays[name] for name in arrays.names}, **ends})
    source, target = next(pair for pair in (("src", "dst"), ("src_li", "dst_li"), ("row", "col")) if pair[0] in arrays)
    num_nodes = arrays.count("num_nodes") if "num_nodes" in arrays else None
    src, dst = _ends(arrays, source, target, num_nodes)
    if num_nodes is None:
        num_nodes = int(max(src.max(), dst.max())) + 1 if len(src) else 0
    features = _dense(arrays, "node_features", num_nodes) if "node_features" in arrays else None
    labels = _labels(arrays, "node_labels", num_nodes, "node") if "node_labels" in arrays else None
    offsets = graph_labels = tags = None
    if "graph_sizes" in arrays:
        offsets = _offsets_of_sizes(arrays, num_nodes)
        graph_labels = _labels(arrays, "graph_labels", len(offsets) - 1, "graph") if "graph_labels" in arrays else None
        tags = torch.from_numpy(arrays.ints("node_tags")) if "node_tags" in arrays else None
    return RawGraph(
        name=arrays.path.stem,
        src=src,
        dst=dst,
        num_nodes=num_nodes,
        edge_weight=_weight(arrays, "edge_weight", len(src)),
        features=features,
        tags=tags,
        labels=labels,
        graph_offsets=offsets,
        graph_labels=graph_labels,
        notes=(f"read {arrays.path.name} (edge arrays): {len(src)} edges",),
    )


def _read_pairs(arrays: _Arrays) -> RawGraph:
    """Undirected edges, one row a pair; both directions are made here, since the format means both."""
    pairs = arrays.ints("edges", ndim=2)
    if pairs.shape[1] != 2:
        raise DataError(f"{arrays.path}: edges has shape {pairs.shape}; (pairs, 2) expected")
    num_nodes = len(arrays["node_features"]) if "node_features" in arrays else len(arrays["node_labels"])
    ends = _Arrays(arrays.path, {"edges[:, 0]": pairs[:, 0], "edges[:, 1]": pairs[:, 1]})
    u, v = _ends(ends, "edges[:, 0]", "edges[:, 1]", num_nodes)
    back = u != v  # a loop is its own reverse
    splits = []
    if "train_masks" in arrays:
        masks = {part: np.atleast_2d(arrays[f"{part}_masks"]) for part in ("train", "val", "test")}
        for part, mask in masks.items():
            if mask.shape[1] != num_nodes:
                raise DataError(f"{arrays.path}: {part}_masks has {mask.shape[1]} columns for {num_nodes} nodes")
        splits = [
            Split(**{part: torch.from_numpy(np.flatnonzero(mask[index])) for part, mask in masks.items()})
            for index in range(len(masks["train"]))
        ]
    return RawGraph(
        name=arrays.path.stem,
        src=torch.cat([u, v[back]]),
        dst=torch.cat([v, u[back]]),
        num_nodes=num_nodes,
        features=_dense(arrays, "node_features", num_nodes) if "node_features" in arrays else None,
        labels=_labels(arrays, "node_labels", num_nodes, "node") if "node_labels" in arrays else None,
        splits=tuple(splits),
        notes=(f"read {arrays.path.name} ({len(u)} undirected edges, both directions made)",),
    )


def _ends(arrays: _Arrays, source: str, target: str, num_nodes: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    src, dst = arrays.ints(source), arrays.ints(target)
    if len(src) != len(dst):
        raise DataError(f"{arrays.path}: {len(src)} sources ({source}) and {len(dst)} destinations ({target})")
    for ends in (src, dst):
        bad = np.flatnonzero((ends < 0) | (ends >= (np.iinfo(np.int64).max if num_nodes is None else num_nodes)))
        if len(bad):
            raise DataError(
                f"{arrays.path}: edge {bad[0]}: node id {ends[bad[0]]} is out of range, the graph has {num_nodes} nodes"
            )
    return torch.from_numpy(src), torch.from_numpy(dst)


def _csr(arrays: _Arrays, prefix: str, num_rows: int) -> sparse.csr_array:
    indptr, indices = arrays.ints(f"{prefix}_indptr"), arrays.ints(f"{prefix}_indices")
    shape, data = arrays.ints(f"{prefix}_shape"), arrays.floats(f"{prefix}_data")
    if shape.shape != (2,) or shape[0] != num_rows:
        raise DataError(f"{arrays.path}: {prefix}_shape is {shape.tolist()} for {num_rows} nodes")
    if len(indptr) != num_rows + 1 or indptr[0] != 0:
        raise DataError(
            f"{arrays.path}: {prefix}_indptr has {len(indptr)} entries from {indptr[:1]}; {num_rows + 1} from 0 expected"
        )
    falling = np.flatnonzero(np.diff(indptr) < 0)
    if len(falling):
        raise DataError(f"{arrays.path}: {prefix}_indptr decreases at row {falling[0] + 1}")
    if indptr[-1] != len(indices) or len(indices) != len(data):
        raise DataError(
            f"{arrays.path}: {prefix}_indptr ends at {indptr[-1]} for {len(indices)} indices and {len(data)} values"
        )
    bad = np.flatnonzero((indices < 0) | (indices >= shape[1]))
    if len(bad):
        row = np.searchsorted(indptr, bad[0], side="right") - 1
        raise DataError(
            f"{arrays.path}: {prefix}_indices row {row}: column {indices[bad[0]]} is out of range, there are {shape[1]}"
        )
    matrix = sparse.csr_array((data, indices, indptr), shape=(int(shape[0]), int(shape[1])))
    if prefix != "adj":
        _check_finite(arrays, matrix)
    return matrix


def _dense(arrays: _Arrays, name: str, num_nodes: int) -> torch.Tensor:
    features = arrays.floats(name, ndim=2)
    if len(features) != num_nodes:
        raise DataError(f"{arrays.path}: '{name}' has {len(features)} rows for {num_nodes} nodes")
    _check_finite(arrays, features)
    return torch.from_numpy(features)


def _check_finite(arrays: _Arrays, features: Array | sparse.csr_array) -> None:
    if sparse.issparse(features):
        entries = features.tocoo()
        bad = np.flatnonzero(~np.isfinite(entries.data))
        where = [(entries.row[bad[0]], entries.col[bad[0]], entries.data[bad[0]])] if len(bad) else []
    else:
        where = [(node, column, features[node, column]) for node, column in np.argwhere(~np.isfinite(features))[:1]]
    for node, column, value in where:
        raise DataError(f"{arrays.path}: node {node}, feature {column} is {value}; features must be finite numbers")


def _weight(arrays: _Arrays, name: str, num_edges: int) -> torch.Tensor | None:
    if name not in arrays:
        return None
    weight = arrays.floats(name)
    if len(weight) != num_edges:
        raise DataError(f"{arrays.path}: {len(weight)} edge weights for {num_edges} edges")
    bad = np.flatnonzero(~np.isfinite(weight))
    if len(bad):
        raise DataError(f"{arrays.path}: edge {bad[0]}: weight {weight[bad[0]]} is not a finite number")
    return torch.from_numpy(weight)


def _labels(arrays: _Arrays, name: str, count: int, item: str) -> torch.Tensor:
    labels = arrays.ints(name)
    if len(labels) != count:
        raise DataError(f"{arrays.path}: '{name}' has {len(labels)} entries for {count} {item}s")
    return torch.from_numpy(labels)


def _indices(arrays: _Arrays, name: str, count: int) -> np.ndarray:
    indices = arrays.ints(name)
    bad = np.flatnonzero((indices < 0) | (indices >= count))
    if len(bad):
        raise DataError(f"{arrays.path}: '{name}' entry {bad[0]}: {indices[bad[0]]} is out of range, there are {count}")
    return indices


def _index_split(arrays: _Arrays, train: str, val: str, test: str, count: int) -> Split:
    return Split(
        **{
            part: torch.from_numpy(_indices(arrays, name, count))
            for part, name in (("train", train), ("val", val), ("test", test))
        }
    )


def _offsets(arrays: _Arrays, name: str, num_nodes: int) -> torch.Tensor:
    offsets = arrays.ints(name)
    if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != num_nodes or (np.diff(offsets) < 0).any():
        raise DataError(f"{arrays.path}: '{name}' must rise from 0 to the {num_nodes} nodes")
    return torch.from_numpy(offsets)


def _offsets_of_sizes(arrays: _Arrays, num_nodes: int) -> torch.Tensor:
    sizes = arrays.ints("graph_sizes")
    if (sizes < 0).any() or sizes.sum() != num_nodes:
        raise DataError(f"{arrays.path}: graph_sizes add up to {sizes.sum()}, there are {num_nodes} nodes")
    return torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)]))
