"""``python -m runner.doctor``: what this machine can run, and for each missing thing what it would enable and how to get it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from runner.results import cpu_name
from runner.units import format_bytes

OK, MISSING, CONFLICT, BROKEN = "ok", "missing", "conflict", "broken"


@dataclass(frozen=True)
class Finding:
    """One line of the report: what was looked at, its state, what was found, and what to do where it isn't ok."""

    what: str
    state: str
    found: str
    advice: str = ""


def main() -> None:
    """Print the report; exit code 1 where something that every run needs is broken."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    findings = [finding for check in CHECKS for finding in check()]
    table = Table("what", "state", "found", "what it would enable, and how to get it")
    colour = {OK: "green", MISSING: "yellow", CONFLICT: "yellow", BROKEN: "red"}
    for finding in findings:
        table.add_row(
            finding.what, f"[{colour[finding.state]}]{finding.state}[/]", escape(finding.found), escape(finding.advice)
        )
    console.print(table)
    sys.exit(1 if any(finding.state == BROKEN for finding in findings) else 0)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_python() -> Iterator[Finding]:
    """Interpreter and processor."""
    version = ".".join(str(part) for part in sys.version_info[:3])
    fits = (3, 11) <= sys.version_info[:2] <= (3, 12)
    yield Finding(
        "Python",
        OK if fits else BROKEN,
        version,
        "" if fits else "DGL 2.1 has wheels up to 3.12; make a venv with 3.11 or 3.12",
    )
    import psutil

    flags = _cpu_flags()
    best = next(
        (name for name, flag in (("AVX-512", "avx512f"), ("AVX2", "avx2"), ("SSE2", "sse2")) if flag in flags),
        "no vector extension seen",
    )
    extra = [name for name, flag in (("bf16", "avx512_bf16"), ("AMX", "amx_tile")) if flag in flags]
    yield Finding(
        "CPU",
        OK,
        f"{cpu_name()}, {len(os.sched_getaffinity(0))} cores, {', '.join([best, *extra])}, "
        f"{format_bytes(psutil.virtual_memory().total)} memory",
    )


def _cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return set(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())


def check_torch_and_dgl() -> Iterator[Finding]:
    """torch, DGL and whether they go together."""
    if _version("torch") is None:
        yield Finding("torch", BROKEN, "not installed", "pip install 'torch>=2.11,<2.14'")
        return
    import torch

    yield Finding(
        "torch",
        OK,
        f"{torch.__version__}, {torch.get_num_threads()} threads, CUDA {torch.version.cuda or 'none (CPU build)'}",
    )
    from runner.gnn.dgl_compat import has_cuda, import_dgl, is_stubbed

    try:
        dgl = import_dgl()
    except Exception as error:  # DGL fails to import in many ways
        yield Finding(
            "DGL",
            BROKEN,
            f"{_version('dgl')}: {type(error).__name__}: {error}",
            "pip install 'dgl>=2.1,<2.2' pandas packaging",
        )
        return
    note = (
        "; its GraphBolt was built for another torch and is stubbed (dgl.sparse and GraphBolt loaders don't work, the rest does)"
        if is_stubbed()
        else ""
    )
    yield Finding("DGL", OK, f"{dgl.__version__}{note}")
    yield from _check_openmp()
    if not torch.cuda.is_available():
        yield Finding(
            "GPU",
            MISSING,
            "torch sees none",
            "device=cuda. Needs an NVIDIA driver and a CUDA build of torch (pip install torch, from PyPI, on x86-64 Linux)",
        )
    else:
        names = ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
        yield Finding("GPU", OK, names)
        if not has_cuda():
            yield Finding(
                "DGL on the GPU",
                MISSING,
                "DGL is a CPU build; device=cuda trains on one whole graph with the captured op graph",
                "device=cuda with sampled batches and sets of graphs. Install DGL's CUDA wheel from DGL's own site (data.dgl.ai)",
            )


def _check_openmp() -> Iterator[Finding]:
    """More than one OpenMP runtime in a process means two pools of spinning threads."""
    from runner.kernels.cpu.library import mapped_openmp

    found = sorted({Path(path).name for path in mapped_openmp()})
    state = OK if len(found) <= 1 else CONFLICT
    yield Finding(
        "OpenMP",
        state,
        ", ".join(found) or "none mapped",
        "" if state == OK else "several thread pools compete: set OMP_NUM_THREADS, or cluster.num_threads",
    )


def check_compiler() -> Iterator[Finding]:
    """A C++ compiler, our CPU kernels, and METIS."""
    from runner.kernels.cpu.build import find_compiler

    compiler = find_compiler()
    if compiler:
        version = subprocess.run([*shlex.split(compiler), "--version"], capture_output=True, text=True, check=False)
        yield Finding("C++ compiler", OK, next(iter(version.stdout.splitlines()), compiler))
        yield from _check_cpu_kernels()
    else:
        yield Finding(
            "C++ compiler",
            MISSING,
            f"{os.environ.get('CXX') or 'none of g++, clang++, c++'} not found",
            "CPU kernels of our own (torch's ops run without): apt-get install g++",
        )
    if importlib.util.find_spec("pymetis"):
        yield Finding("pymetis", OK, _version("pymetis") or "installed")
    else:
        yield Finding(
            "pymetis",
            MISSING,
            "not installed",
            "kernel=density_adaptive with communities (kernel.partition=metis): pip install pymetis",
        )


def _check_cpu_kernels() -> Iterator[Finding]:
    """Whether our C++ builds and runs, and where it is kept."""
    from runner.kernels.cache import cache_folder
    from runner.kernels.cpu.build import BuildError, load

    try:
        load("elementwise", STORAGE="float")
    except (BuildError, OSError) as error:
        yield Finding("CPU kernels", BROKEN, str(error), "torch's ops run in their place; CXX names another compiler")
        return
    yield Finding("CPU kernels", OK, f"built for this processor, kept in {cache_folder()} (GEARSAIL_CACHE)")


def check_cupy() -> Iterator[Finding]:
    """CuPy and NVRTC, and whether their CUDA versions agree with torch's."""
    package = next((name for name in ("cupy-cuda13x", "cupy-cuda12x", "cupy") if _version(name)), None)
    if package is None:
        yield Finding(
            "CuPy",
            MISSING,
            "not installed",
            "CUDA kernels of our own: pip install 'gearsail[cuda13]' (or cuda12), to match torch's CUDA",
        )
        return
    import torch

    try:
        from cupy_backends.cuda.libs import nvrtc

        major, minor = nvrtc.getVersion()
    except Exception as error:  # a missing or mismatched libnvrtc fails in various ways
        yield Finding(
            "CuPy", BROKEN, f"{_version(package)}: NVRTC can't be loaded: {error}", "pip install nvidia-cuda-nvrtc"
        )
        return
    agrees = torch.version.cuda is None or torch.version.cuda.split(".")[0] == str(major)
    yield Finding(
        "CuPy",
        OK if agrees else CONFLICT,
        f"{package} {_version(package)}, NVRTC {major}.{minor}, torch's CUDA {torch.version.cuda or 'none'}",
        ""
        if agrees
        else f"one CUDA major version for both: pip install 'gearsail[cuda{(torch.version.cuda or '13').split('.')[0]}]'",
    )


