"""The compiled libraries with their C signatures, on torch's thread pool."""

from __future__ import annotations

import ctypes
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch

from runner.kernels.cache import BackendWarning
from runner.kernels.cpu.build import BuildError, load
from runner.kernels.launching import STORAGE

INDEX_TYPES = {torch.int32: "int32_t", torch.int64: "int64_t"}

# p pointer, n 64-bit count, i int, d double; the last argument of every function is the number of threads
_GRAPH = "pppp" + "n"
_SIGNATURES = {
    "spmm": "ppppppi",
    "blocks": "pppi",
    "binned": "ppppi",
    "sddmm": _GRAPH + "n" + "pnpn" + "nn" + "p" + "i",
    "draw_mask": "ppp" + "nn" + "d" + "pp" + "i",
    "apply_mask": "pp" + "nd" + "p" + "i",
    "finish": "pp" + "nn" + "ppp" + "iddn" + "n" + "i",
    "epilogue_backward": "pp" + "nn" + "iddn" + "p" + "i",
    "drop_entries": "pp" + "n" + "p" + "idn" + "p" + "i",
    "extremum_grad_x": _GRAPH + "ppp" + "n" + "pn" + "pp" + "p" + "i",
    "extremum_grad_weight": _GRAPH + "pp" + "pn" + "nn" + "pp" + "p" + "i",
    "edge_softmax": "ppp" + "nn" + "pn" + "p" + "i",
    "edge_softmax_backward": "ppp" + "nn" + "pp" + "n" + "p" + "i",
    "gat": _GRAPH + "nnn" + "ppp" + "nn" + "ddn" + "ppppp" + "i",
    "gat_backward": _GRAPH + "nnn" + "ppp" + "nn" + "ddn" + "ppppp" + "p" + "ppp" + "i",
    "attention": _GRAPH + "nnn" + "pppp" + "nn" + "dddn" + "ppp" + "i",
    "attention_backward_sources": _GRAPH + "nnn" + "pppp" + "nn" + "dddn" + "pppp" + "p" + "ppp" + "i",
    "attention_backward_destinations": _GRAPH + "nnn" + "ppp" + "nn" + "d" + "p" + "pp" + "n" + "i",
}
_TYPES = {"p": ctypes.c_void_p, "n": ctypes.c_int64, "i": ctypes.c_int, "d": ctypes.c_double}


class SpmmCall(ctypes.Structure):
    """Everything about a product but the arrays that change from call to call; the layout of ``Call`` in spmm.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("indptr", "indices", "edge_ids", "blocks")),
        *(
            (name, ctypes.c_int64)
            for name in ("num_blocks", "num_entries", "num_columns", "x_stride", "num_features", "num_heads")
        ),
        *((name, ctypes.c_void_p) for name in ("row_scale", "col_scale", "bias")),
        ("activation", ctypes.c_int64),
        *((name, ctypes.c_double) for name in ("slope", "dropout")),
        *((name, ctypes.c_int64) for name in ("seed", "slice")),
        *((name, ctypes.c_void_p) for name in ("addend", "addend_scale")),
    )


@cache
def function(
    source: str, name: str, dtype: torch.dtype, index_dtype: torch.dtype | None, *variant: tuple[str, int | str]
) -> Any:
    """Return a C function of a source, built for a dtype, an index type and its other macros."""
    defines: dict[str, str | int] = {"STORAGE": STORAGE[dtype], **dict(variant)}
    if index_dtype is not None:
        defines["INDEX"] = INDEX_TYPES[index_dtype]
    found = getattr(prepared(load(source, None, **defines)), name)
    found.argtypes = [_TYPES[kind] for kind in _SIGNATURES[name]]
    found.restype = None
    return found


def prepared(library: ctypes.CDLL) -> ctypes.CDLL:
    """Let a library use torch's threads; returns it."""
    region = _parallel_region()
    if region is not None:
        library.use_parallel_region(region)
    return library


@cache
def _parallel_region() -> ctypes.c_void_p | None:
    """Return the entry of the OpenMP runtime that torch has loaded, whatever its file is called; None where torch has none."""
    for path in mapped_openmp():
        try:
            entry = ctypes.CDLL(path).GOMP_parallel
        except (OSError, AttributeError):
            continue
        return ctypes.cast(entry, ctypes.c_void_p)
    return None


def mapped_openmp() -> list[str]:
    """Return the files of the OpenMP runtimes that this process has mapped."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    names = (line.split(maxsplit=5)[-1] for line in lines)
    found = {name for name in names if any(kind in Path(name).name for kind in ("libgomp", "libiomp", "libomp"))}
    torch_folder = str(Path(torch.__file__).parent)  # other packages bring runtimes of their own: torch's is first
    return sorted(found, key=lambda name: (not name.startswith(torch_folder), name))


def last_cache_bytes() -> int:
    """Return the size of the cache that is nearest to memory; 16 MiB where the system doesn't tell."""
    sizes = _cache_sizes()
    return sizes[max(sizes)] if sizes else 16 * 2**20


def core_cache_bytes() -> int:
    """Return half the size of a core's own second-level cache: what stays there beside what streams by; 256 KiB where it isn't told."""
    return _cache_sizes().get(2, 2**19) // 2


@cache
def _cache_sizes() -> dict[int, int]:
    """Return the bytes of each level of cache of the first processor."""
    sizes = {}
    for folder in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        try:
            level, size = int((folder / "level").read_text()), (folder / "size").read_text().strip()
        except (OSError, ValueError):
            continue
        sizes[level] = int(size.rstrip("KM")) * (2**20 if size.endswith("M") else 2**10)
    return sizes


@cache
def is_available() -> bool:
    """Whether kernels can be built here; says once, as a warning, why not."""
    try:
        load("elementwise", STORAGE="float")
    except (BuildError, OSError) as error:
        warnings.warn(f"CPU kernels of our own are off, torch's ops run instead: {error}", BackendWarning, stacklevel=2)
        return False
    return True
