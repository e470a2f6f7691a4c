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

import io
from pathlib import Path

import numpy as np
import torch
from scipy import sparse

from runner.errors import DataError
from runner.gnn.data.archive import check_num_nodes, read_npz
from runner.gnn.data.graph_data import Array, Features, RawGraph, Split
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
    arrays = _Arrays(path, read_npz(path))
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


class _Arrays:
    """The arrays of one file, with checks that name the file."""

    def __init__(self, path: Path, arrays: dict[str, Array]) -> None:
        self.path, self._arrays = path, arrays
        self._read: set[str] = set()

    @property
    def names(self) -> list[str]:
        return list(self._arrays)

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    def __getitem__(self, name: str) -> Array:
        if name not in self._arrays:
            raise DataError(f"{self.path}: array '{name}' is missing; it has {', '.join(sorted(self._arrays)[:12])}")
        self._read.add(name)
        return self._arrays[name]

    def first(self, *names: str) -> str | None:
        """The first of several names for the same thing that the file uses."""
        return next((name for name in names if name in self._arrays), None)

    def notes(self, what: str) -> tuple[str, ...]:
        """What was read, and the arrays that nothing asked for."""
        unread = sorted(set(self._arrays) - self._read)
        return (f"read {self.path.name} ({what})", *([f"left out: arrays {', '.join(unread)}"] if unread else []))

    def add(self, name: str, array: Array) -> None:
        """Put an array under a second name."""
        self._arrays[name] = array

    def ints(self, name: str, ndim: int = 1) -> np.ndarray:
        """An integer array as int64 (floats are taken where they are whole)."""
        array = self[name]
        if array.ndim != ndim:
            raise DataError(f"{self.path}: '{name}' has shape {array.shape}; {ndim} dimension(s) expected")
        if array.dtype.kind == "f" and np.array_equal(array, np.floor(array)):
            array = array.astype(np.int64)
        if array.dtype.kind not in "iu":
            raise DataError(f"{self.path}: '{name}' holds {array.dtype}; integers expected")
        return array.astype(np.int64)

    def count(self, name: str) -> int:
        """A number of nodes."""
        array = self[name]
        value = float(array.reshape(-1)[0]) if array.size == 1 and array.dtype.kind in "iuf" else -1.0
        if not value >= 0 or value != int(min(value, 2.0**62)):
            raise DataError(f"{self.path}: '{name}' must be one non-negative integer, it is {array.reshape(-1)[:3]}")
        return check_num_nodes(self.path, int(value))

    def floats(self, name: str, ndim: int = 1) -> np.ndarray:
        """A numeric array as float32."""
        array = self[name]
        if array.ndim != ndim or array.dtype.kind not in "fiub":
            raise DataError(
                f"{self.path}: '{name}' has shape {array.shape} and type {array.dtype}; {ndim} dimension(s) of numbers expected"
            )
        with np.errstate(over="ignore"):
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
        edge_weight=_weight(arrays, "edge_weight", len(src)) if "edge_weight" in arrays else None,
        features=features,
        labels=_labels(arrays, "labels", num_nodes, "node") if "labels" in arrays else None,
        splits=tuple(_index_split(arrays, f"train{end}", f"val{end}", f"test{end}", num_items) for end in suffixes),
        tags=_tags(arrays, "tags", num_nodes) if "tags" in arrays else None,
        graph_offsets=offsets,
        graph_labels=graph_labels,
        node_ids=_node_ids(arrays, num_nodes),
        notes=arrays.notes(FORMAT),
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
    rows = np.repeat(np.arange(num_nodes), np.diff(matrix.indptr))
    return RawGraph(
        name=arrays.path.stem,
        src=torch.from_numpy(rows),
        dst=torch.from_numpy(matrix.indices.astype(np.int64)),
        num_nodes=num_nodes,
        edge_weight=weight,
        features=features,
        labels=labels,
        splits=_splits(arrays, num_nodes),
        notes=arrays.notes(f"CSR parts, {matrix.nnz} edges"),
    )


