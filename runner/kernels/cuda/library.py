"""CUDA C++ sources → kernels, compiled by CuPy (NVRTC) at first use; CuPy keeps them on disk.

``GEARSAIL_CACHE`` sets the folder, as for the CPU kernels, unless ``CUPY_CACHE_DIR`` is set.
"""

from __future__ import annotations

import os
import re
import time
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from runner.kernels.cache import BackendWarning, cache_folder

INDEX = {torch.int32: "int", torch.int64: "int64"}
# Lanes that work on one row, and features that a lane takes at a time: 1, or 16 bytes of them.
GROUPS = (1, 2, 4, 8, 16, 32)
WIDE_LOAD_BYTES = 16
CHUNKS = (1, 2, 4, 8)  # of attention: channels of a head that a lane keeps

Launch = Callable[[tuple[int, ...], tuple[int, ...], tuple[Any, ...], torch.device], None]
_SOURCES = Path(__file__).parent
_compile_s = 0.0


def source_text(name: str) -> str:
    """Return a .cu source with its includes in their places: CuPy's cache knows a source by its text alone."""
    return with_includes((_SOURCES / f"{name}.cu").read_text())


def with_includes(text: str) -> str:
    """Return a source with its includes in their places, theirs too."""
    found = re.search(r'#include "(\w+\.cuh)"', text)
    if found is None:
        return text
    return with_includes(text[: found.start()] + (_SOURCES / found.group(1)).read_text() + text[found.end() :])


def options(defines: dict[str, str | int]) -> tuple[str, ...]:
    """Return the compiler's options for these macros."""
    return ("-std=c++17", *(f"-D{name}={value}" for name, value in sorted(defines.items())))


def compile_for(name: str, defines: dict[str, str | int], architecture: str, text: str | None = None) -> bytes:
    """Compile a source (``text``, where it was generated) for an architecture (``sm_90``) and return the cubin; needs NVRTC, no GPU.

    Raises:
        Exception: NVRTC's, with its log.
    """
    from cupy_backends.cuda.libs import nvrtc

    program = nvrtc.createProgram(source_text(name) if text is None else with_includes(text), f"{name}.cu", (), ())
    try:
        nvrtc.compileProgram(program, (f"-arch={architecture}", *options(defines)))
        return nvrtc.getCUBIN(program)
    except Exception as error:
        raise RuntimeError(f"{name}.cu, {defines}: {nvrtc.getProgramLog(program)}") from error


@cache
def function(source: str, name: str, text: str | None = None, **defines: str | int) -> Launch:
    """Return a kernel of a source, built for these macros; it runs on a tensor's device, on torch's current stream there.

    ``text`` is the source itself, where it was generated.

    Call it once before capturing a CUDA graph: loading a module is not allowed during capture.
    """
    import cupy

    _keep_in_our_folder()
    loaded: dict[int, Any] = {}

    def launch(grid: tuple[int, ...], block: tuple[int, ...], arguments: tuple[Any, ...], where: torch.device) -> None:
        device = torch.cuda.current_device() if where.index is None else where.index
        with cupy.cuda.Device(device):
            if device not in loaded:
                loaded[device] = _load(cupy, source, name, defines, text)
            stream = cupy.cuda.ExternalStream(torch.cuda.current_stream(device).cuda_stream, device)
            with stream:
                loaded[device](grid, block, arguments)

    return launch


def compile_seconds() -> float:
    """Return the seconds that this process has spent compiling and loading CUDA kernels."""
    return _compile_s


@cache
def is_available() -> bool:
    """Whether kernels can be built and run here; says once, as a warning, why not."""
    try:
        import cupy

        if not cupy.cuda.runtime.getDeviceCount():
            raise RuntimeError("CuPy sees no GPU")
        _keep_in_our_folder()
        _load(cupy, "elementwise", "epilogue_backward", {"STORAGE": "float", "INDEX": "int", "GROUP": 1, "VEC": 1})
    except Exception as error:  # CuPy, NVRTC and the driver each have exceptions of their own
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        warnings.warn(
            f"CUDA kernels of our own are off, torch's ops run instead: {reason}", BackendWarning, stacklevel=2
        )
        return False
    return True


def _load(cupy: Any, source: str, name: str, defines: dict[str, str | int], text: str | None = None) -> Any:
    global _compile_s
    start = time.perf_counter()
    module = cupy.RawModule(code=source_text(source) if text is None else with_includes(text), options=options(defines))
    kernel = module.get_function(name)
    _compile_s += time.perf_counter() - start
    return kernel


def _keep_in_our_folder() -> None:
    """Make CuPy keep its kernels in our cache folder; it reads the variable whenever it compiles."""
    os.environ.setdefault("CUPY_CACHE_DIR", str(cache_folder() / "cupy"))
