"""Zip, npz and gzip files read in place: bounded sizes, no pickles, nothing unpacked to disk."""

from __future__ import annotations

import gzip
import io
import zipfile
import zlib
from pathlib import Path, PurePosixPath

import numpy as np

from runner.errors import DataError
from runner.gnn.data.graph_data import Array
from runner.units import format_bytes

_CHUNK = 2**20
MAX_NODES = 5 * 10**8  # a few int64 arrays of this size are what a workstation holds
# Of one file once unpacked: above the largest graph that fits these loaders, below what fills a workstation.
MAX_BYTES = 8 * 2**30


def check_num_nodes(path: Path, num_nodes: int) -> int:
    """Return a declared number of nodes.

    Raises:
        DataError: where it is more than could ever be held; nothing of that size must be allocated first.
    """
    if num_nodes > MAX_NODES:
        raise DataError(f"{path}: {num_nodes} nodes, the limit is {MAX_NODES}")
    return num_nodes


def one_line(error: Exception) -> str:
    """Return an exception's text on one line of readable length."""
    return " ".join(str(error).split())[:160] or type(error).__name__


def open_zip(path: Path, kind: str) -> zipfile.ZipFile:
    """Open an archive after checking that no member leaves its folder and that all fit within the bound.

    Args:
        path: the file.
        kind: what it should be, for the message: "npz", "zip archive".

    Raises:
        DataError: where the file is not a complete archive, has an unsafe member, or is too large.
    """
    try:
        archive = zipfile.ZipFile(path)
    except Exception as error:  # zipfile has some ten kinds for what can be wrong with a file
        raise DataError(f"{path}: not a complete {kind}: {one_line(error)}") from error
    total = 0
    for member in archive.infolist():
        parts = PurePosixPath(member.filename.replace("\\", "/"))
        if parts.is_absolute() or ".." in parts.parts or (parts.parts[:1] and ":" in parts.parts[0]):
            raise DataError(f"{path}: refused, member '{member.filename}' lies outside the archive's folder")
        total += member.file_size
    if total > MAX_BYTES:
        raise DataError(f"{path}: unpacks to {format_bytes(total)}, the limit is {format_bytes(MAX_BYTES)}")
    return archive


def read_member(archive: zipfile.ZipFile, name: str, path: Path) -> bytes:
    """Return a member's bytes.

    Raises:
        DataError: where it is damaged or encrypted.
    """
    try:
        return archive.read(name)
    except Exception as error:  # zipfile and zlib have some ten kinds for what can be wrong with a member
        raise DataError(f"{path}: member '{name}' can't be read: {one_line(error)}") from error


def read_npz(path: Path) -> dict[str, Array]:
    """Return the arrays of an npz file; object arrays, which would need unpickling, are refused unread.

    Raises:
        DataError: where it is not a complete npz, or an array is an object array or not of its declared size.
    """
    with open_zip(path, "npz") as archive:
        names = [name for name in archive.namelist() if name.endswith(".npy")]
        return {name.removesuffix(".npy"): _read_npy(archive, name, path) for name in names}


def _read_npy(archive: zipfile.ZipFile, name: str, path: Path) -> Array:
    content = io.BytesIO(read_member(archive, name, path))
    try:
        version = np.lib.format.read_magic(content)
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read_header(content)
    except (
        Exception
    ) as error:  # the header is a Python literal: a damaged one fails in the tokenizer, the parser or numpy
        raise DataError(f"{path}: '{name}' is not an array: {one_line(error)}") from error
    if dtype.hasobject:
        raise DataError(
            f"{path}: '{name}' holds Python objects; reading them would run code from the file, so it is refused"
        )
    declared = int(np.prod(shape, dtype=object)) * dtype.itemsize
    if declared != len(content.getbuffer()) - content.tell():
        raise DataError(
            f"{path}: '{name}' declares {declared} bytes and holds {len(content.getbuffer()) - content.tell()}"
        )
    content.seek(0)
    array: Array = np.lib.format.read_array(content, allow_pickle=False)
    return array


def read_text(path: Path) -> bytes:
    """Return a file's content, unpacked where its name ends in ``.gz``.

    Raises:
        DataError: where it is too large or a damaged gzip.
    """
    if path.suffix != ".gz":
        if path.stat().st_size > MAX_BYTES:
            raise DataError(f"{path}: {format_bytes(path.stat().st_size)}, the limit is {format_bytes(MAX_BYTES)}")
        return path.read_bytes()
    try:
        with gzip.open(path) as stream:
            content = bytearray()
            while len(content) <= MAX_BYTES and (chunk := stream.read(_CHUNK)):
                content += chunk
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: not a complete gzip file: {one_line(error)}") from error
    if len(content) > MAX_BYTES:
        raise DataError(f"{path}: unpacks to more than {format_bytes(MAX_BYTES)}, the limit")
    return bytes(content)
