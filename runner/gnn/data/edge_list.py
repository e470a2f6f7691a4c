"""Edge lists (text, CSV), plain or gzipped."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from runner.errors import DataError
from runner.gnn.data.archive import one_line, read_text
from runner.gnn.data.graph_data import RawGraph

_COMMENTS = ("#", "%", "//")
_HEADER_WORDS = frozenset(
    ("source", "src", "from", "fromnodeid", "u", "head", "node1", "node_1", "id1", "i", "row", "target", "dst", "to", "tonodeid", "v",
     "tail", "node2", "node_2", "id2", "j", "col", "column", "destination", "from_node", "to_node")
)  # fmt: skip
_WHOLE_NUMBER = re.compile(r"\s*[+-]?\d+(\.0*)?\s*")
_INLINE_COMMENT = re.compile(rb"[ \t]+#[^\n]*")


@dataclass(frozen=True)
class _Layout:
    """How a file's lines are cut: separator, columns, lines before the data, whether the ids are numbers."""

    separator: str
    num_columns: int
    skip: int
    first_is_number: bool
    has_header: bool


def read_edge_list(path: Path, ids: str = "auto") -> RawGraph:
    """Read one edge a line: ``source target [weight]``, cut by comma, semicolon, tab or blanks; ``#`` and ``%`` begin comments.

    A first line of names is skipped. Numeric ids need not be dense: those that occur are renumbered in ascending order;
    text ids are numbered in order of appearance. Either way the file's own ids stay in ``node_ids``.

    Args:
        path: the file, gzipped where its name ends in ``.gz``.
        ids: ``number``, ``text``, or ``auto``: numbers where the first data row's are.

    Raises:
        DataError: for a line that has other columns than the first, a bad id or a bad weight; the line is named.
    """
    content = _clean(path, read_text(path))
    layout = _sniff(path, content, ids)
    table = _read_table(path, content, layout)
    numeric = layout.first_is_number if ids == "auto" else ids == "number"
    ends = _number_ids(path, content, layout, table) if numeric else table[[0, 1]].to_numpy(dtype=object)
    if numeric:
        node_ids, flat = np.unique(ends, return_inverse=True)
    else:
        flat, node_ids = pd.factorize(ends.ravel())
    edges = torch.from_numpy(np.ascontiguousarray(flat.reshape(-1, 2), dtype=np.int64))
    dense = numeric and len(node_ids) > 0 and int(node_ids[-1]) == len(node_ids) - 1
    weight = _weights(path, content, layout, table)
    notes = [f"read {len(table)} edges from {path.name}"]
    if layout.has_header:
        notes.append("the first line is a header")
    if weight is not None:
        notes.append("column 3 is the edge weight")
    if layout.num_columns > 3:
        notes.append(f"left out: columns 4 to {layout.num_columns}")
    if not dense:
        notes.append("node ids of the file renumbered from 0")
    return RawGraph(
        name=path.name.split(".")[0],
        src=edges[:, 0].contiguous(),
        dst=edges[:, 1].contiguous(),
        num_nodes=len(node_ids),
        edge_weight=weight,
        node_ids=None if dense else node_ids,
        notes=tuple(notes),
    )


def _clean(path: Path, content: bytes) -> bytes:
    """Return UTF-8 text with line ends of one kind and without a byte-order mark or comments behind the data."""
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError(f"{path}: UTF-16 text; save it as UTF-8")
    content = content.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}, line {line}: not UTF-8 text ({error.reason})") from error
    return _INLINE_COMMENT.sub(b"", content) if b"#" in content else content


def _data_lines(content: bytes) -> Iterator[tuple[int, str]]:
    """Yield (line number from 1, text) of the lines that aren't blank or comments."""
    for number, line in enumerate(io.TextIOWrapper(io.BytesIO(content), encoding="utf-8", errors="replace"), 1):
        text = line.strip()
        if text and not text.startswith(_COMMENTS):
            yield number, text


def _sniff(path: Path, content: bytes, ids: str) -> _Layout:
    lines = _data_lines(content)
    first = next(lines, None)
    if first is None:
        raise DataError(f"{path}: no edges: no line holds data")
    number, text = first
    separator = next((sign for sign in ("\t", ";", ",") if sign in text), r"\s+")
    fields = _cut(path, number, text, separator)
    second = next(lines, None)
    later = _cut(path, second[0], second[1], separator) if second else []
    has_header = _is_header(fields, later, ids)
    if has_header:
        if second is None:
            raise DataError(f"{path}: no edges: no line after the header holds data")
        number, fields = second[0], later
    if fields and not fields[-1]:
        fields.pop()  # every line ends with a separator
    if len(fields) < 2:
        raise DataError(f"{path}, line {number}: '{text[:60]}' has one column; an edge needs a source and a target")
    numeric = _is_number(fields[0]) and _is_number(fields[1])
    return _Layout(separator, len(fields), number - 1, numeric, has_header)


