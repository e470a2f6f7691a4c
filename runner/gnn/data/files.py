"""Which file a dataset name means, and which loader reads it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from runner.errors import DataError, suggestion
from runner.gnn.data.edge_list import read_edge_list
from runner.gnn.data.graph_data import RawGraph
from runner.gnn.data.matrix_market import read_matrix_market
from runner.gnn.data.npz import load_npz
from runner.gnn.data.tu import load_tu

SUFFIXES = (
    ".npz",
    ".mtx",
    ".mtx.gz",
    ".txt",
    ".txt.gz",
    ".csv",
    ".csv.gz",
    ".tsv",
    ".tsv.gz",
    ".edges",
    ".edges.gz",
    ".zip",
)


def find(root: Path, stems: tuple[str, ...]) -> Path | None:
    """Return the first of ``root/STEM + SUFFIX`` that exists.

    Raises:
        DataError: where ``root`` is not a folder.
    """
    if not root.is_dir():
        raise DataError(f"dataset.root={root}: no such folder")
    return next((path for stem in stems for suffix in SUFFIXES if (path := root / f"{stem}{suffix}").is_file()), None)


def stems(root: Path) -> list[str]:
    """Return the dataset names that ``root`` holds files for."""
    return sorted(
        {path.name.removesuffix(end) for path in root.iterdir() for end in SUFFIXES if path.name.endswith(end)}
    )


def load_file(path: Path, ids: str = "auto") -> RawGraph:
    """Read a graph file; its format follows from its suffix, npz layouts from its arrays.

    Args:
        path: the file.
        ids: how an edge list's ids are read: ``auto``, ``number``, ``text``.

    Raises:
        DataError: where it is missing, of an unknown suffix, or bad; the line names the file and the place.
    """
    if path.is_dir() or (path.exists() and not path.is_file()):
        raise DataError(f"{path}: a folder or device, not a file")
    if not path.exists():
        there = ""
        if path.parent.is_dir():
            there = f"; {suggestion(path.name, [entry.name for entry in sorted(path.parent.iterdir())][:40])}"
        raise DataError(f"{path}: no such file{there}")
    try:
        return dataclasses.replace(_read(path, ids), origin=str(path))
    except OSError as error:
        raise DataError(f"{path}: can't be read: {error.strerror or error}") from error


def _read(path: Path, ids: str) -> RawGraph:
    suffix = next((end for end in sorted(SUFFIXES, key=len, reverse=True) if path.name.lower().endswith(end)), None)
    match suffix:
        case ".npz":
            return load_npz(path)
        case ".zip":
            return load_tu(path)
        case ".mtx" | ".mtx.gz":
            return read_matrix_market(path)
        case None:
            raise DataError(f"{path}: unknown kind of file; known: {' '.join(SUFFIXES)}")
    return read_edge_list(path, ids)
