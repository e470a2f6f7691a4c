"""TU graph-classification sets in zip archives, in either of their two text layouts.

Layout 1 (TU Dortmund): ``NAME_A.txt`` (one ``i, j`` a line, from 1), ``NAME_graph_indicator.txt``, ``NAME_graph_labels.txt``,
optionally ``NAME_node_labels.txt`` and ``NAME_node_attributes.txt``.
Layout 2 (one file ``NAME.txt``): the number of graphs; then for each graph a line ``n label`` and n lines
``tag m neighbour_1 … neighbour_m [attributes]``; optionally ``10fold_idx/{train,test}_idx-K.txt``.
"""

from __future__ import annotations

import zipfile
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import numpy as np
import torch

from runner.errors import DataError
from runner.gnn.data.archive import open_zip, read_member
from runner.gnn.data.graph_data import RawGraph, Split


def load_tu(path: Path) -> RawGraph:
    """Read a set of graphs; labels and node tags are renumbered from 0 in ascending order.

    Raises:
        DataError: where the archive is damaged or unsafe, holds neither layout, or a line is wrong.
    """
    with open_zip(path, "zip archive") as archive:
        names = [name for name in archive.namelist() if not name.startswith("__MACOSX") and not name.endswith("/")]
        adjacency = next((name for name in names if name.endswith("_A.txt")), None)
        if adjacency is not None:
            return _read_dortmund(path, archive, adjacency.removesuffix("_A.txt"), names)
        single = next((name for name in names if PurePosixPath(name).name == f"{path.stem}.txt"), None)
        if single is None:
            raise DataError(f"{path}: neither *_A.txt nor {path.stem}.txt is in the archive")
        return _read_blocks(path, archive, single, names)


def _read_dortmund(path: Path, archive: zipfile.ZipFile, stem: str, names: list[str]) -> RawGraph:
    def table(suffix: str) -> np.ndarray | None:
        name = f"{stem}_{suffix}.txt"
        return _parse_table(path, name, read_member(archive, name, path)) if name in names else None

    graph_of_node, labels, edges = table("graph_indicator"), table("graph_labels"), table("A")
    if graph_of_node is None or labels is None or edges is None:
        raise DataError(
            f"{path}: {stem}_graph_indicator.txt and {stem}_graph_labels.txt are needed beside {stem}_A.txt"
        )
    for name, cells, columns in (("A", edges, 2), ("graph_indicator", graph_of_node, 1), ("graph_labels", labels, 1)):
        if not len(cells) and name != "A":
            raise DataError(f"{path}: {stem}_{name}.txt is empty")
        if len(cells) and cells.shape[1] != columns:
            raise DataError(f"{path}: {stem}_{name}.txt has {cells.shape[1]} columns, {columns} expected")
        if not np.array_equal(cells, np.floor(cells)):
            raise DataError(f"{path}: {stem}_{name}.txt holds numbers that are not whole")
    graph_of_node = graph_of_node[:, 0].astype(np.int64)
    falling = np.flatnonzero(np.diff(graph_of_node) < 0)
    if len(falling):
        raise DataError(f"{path}: {stem}_graph_indicator.txt, line {falling[0] + 2}: graph numbers must not decrease")
    num_nodes, num_graphs = len(graph_of_node), len(labels)
    if num_nodes == 0 or graph_of_node[0] < 1 or graph_of_node[-1] > num_graphs:
        raise DataError(
            f"{path}: {stem}_graph_indicator.txt names graph {graph_of_node[-1:]}, there are {num_graphs} graph labels"
        )
    edges = edges.astype(np.int64).reshape(-1, 2)
    bad = np.flatnonzero(((edges < 1) | (edges > num_nodes)).any(axis=1))
    if len(bad):
        raise DataError(
            f"{path}: {stem}_A.txt, line {bad[0] + 1}: edge {edges[bad[0]].tolist()} is out of range 1 … {num_nodes}"
        )
    tags, attributes = table("node_labels"), table("node_attributes")
    for name, values in (("node_labels", tags), ("node_attributes", attributes)):
        if values is not None and len(values) != num_nodes:
            raise DataError(f"{path}: {stem}_{name}.txt has {len(values)} lines for {num_nodes} nodes")
    unread = sorted(name for name in names if name.startswith(f"{stem}_edge_"))
    return RawGraph(
        name=path.stem,
        src=torch.from_numpy(edges[:, 0] - 1),
        dst=torch.from_numpy(edges[:, 1] - 1),
        num_nodes=num_nodes,
        features=None if attributes is None else torch.from_numpy(attributes.astype(np.float32)),
        tags=None if tags is None else _from_zero(tags[:, 0]),
        graph_offsets=torch.from_numpy(np.searchsorted(graph_of_node, np.arange(1, num_graphs + 2))),
        graph_labels=_from_zero(labels[:, 0]),
        notes=(
            f"read {num_graphs} graphs from {path.name}",
            *(f"left out {PurePosixPath(name).name}" for name in unread),
        ),
    )


