"""Where compiled kernels are kept: ``GEARSAIL_CACHE``, else ``gearsail`` in the user's cache folder."""

from __future__ import annotations

import os
import tempfile
import warnings
from functools import cache
from pathlib import Path


class BackendWarning(UserWarning):
    """Kernels of our own can't be used here; torch's ops take their place."""


def cache_folder() -> Path:
    """Return the folder that compiled kernels are kept in, made if missing."""
    chosen = os.environ.get("GEARSAIL_CACHE")
    folder = Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "gearsail")
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        warnings.warn(
            f"kernels can't be kept in {folder} ({error.strerror}); set GEARSAIL_CACHE", BackendWarning, stacklevel=2
        )
        return _private_folder()


@cache
def _private_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="gearsail-"))