def _read_edge_arrays(arrays: _Arrays) -> RawGraph:
    if "edge_index" in arrays:
        pair = arrays.ints("edge_index", ndim=2)
        if pair.shape[0] != 2:
            raise DataError(f"{arrays.path}: edge_index has shape {pair.shape}; (2, edges) expected")
        arrays.add("src", pair[0])
        arrays.add("dst", pair[1])
    source, target = next(pair for pair in (("src", "dst"), ("src_li", "dst_li"), ("row", "col")) if pair[0] in arrays)
    features, labels = (
        arrays.first("node_features", "features", "x", "feat"),
        arrays.first("node_labels", "labels", "y"),
    )
    num_nodes = _declared_nodes(arrays, features, labels)
    src, dst = _ends(arrays, source, target, num_nodes)
    if num_nodes is None:
        num_nodes = check_num_nodes(arrays.path, int(max(src.max(), dst.max())) + 1 if len(src) else 0)
    offsets = graph_labels = None
    if "graph_sizes" in arrays:
        offsets = _offsets_of_sizes(arrays, num_nodes)
        if "graph_labels" in arrays:
            graph_labels = _labels(arrays, "graph_labels", len(offsets) - 1, "graph")
            graph_labels = torch.unique(graph_labels, return_inverse=True)[
                1
            ]  # {-1, 1} are two classes here, as in TU sets
    weight = arrays.first("edge_weight", "weight")
    return RawGraph(
        name=arrays.path.stem,
        src=src,
        dst=dst,
        num_nodes=num_nodes,
        edge_weight=_weight(arrays, weight, len(src)) if weight else None,
        features=_dense(arrays, features, num_nodes) if features else None,
        tags=_tags(arrays, "node_tags", num_nodes) if "node_tags" in arrays else None,
        labels=_labels(arrays, labels, num_nodes, "node") if labels else None,
        splits=_splits(arrays, num_nodes),
        graph_offsets=offsets,
        graph_labels=graph_labels,
        notes=arrays.notes(f"edge arrays, {len(src)} edges"),
    )


def _declared_nodes(arrays: _Arrays, features: str | None, labels: str | None) -> int | None:
    """The number of nodes that a file states, or that its features or labels imply."""
    if "num_nodes" in arrays:
        return arrays.count("num_nodes")
    named = features or labels
    if named is None:
        return None
    if arrays[named].ndim == 0:
        raise DataError(f"{arrays.path}: '{named}' is a single value; one row a node expected")
    return len(arrays[named])


def _splits(arrays: _Arrays, num_nodes: int) -> tuple[Split, ...]:
    """Public splits under any of their usual names: ``train_masks`` and so on, ``train_mask``, ``idx_train``."""
    for train, val, test in (("train_masks", "val_masks", "test_masks"), ("train_mask", "val_mask", "test_mask")):
        if train in arrays:
            masks = [_masks(arrays, name, num_nodes) for name in (train, val, test)]
            if len({len(mask) for mask in masks}) != 1:
                raise DataError(f"{arrays.path}: {train}, {val} and {test} have {[len(mask) for mask in masks]} rows")
            parts = [[torch.from_numpy(np.flatnonzero(row)) for row in mask] for mask in masks]
            return tuple(Split(train=one, val=two, test=three) for one, two, three in zip(*parts, strict=True))
    if "idx_train" in arrays:
        return (_index_split(arrays, "idx_train", "idx_val", "idx_test", num_nodes),)
    return ()


def _masks(arrays: _Arrays, name: str, num_nodes: int) -> Array:
    """bool [splits, N]."""
    masks = np.atleast_2d(arrays[name])
    if masks.ndim != 2 or masks.shape[1] != num_nodes:
        raise DataError(f"{arrays.path}: {name} has shape {arrays[name].shape}; (splits, {num_nodes}) expected")
    if masks.dtype.kind not in "biu" or not np.isin(masks, (0, 1)).all():
        raise DataError(f"{arrays.path}: {name} holds {masks.dtype}; true and false expected")
    return masks.astype(bool)