def _parse_table(path: Path, name: str, content: bytes) -> np.ndarray:
    """Return float64 [lines, columns] of a comma-separated file of numbers."""
    rows: list[list[float]] = []
    for number, line in enumerate(content.decode("utf-8", errors="replace").rstrip().splitlines(), 1):
        if not line.strip():
            raise DataError(f"{path}: {name}, line {number}: empty")
        try:
            rows.append([float(value) for value in line.split(",")])
        except ValueError:
            raise DataError(f"{path}: {name}, line {number}: '{line[:60]}' is not numbers cut by commas") from None
        if len(rows[-1]) != len(rows[0]) or not np.isfinite(rows[-1]).all():
            raise DataError(f"{path}: {name}, line {number}: '{line[:60]}': {len(rows[0])} finite numbers expected")
    return np.array(rows, dtype=np.float64) if rows else np.empty((0, 1))


@dataclass
class _Blocks:
    """What has been read of layout 2."""

    tags: list[int] = field(default_factory=list)
    src: list[int] = field(default_factory=list)
    dst: list[int] = field(default_factory=list)
    attributes: list[list[float]] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=lambda: [0])


def _read_blocks(path: Path, archive: zipfile.ZipFile, name: str, names: list[str]) -> RawGraph:
    lines = read_member(archive, name, path).decode("utf-8", errors="replace").splitlines()
    blocks, number = _Blocks(), 0
    try:
        num_graphs, number = int(lines[0]), 1
        for _ in range(num_graphs):
            size, label = (int(value) for value in lines[number].split())
            if size < 0:
                raise ValueError(f"a graph of {size} nodes")
            number += 1
            for node in range(size):
                _read_node(blocks, lines[number], size, node)
                number += 1
            blocks.labels.append(label)
            blocks.offsets.append(blocks.offsets[-1] + size)
        if any(line.strip() for line in lines[number:]):
            raise ValueError(f"more lines than the {num_graphs} graphs of line 1 take")
    except (ValueError, IndexError) as error:
        reason = "the file ends too early" if number >= len(lines) else error
        raise DataError(f"{path}: {name}, line {number + 1}: {reason}") from None
    has_attributes = bool(blocks.attributes) and bool(blocks.attributes[0])
    if has_attributes and len({len(row) for row in blocks.attributes}) > 1:
        raise DataError(f"{path}: {name}: nodes have different numbers of attributes")
    return RawGraph(
        name=path.stem,
        src=torch.tensor(blocks.src, dtype=torch.int64),
        dst=torch.tensor(blocks.dst, dtype=torch.int64),
        num_nodes=blocks.offsets[-1],
        features=torch.tensor(blocks.attributes) if has_attributes else None,
        tags=_from_zero(np.array(blocks.tags)),
        graph_offsets=torch.tensor(blocks.offsets),
        graph_labels=_from_zero(np.array(blocks.labels)),
        splits=_folds(path, archive, names, len(blocks.labels)),
        notes=(f"read {len(blocks.labels)} graphs from {path.name}",),
    )


def _read_node(blocks: _Blocks, line: str, size: int, node: int) -> None:
    fields = line.split()
    if len(fields) < 2:
        raise ValueError("a node's tag and its number of neighbours expected")
    degree = int(fields[1])
    neighbors = [int(value) for value in fields[2 : 2 + degree]]
    if degree < 0 or len(neighbors) != degree:
        raise ValueError(f"{degree} neighbours declared, {len(neighbors)} given")
    if any(not 0 <= neighbor < size for neighbor in neighbors):
        raise ValueError(f"a neighbour in {neighbors} is out of range, the graph has {size} nodes")
    base = blocks.offsets[-1]
    blocks.tags.append(int(fields[0]))
    blocks.src += [base + neighbor for neighbor in neighbors]
    blocks.dst += [base + node] * degree
    attributes = [float(value) for value in fields[2 + degree :]]
    if not np.isfinite(attributes).all():
        raise ValueError("attributes must be finite numbers")
    blocks.attributes.append(attributes)


def _folds(path: Path, archive: zipfile.ZipFile, names: list[str], num_graphs: int) -> tuple[Split, ...]:
    by_name = {PurePosixPath(name).name: name for name in names if "fold_idx/" in name}
    splits = []
    for fold in range(1, (len(by_name) + 1) // 2 + 1):
        parts = []
        for part in ("train", "test"):
            name = by_name.get(f"{part}_idx-{fold}.txt")
            if name is None:
                raise DataError(f"{path}: {part}_idx-{fold}.txt is missing beside the other folds")
            try:
                parts.append([int(value) for value in read_member(archive, name, path).split()])
            except ValueError as error:
                raise DataError(f"{path}: {name}: {error}") from None
            if any(not 0 <= index < num_graphs for index in parts[-1]):
                raise DataError(f"{path}: {name}: an index is out of range, there are {num_graphs} graphs")
        if not all(parts) or set(parts[0]) & set(parts[1]):
            raise DataError(f"{path}: fold {fold} of 10fold_idx is empty on one side, or has graphs on both")
        empty = torch.empty(0, dtype=torch.int64)
        splits.append(Split(train=torch.tensor(parts[0]), val=empty, test=torch.tensor(parts[1])))
    return tuple(splits)


def _from_zero(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.unique(values, return_inverse=True)[1].astype(np.int64).reshape(-1))
