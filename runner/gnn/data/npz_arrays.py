"""The arrays of an npz file, and the checks that turn them into parts of a graph. Each error names the file and the place.

Legend: N nodes, E edges, F features.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from scipy import sparse

from runner.errors import DataError
from runner.gnn.data.archive import check_num_nodes
from runner.gnn.data.graph_data import Array, Split


class Arrays:
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


def declared_nodes(arrays: Arrays, features: str | None, labels: str | None) -> int | None:
    """The number of nodes that a file states, or that its features or labels imply."""
    if "num_nodes" in arrays:
        return arrays.count("num_nodes")
    named = features or labels
    if named is None:
        return None
    if arrays[named].ndim == 0:
        raise DataError(f"{arrays.path}: '{named}' is a single value; one row a node expected")
    return len(arrays[named])


def read_splits(arrays: Arrays, num_nodes: int) -> tuple[Split, ...]:
    """Public splits under any of their usual names: ``train_masks`` and so on, ``train_mask``, ``idx_train``."""
    for train, val, test in (("train_masks", "val_masks", "test_masks"), ("train_mask", "val_mask", "test_mask")):
        if train in arrays:
            masks = [read_masks(arrays, name, num_nodes) for name in (train, val, test)]
            if len({len(mask) for mask in masks}) != 1:
                raise DataError(f"{arrays.path}: {train}, {val} and {test} have {[len(mask) for mask in masks]} rows")
            parts = [[torch.from_numpy(np.flatnonzero(row)) for row in mask] for mask in masks]
            return tuple(Split(train=one, val=two, test=three) for one, two, three in zip(*parts, strict=True))
    if "idx_train" in arrays:
        return (read_index_split(arrays, "idx_train", "idx_val", "idx_test", num_nodes),)
    return ()


def read_masks(arrays: Arrays, name: str, num_nodes: int) -> Array:
    """bool [splits, N]."""
    masks = np.atleast_2d(arrays[name])
    if masks.ndim != 2 or masks.shape[1] != num_nodes:
        raise DataError(f"{arrays.path}: {name} has shape {arrays[name].shape}; (splits, {num_nodes}) expected")
    if masks.dtype.kind not in "biu" or not np.isin(masks, (0, 1)).all():
        raise DataError(f"{arrays.path}: {name} holds {masks.dtype}; true and false expected")
    return masks.astype(bool)


def read_ends(arrays: Arrays, source: str, target: str, num_nodes: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (src, dst), int64 [E] each, every id below ``num_nodes`` (None: unbounded)."""
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


def read_csr(arrays: Arrays, prefix: str, num_rows: int) -> sparse.csr_array:
    """Return the float32 CSR matrix of ``PREFIX_data``, ``_indices``, ``_indptr``, ``_shape`` with ``num_rows`` rows."""
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
        check_finite(arrays, matrix)
    elif not np.isfinite(data).all():
        entry = int(np.flatnonzero(~np.isfinite(data))[0])
        raise DataError(f"{arrays.path}: adj_data entry {entry}: weight {data[entry]} is not a finite number")
    return matrix


def read_dense(arrays: Arrays, name: str, num_nodes: int) -> torch.Tensor:
    """Return float32 [N, F], all finite."""
    features = arrays.floats(name, ndim=2)
    if len(features) != num_nodes or not features.shape[1]:
        raise DataError(
            f"{arrays.path}: '{name}' has {features.shape[0]} rows and {features.shape[1]} columns for {num_nodes} nodes"
        )
    check_finite(arrays, features)
    return torch.from_numpy(features)


def check_finite(arrays: Arrays, features: Array | sparse.csr_array) -> None:
    """Raise a DataError that names the node and feature of the first NaN or infinity of features [N, F]."""
    if sparse.issparse(features):
        entries = features.tocoo()
        bad = np.flatnonzero(~np.isfinite(entries.data))
        where = [(entries.row[bad[0]], entries.col[bad[0]], entries.data[bad[0]])] if len(bad) else []
    else:
        where = [(node, column, features[node, column]) for node, column in np.argwhere(~np.isfinite(features))[:1]]
    for node, column, value in where:
        raise DataError(f"{arrays.path}: node {node}, feature {column} is {value}; features must be finite numbers")


def read_weight(arrays: Arrays, name: str, num_edges: int) -> torch.Tensor:
    """Return float32 [E], all finite."""
    weight = arrays.floats(name)
    if len(weight) != num_edges:
        raise DataError(f"{arrays.path}: {len(weight)} edge weights for {num_edges} edges")
    bad = np.flatnonzero(~np.isfinite(weight))
    if len(bad):
        raise DataError(f"{arrays.path}: edge {bad[0]}: weight {weight[bad[0]]} is not a finite number")
    return torch.from_numpy(weight)


def read_labels(arrays: Arrays, name: str, count: int, item: str) -> torch.Tensor:
    """Return int64 [count]; ``item`` is what they label, for the message."""
    labels = arrays.ints(name)
    if len(labels) != count:
        raise DataError(f"{arrays.path}: '{name}' has {len(labels)} entries for {count} {item}s")
    return torch.from_numpy(labels)


def read_indices(arrays: Arrays, name: str, count: int) -> Array:
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


def read_tags(arrays: Arrays, name: str, num_nodes: int) -> torch.Tensor:
    """Tags renumbered from 0."""
    tags = arrays.ints(name)
    if len(tags) != num_nodes:
        raise DataError(f"{arrays.path}: '{name}' has {len(tags)} entries for {num_nodes} nodes")
    return torch.from_numpy(np.unique(tags, return_inverse=True)[1].reshape(-1).astype(np.int64))


def read_node_ids(arrays: Arrays, num_nodes: int) -> Array | None:
    """Return the file's own ids [N], or None."""
    if "node_ids" not in arrays:
        return None
    ids = arrays["node_ids"]
    if ids.shape != (num_nodes,):
        raise DataError(f"{arrays.path}: 'node_ids' has shape {ids.shape} for {num_nodes} nodes")
    return ids


def read_index_split(arrays: Arrays, train: str, val: str, test: str, count: int) -> Split:
    """Return the split that three arrays of indices below ``count`` (or masks) make."""
    return Split(
        **{
            part: torch.from_numpy(read_indices(arrays, name, count))
            for part, name in (("train", train), ("val", val), ("test", test))
        }
    )


def read_offsets(arrays: Arrays, name: str, num_nodes: int) -> torch.Tensor:
    """Return int64 [G + 1], rising from 0 to N."""
    offsets = arrays.ints(name)
    if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != num_nodes or (np.diff(offsets) < 0).any():
        raise DataError(f"{arrays.path}: '{name}' must rise from 0 to the {num_nodes} nodes")
    return torch.from_numpy(offsets)


def read_offsets_of_sizes(arrays: Arrays, num_nodes: int) -> torch.Tensor:
    """Return int64 [G + 1] from ``graph_sizes``, which add up to N."""
    sizes = arrays.ints("graph_sizes")
    if (sizes < 0).any() or sizes.sum() != num_nodes:
        raise DataError(f"{arrays.path}: graph_sizes add up to {sizes.sum()}, there are {num_nodes} nodes")
    return torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)]))
