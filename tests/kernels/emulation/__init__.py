"""Our CUDA kernels on the CPU: the launcher as it is, the sources built by the host's compiler, tensors between guard pages."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from runner.kernels.cpu.build import find_compiler
from runner.kernels.cuda import launch, library

_HERE = Path(__file__).parent
_OUTCOMES = {1: "touched memory outside its buffers", 2: "has lanes that are not together at an exchange"}
_PAGE = mmap.PAGESIZE


@contextmanager
def emulated(folder: Path, max_blocks: int = 3, guard: str = "end") -> Iterator[Callable[[Tensor], Tensor]]:
    """Run :mod:`runner.kernels.cuda.launch` on CPU tensors; yields a function that copies a tensor between guard pages.

    Args:
        folder: for the built libraries.
        max_blocks: of a grid, so few that kernels have to stride.
        guard: which side of each buffer touches its guard page, ``start`` or ``end``.
    """
    held: list[mmap.mmap] = []

    def guarded(tensor: Tensor) -> Tensor:
        return _guarded(tensor, guard, held)

    def empty(*shape: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        fresh = torch.full(shape, 77, dtype=dtype or like.dtype)  # what a kernel forgets to write is seen
        return guarded(fresh)

    patch = pytest.MonkeyPatch()
    patch.setattr(
        library, "function", lambda source, name, text=None, **defines: _function(folder, source, name, text, **defines)
    )
    patch.setattr(launch, "empty", empty)
    patch.setattr(launch, "MAX_BLOCKS", max_blocks)
    patch.setattr(launch, "MAX_SLICES", 2)
    try:
        yield guarded
    finally:
        patch.undo()


@cache
def _function(folder: Path, source: str, name: str, text: str | None, **defines: Any) -> library.Launch:
    whole = library.source_text(source) if text is None else library.with_includes(text)
    entry = _build(folder, source, name, defines, whole)

    def run(grid: tuple[int, ...], block: tuple[int, ...], arguments: tuple[Any, ...], _where: torch.device) -> None:
        held = [ctypes.c_double(entry) if isinstance(entry, float) else ctypes.c_int64(entry) for entry in arguments]
        pointers = (ctypes.c_void_p * len(held))(*(ctypes.addressof(each) for each in held))
        outcome = entry(pointers, grid[0], grid[1] if len(grid) > 1 else 1, block[0])
        if outcome:
            raise AssertionError(f"kernel {name} of {source}.cu {_OUTCOMES[outcome]} ({defines})")

    return run


def _build(folder: Path, source: str, name: str, defines: dict[str, Any], text: str) -> Any:
    whole = f'#include "{_HERE}/emulate.h"\n{text}\n#include "{_HERE}/entry.h"\n'
    macros = [f"-D{key}={value}" for key, value in sorted(defines.items())] + [f"-DKERNEL={name}"]
    key = hashlib.sha256((whole + " ".join(macros)).encode()).hexdigest()[:16]
    built, file = folder / f"{source}-{key}.so", folder / f"{source}-{key}.cpp"
    if not built.exists():
        file.write_text(whole)
        compiler = find_compiler()
        assert compiler is not None
        flags = ["-O1", "-std=c++17", "-fPIC", "-shared", "-w"]
        done = subprocess.run([compiler, *flags, *macros, "-o", str(built), str(file)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    entry = ctypes.CDLL(str(built)).emulate
    entry.argtypes = [ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint, ctypes.c_uint]
    return entry


def _guarded(tensor: Tensor, guard: str, held: list[mmap.mmap]) -> Tensor:
    """Copy a tensor's elements so that the page before or behind them can't be touched."""
    if tensor.numel() == 0:
        return tensor
    size = -(-tensor.nbytes // _PAGE) * _PAGE
    region = mmap.mmap(-1, size + 2 * _PAGE)
    held.append(region)
    address = ctypes.addressof(ctypes.c_char.from_buffer(region))
    for page in (address, address + _PAGE + size):
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(page), ctypes.c_size_t(_PAGE), 0) == 0
    offset = _PAGE + (size - tensor.nbytes if guard == "end" else 0)
    copy = torch.frombuffer(region, dtype=tensor.dtype, count=tensor.numel(), offset=offset).view(tensor.shape)
    return copy.copy_(tensor)