def _read_pairs(arrays: _Arrays) -> RawGraph:
    """Undirected edges, one row a pair; both directions are made here, since the format means both."""
    pairs = arrays.ints("edges", ndim=2)
    if pairs.shape[1] != 2:
        raise DataError(f"{arrays.path}: edges has shape {pairs.shape}; (pairs, 2) expected")
    features, labels = arrays.first("node_features", "features"), arrays.first("node_labels", "labels")
    num_nodes = _declared_nodes(arrays, features, labels)
    if num_nodes is None:
        num_nodes = check_num_nodes(arrays.path, int(pairs.max()) + 1 if len(pairs) else 0)
    ends = _Arrays(arrays.path, {"edges[:, 0]": pairs[:, 0], "edges[:, 1]": pairs[:, 1]})
    u, v = _ends(ends, "edges[:, 0]", "edges[:, 1]", num_nodes)
    again = torch.isin(u * num_nodes + v, v * num_nodes + u) & (u > v)  # the same pair, stored the other way round too
    u, v = u[~again], v[~again]
    back = u != v  # a loop is its own reverse
    return RawGraph(
        name=arrays.path.stem,
        src=torch.cat([u, v[back]]),
        dst=torch.cat([v, u[back]]),
        num_nodes=num_nodes,
        features=_dense(arrays, features, num_nodes) if features else None,
        labels=_labels(arrays, labels, num_nodes, "node") if labels else None,
        splits=_splits(arrays, num_nodes),
        notes=(*arrays.notes(f"{len(u)} undirected edges, both directions made"),)
        + ((f"{int(again.sum())} pairs were stored both ways, kept once",) if again.any() else ()),
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
    elif not np.isfinite(data).all():
        entry = int(np.flatnonzero(~np.isfinite(data))[0])
        raise DataError(f"{arrays.path}: adj_data entry {entry}: weight {data[entry]} is not a finite number")
    return matrix


def _dense(arrays: _Arrays, name: str, num_nodes: int) -> torch.Tensor:
    features = arrays.floats(name, ndim=2)
    if len(features) != num_nodes or not features.shape[1]:
        raise DataError(
            f"{arrays.path}: '{name}' has {features.shape[0]} rows and {features.shape[1]} columns for {num_nodes} nodes"
        )
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


def _weight(arrays: _Arrays, name: str, num_edges: int) -> torch.Tensor:
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


def _indices(arrays: _Arrays, name: str, count: int) -> Array:
    """Distinct indices below ``count``; a mask of that length is taken too."""
    if arrays[name].dtype.kind == "b":
        if arrays[name].shape != (count,):
            raise DataError(f"{arrays.path}: '{name}' is a mask of shape {arrays[name].shape} for {count}")
        return np.flatnonzero(arrays[name])
    indices = arrays.ints(name)
    bad = np.flatnonzero((indices < 0) | (indices >= count))
    if len(bad):
        raise DataError(f"{arrays.path}: '{name}' entry {bad[0]}: {indices[bad[0]]} is out of range, there are {count}")
    return np.unique(indices)


def _tags(arrays: _Arrays, name: str, num_nodes: int) -> torch.Tensor:
    """Tags renumbered from 0."""
    tags = arrays.ints(name)
    if len(tags) != num_nodes:
        raise DataError(f"{arrays.path}: '{name}' has {len(tags)} entries for {num_nodes} nodes")
    return torch.from_numpy(np.unique(tags, return_inverse=True)[1].reshape(-1).astype(np.int64))


def _node_ids(arrays: _Arrays, num_nodes: int) -> Array | None:
    if "node_ids" not in arrays:
        return None
    ids = arrays["node_ids"]
    if ids.shape != (num_nodes,):
        raise DataError(f"{arrays.path}: 'node_ids' has shape {ids.shape} for {num_nodes} nodes")
    return ids


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
