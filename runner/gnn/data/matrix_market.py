"""Matrix Market files, plain or gzipped. Read by our own code: scipy's reader can end the process on a damaged file."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from runner.errors import DataError, suggestion
from runner.gnn.data.archive import check_num_nodes, one_line, read_text
from runner.gnn.data.graph_data import RawGraph

_FIELDS = {"real": 3, "integer": 3, "pattern": 2}
_SYMMETRIES = {"general": 0.0, "symmetric": 1.0, "skew-symmetric": -1.0}


@dataclass(frozen=True)
class _Header:
    """What the head of a file declares, and the line after which its entries begin."""

    num_nodes: int
    num_entries: int
    num_columns: int
    mirror: float  # factor of the mirrored entries; 0: none are made
    last_line: int


def read_matrix_market(path: Path) -> RawGraph:
    """Read a square sparse matrix: an entry (i, j) is the edge i → j with its value as weight (1 for a pattern).

    Symmetric storage is expanded to both directions; duplicates, and zeros that are stored, stay edges.

    Raises:
        DataError: where it is not a square real coordinate matrix, or an entry does not fit the head; the line is named.
    """
    content = read_text(path)
    header = _read_header(path, content)
    rows, columns, weight = _read_entries(path, content, header)
    if header.mirror:
        away = rows != columns  # the diagonal is its own mirror
        rows, columns = np.concatenate([rows, columns[away]]), np.concatenate([columns, rows[away]])
        weight = np.concatenate([weight, header.mirror * weight[away]])
    return RawGraph(
        name=path.name.split(".")[0],
        src=torch.from_numpy(rows),
        dst=torch.from_numpy(columns),
        num_nodes=header.num_nodes,
        edge_weight=torch.from_numpy(weight.astype(np.float32)),
        notes=(f"read {header.num_entries} entries from {path.name}, {len(rows)} edges",),
    )


def _read_header(path: Path, content: bytes) -> _Header:
    lines = io.BytesIO(content)
    words = lines.readline(1024).decode("ascii", errors="replace").lower().split()
    if len(words) != 5 or words[:2] != ["%%matrixmarket", "matrix"]:
        raise DataError(f"{path}, line 1: not a Matrix Market file: it must begin with '%%MatrixMarket matrix …'")
    if words[2] != "coordinate":
        raise DataError(f"{path}, line 1: a dense matrix ('{words[2]}'); a graph needs the 'coordinate' format")
    for word, known, what in ((words[3], _FIELDS, "values"), (words[4], _SYMMETRIES, "symmetry")):
        if word not in known:
            raise DataError(f"{path}, line 1: {what} '{word}' can't be a graph; {suggestion(word, known)}")
    number = 1
    for line in lines:
        number += 1
        if line.strip() and not line.startswith(b"%"):
            break
    else:
        raise DataError(f"{path}: not a complete Matrix Market file: the line with its size is missing")
    sizes = line.split()
    if len(sizes) != 3 or not all(size.isdigit() and len(size) < 16 for size in sizes):
        raise DataError(f"{path}, line {number}: three sizes expected (rows, columns, entries)")
    num_rows, num_columns, num_entries = (int(size) for size in sizes)
    if num_rows != num_columns:
        raise DataError(
            f"{path}, line {number}: {num_rows} rows and {num_columns} columns; an adjacency matrix is square"
        )
    check_num_nodes(path, num_rows)
    return _Header(num_rows, num_entries, _FIELDS[words[3]], _SYMMETRIES[words[4]], number)


def _read_entries(path: Path, content: bytes, header: _Header) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (rows int64, columns int64, values float64), [entries] each."""
    body = io.BytesIO(content)
    for _ in range(header.last_line):
        body.readline()
    names = range(header.num_columns + 1)  # one more than there should be, so that a surplus shows
    rest = body.read()
    table = pd.DataFrame({name: [] for name in names}, dtype=str)
    if rest.strip():
        try:
            table = pd.read_csv(
                io.BytesIO(rest), sep=r"\s+", header=None, names=names, dtype=str, keep_default_na=False, comment="%"
            )
        except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError, ValueError) as error:
            raise DataError(f"{path}: not a Matrix Market file: {one_line(error)}") from error
    if len(table) != header.num_entries:
        raise DataError(f"{path}: {header.num_entries} entries declared, {len(table)} found")
    table = table.fillna("")
    numbers = [pd.to_numeric(table[name], errors="coerce").to_numpy(dtype=np.float64) for name in names[:-1]]
    wrong = (table[header.num_columns] != "").to_numpy(dtype=bool)
    for values in numbers[:2]:
        wrong = wrong | ~((values >= 1) & (values <= header.num_nodes) & (values == np.floor(values)))
    if header.num_columns == 3:
        with np.errstate(over="ignore"):  # a weight too large for fp32 is as bad as an infinite one
            wrong = wrong | ~np.isfinite(numbers[2].astype(np.float32))
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        text = " ".join(str(value) for value in table.iloc[row] if value != "")
        raise DataError(
            f"{path}, line {_line_of_entry(content, header, row)}: '{text[:60]}' is no entry of a {header.num_nodes} × "
            f"{header.num_nodes} matrix: ids from 1{' and a finite value' if header.num_columns == 3 else ''} expected"
        )
    values = numbers[2] if header.num_columns == 3 else np.ones(len(table))
    return numbers[0].astype(np.int64) - 1, numbers[1].astype(np.int64) - 1, values


def _line_of_entry(content: bytes, header: _Header, entry: int) -> int:
    seen = -1
    for number, line in enumerate(content.splitlines(), 1):
        if number > header.last_line and line.strip() and not line.lstrip().startswith(b"%"):
            seen += 1
            if seen == entry:
                return number
    raise AssertionError(f"entry {entry} is not in the file")