def check_wandb() -> Iterator[Finding]:
    """W&B's version and what logger=wandb would do."""
    version = _version("wandb")
    if version is None:
        yield Finding("W&B", MISSING, "not installed", "logger=wandb: pip install wandb")
        return
    from runner.tracking import has_login

    login = "a login is set" if has_login() else "no login"
    mode = os.environ.get("WANDB_MODE")
    yield Finding(
        "W&B",
        OK,
        f"{version}, {login}; logger=wandb is offline unless logger.mode=online"
        + (f"; WANDB_MODE={mode}" if mode else ""),
        "" if has_login() else "online runs: `wandb login` or WANDB_API_KEY, then logger.mode=online",
    )


def check_extras() -> Iterator[Finding]:
    """Optional packages."""
    for module, extra, enables in (
        ("torch_geometric", "bench", "PyG as a peer in benchmarks"),
        ("matplotlib", "report", "pictures in reports"),
        ("hydra_plugins.hydra_joblib_launcher", "sweep", "parallel sweeps with hydra/launcher=joblib"),
    ):
        try:
            present = importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:
            present = False
        yield Finding(
            module.split(".")[-1],
            OK if present else MISSING,
            "installed" if present else "not installed",
            "" if present else f"{enables}: pip install 'gearsail[{extra}]'",
        )


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    check_python,
    check_torch_and_dgl,
    check_compiler,
    check_cupy,
    check_wandb,
    check_extras,
)

if __name__ == "__main__":
    main()
