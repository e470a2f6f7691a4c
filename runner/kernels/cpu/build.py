"""C++ sources → shared libraries for this processor, built at first use and kept in a cache folder.

``GEARSAIL_CACHE`` sets the folder, ``CXX`` the compiler, ``GEARSAIL_CPU_ARCH`` what ``-march`` is given (default ``native``).
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from runner.kernels.cache import cache_folder

_SOURCES = Path(__file__).parent
# -O2: vectors are written out, so -O3 only compiles longer. Without errno and traps, comparisons and rounding stay in vectors; infinities
# and NaN keep their meaning.
_FLAGS = ("-O2", "-std=c++17", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi")
_DIGEST_BYTES = hashlib.sha256().digest_size
_one_at_a_time = threading.Lock()
_compile_s = 0.0


class BuildError(Exception):
    """A compiler that refuses our sources; the message is its first complaint."""


def find_compiler() -> str | None:
    """Return the C++ compiler: ``CXX`` where it is set (nothing else is tried then), else the first of g++, clang++, c++."""
    chosen = os.environ.get("CXX")
    if chosen:
        return chosen if shutil.which(shlex.split(chosen)[0]) else None
    return next((name for name in ("g++", "clang++", "c++") if shutil.which(name)), None)


def load(source: str, text: str | None = None, **defines: str | int) -> ctypes.CDLL:
    """Return ``source``.cpp as a library with these macros, built where the cache doesn't have it.

    ``text`` is the source itself, where it was generated; ``source`` is then its name. Safe when several processes ask at once: one
    builds, the others wait. An entry that was cut short or changed is built again.

    Raises:
        BuildError: where there is no compiler, or it fails.
    """
    with _one_at_a_time:
        compiler = find_compiler()
        if compiler is None:
            raise BuildError(f"no C++ compiler ({os.environ.get('CXX') or 'g++, clang++, c++'} not found)")
        command = [
            *shlex.split(compiler),
            *_FLAGS,
            *_architecture(),
            *(f"-D{name}={value}" for name, value in defines.items()),
        ]
        entry = cache_folder() / f"{source}-{_key(source, text, command)}.so"
        with _locked(entry.with_suffix(".lock")):
            if not _is_whole(entry):
                _compile(command, source, text, entry)
        return ctypes.CDLL(str(entry))


def _architecture() -> list[str]:
    chosen = os.environ.get("GEARSAIL_CPU_ARCH", "native")
    return [f"-march={chosen}"] if chosen else []


def _key(source: str, text: str | None, command: list[str]) -> str:
    """Name what a library depends on: sources, command, compiler, processor."""
    digest = hashlib.sha256()
    digest.update((_SOURCES / f"{source}.cpp").read_bytes() if text is None else text.encode())
    for path in sorted(_SOURCES.glob("*.h")):
        digest.update(path.read_bytes())
    digest.update("\0".join([*command, _version(command[0]), processor()]).encode())
    return digest.hexdigest()[:24]


@cache
def _version(compiler: str) -> str:
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    return f"{shutil.which(compiler)} {done.stdout}"


@cache
def processor() -> str:
    """Return what names this processor and what it can do: what -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    kept = [line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))]
    return "\n".join(sorted(set(kept)))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file unlocks it


def _is_whole(entry: Path) -> bool:
    """Whether an entry is what was written: its digest follows it. Loading a library that was cut short would end the process."""
    try:
        content = entry.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-_DIGEST_BYTES]).digest() == content[-_DIGEST_BYTES:]


def compile_seconds() -> float:
    """Return the seconds that this process has spent in the compiler."""
    return _compile_s


def _compile(command: list[str], source: str, text: str | None, entry: Path) -> None:
    global _compile_s
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=entry.parent) as folder:
        built, path = Path(folder, "built.so"), _SOURCES / f"{source}.cpp"
        if text is not None:
            path = Path(folder, f"{source}.cpp")
            path.write_text(text)
        command = [*command, f"-I{_SOURCES}", str(path)]
        done = subprocess.run([*command, "-o", str(built)], capture_output=True, text=True, check=False)
        if done.returncode != 0 or not built.is_file():
            complaints = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
            raise BuildError(f"{command[0]} failed on {Path(command[-1]).name}: {(complaints or ['no message'])[0]}")
        content = built.read_bytes()
        built.write_bytes(content + hashlib.sha256(content).digest())
        built.replace(entry)
    _compile_s += time.perf_counter() - start
