"""Where compiled kernels, partitions and choices are kept: ``GEARSAIL_CACHE``, else ``gearsail`` in the user's cache folder."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import IO


class BackendWarning(UserWarning):
    """Kernels of our own can't be used here; torch's ops take their place."""


def cache_folder() -> Path:
    """Return the folder of what is kept from run to run, made if missing."""
    chosen = os.environ.get("GEARSAIL_CACHE")
    folder = Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "gearsail")
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        return _private_folder(f"{folder} ({error.strerror})")


@cache
def _private_folder(refused: str) -> Path:
    """Return a folder for this process alone, and say so once."""
    warnings.warn(f"kernels can't be kept in {refused}; set GEARSAIL_CACHE", BackendWarning, stacklevel=3)
    return Path(tempfile.mkdtemp(prefix="gearsail-"))


def kept(name: str) -> Path | None:
    """Return the file of this name (it may have folders) in the cache folder; None where there is none."""
    path = cache_folder() / name
    return path if path.is_file() else None


def keep(name: str, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file of this name into the cache folder, whole or not at all; a folder that is full or read-only keeps nothing."""
    path = cache_folder() / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as file:
            try:
                write(file)
                file.close()
                Path(file.name).replace(path)
            finally:
                Path(file.name).unlink(missing_ok=True)
    except OSError as error:
        warnings.warn(f"{path} can't be written ({error.strerror}): it is not kept", BackendWarning, stacklevel=2)