def _is_header(fields: list[str], later: list[str], ids: str) -> bool:
    """Whether the first line names columns: by known words, or by being no numbers where the second line is."""
    ends = fields[:2]
    if len(ends) == 2 and all(field.lower() in _HEADER_WORDS for field in ends):
        return True
    return (
        ids != "text"
        and all(field and not _is_number(field) for field in ends)
        and all(_is_number(field) for field in later[:2] or [""])
    )


def _cut(path: Path, number: int, text: str, separator: str) -> list[str]:
    """Cut one line as pandas cuts the table."""
    options = {"header": None, "dtype": str, "keep_default_na": False, "skipinitialspace": True}
    try:
        row = pd.read_csv(io.StringIO(text), sep=separator, **options)  # type: ignore[call-overload]
        return [str(value) for value in row.iloc[0]]
    except (pd.errors.ParserError, pd.errors.EmptyDataError, ValueError, IndexError) as error:
        raise DataError(f"{path}, line {number}: '{text[:60]}' can't be cut into columns: {one_line(error)}") from error


def _is_number(text: str) -> bool:
    return _WHOLE_NUMBER.fullmatch(text) is not None


def _read_table(path: Path, content: bytes, layout: _Layout) -> pd.DataFrame:
    """Return all data rows as text. pandas does the cutting; a row that does not fit is looked up to name its line."""
    body = io.BytesIO(content)
    for _ in range(layout.skip):
        body.readline()
    rest = body.read()
    if any(mark in rest for mark in (b"#", b"%", b"//")):
        kept = (line for line in rest.splitlines(keepends=True) if not line.lstrip().startswith((b"#", b"%", b"//")))
        rest = b"".join(kept)
    try:
        # one name more than there are columns, so that a row with too many shows there instead of shifting the others
        table = pd.read_csv(
            io.BytesIO(rest),
            sep=layout.separator,
            header=None,
            names=range(layout.num_columns + 1),
            dtype=str,
            keep_default_na=False,
            skipinitialspace=True,
            encoding="utf-8",
            on_bad_lines="error",
        )
    except (pd.errors.ParserError, UnicodeDecodeError, ValueError) as error:
        raise _wrong_columns(path, content, layout) or DataError(f"{path}: {one_line(error)}") from error
    table = table.fillna("")
    surplus = table.pop(layout.num_columns)  # type: ignore[arg-type]
    if (surplus != "").any() or (table == "").to_numpy().any():
        raise _wrong_columns(path, content, layout) or DataError(f"{path}: lines have different numbers of columns")
    return table


def _wrong_columns(path: Path, content: bytes, layout: _Layout) -> DataError | None:
    for number, text in _data_lines(content):
        if number <= layout.skip:
            continue
        fields = _cut(path, number, text, layout.separator)
        if len(fields) > layout.num_columns and not fields[-1]:
            fields.pop()
        if len(fields) != layout.num_columns:
            return DataError(f"{path}, line {number}: {len(fields)} columns, the first row has {layout.num_columns}")
        if "" in fields:
            return DataError(f"{path}, line {number}: column {fields.index('') + 1} is empty")
    return None


def _line_of_row(content: bytes, layout: _Layout, row: int) -> int:
    numbers = [number for number, _ in _data_lines(content) if number > layout.skip]
    return numbers[row]


def _number_ids(path: Path, content: bytes, layout: _Layout, table: pd.DataFrame) -> np.ndarray:
    """Return int64 [E, 2]."""
    columns = []
    for column in (0, 1):
        values = pd.to_numeric(table[column], errors="coerce")
        bad = np.flatnonzero(~table[column].str.fullmatch(_WHOLE_NUMBER.pattern).to_numpy(dtype=bool))
        if len(bad):
            text = table[column].iloc[bad[0]]
            raise DataError(
                f"{path}, line {_line_of_row(content, layout, int(bad[0]))}: id '{text}' is not a number as the first "
                "row's ids are; dataset.ids=text reads ids as text"
            )
        if values.dtype != np.int64 and (values.isna() | (values.abs() >= 2**63)).any():
            raise DataError(f"{path}: an id in column {column + 1} exceeds 64 bits; dataset.ids=text reads ids as text")
        negative = np.flatnonzero(values.to_numpy() < 0)
        if len(negative):
            row = int(negative[0])
            raise DataError(f"{path}, line {_line_of_row(content, layout, row)}: negative id {values.iloc[row]}")
        columns.append(values.to_numpy(dtype=np.int64))
    return np.stack(columns, axis=1)


def _weights(path: Path, content: bytes, layout: _Layout, table: pd.DataFrame) -> torch.Tensor | None:
    """Return float32 [E] from the third column; an attribute column of ``{}`` (networkx) is no weight."""
    if layout.num_columns < 3 or (table[2] == "{}").all():
        return None
    values = pd.to_numeric(table[2], errors="coerce").to_numpy(dtype=np.float64)
    with np.errstate(over="ignore"):  # a weight too large for fp32 is as bad as an infinite one
        bad = np.flatnonzero(~np.isfinite(values.astype(np.float32)))
    if len(bad):
        row = int(bad[0])
        raise DataError(
            f"{path}, line {_line_of_row(content, layout, row)}: weight '{table[2].iloc[row]}' is not a finite number"
        )
    return torch.from_numpy(values.astype(np.float32))
