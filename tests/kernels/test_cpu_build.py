"""Building the C++ kernels: the cache, several processes at once, broken entries, other processors, no compiler, and a wrong kernel."""

from __future__ import annotations

import concurrent.futures
import ctypes
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from graphs import adjacency, random_edges

from runner.kernels import reference
from runner.kernels.cache import BackendWarning, cache_folder
from runner.kernels.cpu import build, library
from runner.kernels.parameters import kept

SCRIPT = """
import torch
from runner.kernels.adjacency import Adjacency
from runner.kernels.ops import spmm
torch.set_num_threads(1)
generator = torch.Generator().manual_seed(0)
ends = [torch.randint(0, 50, (400,), generator=generator) for _ in range(2)]
graph, x = Adjacency.from_edges(*ends, 50, 50), torch.randn(50, 33, generator=generator)
print(f"{float(spmm(graph, x).abs().sum()):.3f}")
"""
ATTENTION = """
from runner.kernels.ops import gat_attention, edge_softmax
y = gat_attention(graph, x.view(50, 3, 11), x[:, :3], x[:, :3])
z = edge_softmax(graph, torch.randn(400, 3, generator=generator))
print(f"{float(y.abs().sum()):.3f} {float((z * z).sum()):.3f} {float(spmm(graph, x, reduce='max').sum()):.3f}")
"""


def run_script(script: str = SCRIPT, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(
        [sys.executable, "-c", script], env=variables, capture_output=True, text=True, check=False, timeout=200
    )


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GEARSAIL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.so"))


def test_a_library_is_built_once_and_kept(cache: Path) -> None:
    build.load("elementwise", STORAGE="float")
    (entry,) = entries(cache)
    before = entry.stat().st_mtime_ns
    build.load("elementwise", STORAGE="float")
    assert entries(cache) == [entry]
    assert entry.stat().st_mtime_ns == before
    build.load("elementwise", STORAGE="double")
    assert len(entries(cache)) == 2


@pytest.mark.parametrize("damage", ["truncated", "empty", "changed", "text"])
def test_a_broken_entry_is_built_again(cache: Path, damage: str) -> None:
    build.load("elementwise", STORAGE="float")
    (entry,) = entries(cache)
    content = entry.read_bytes()
    entry.unlink()  # a new file: the library that is loaded must stay as it is
    broken = {
        "truncated": content[: len(content) // 2],
        "empty": b"",
        "changed": b"\0" * 64 + content[64:],
        "text": b"no library",
    }
    entry.write_bytes(broken[damage])
    assert isinstance(build.load("elementwise", STORAGE="float"), ctypes.CDLL)
    assert entry.read_bytes() == content or build._is_whole(entry)


def test_several_processes_may_build_at_once(cache: Path) -> None:
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        done = list(pool.map(lambda _: run_script(), range(4)))
    assert [one.returncode for one in done] == [0] * 4, done[0].stderr
    assert len({one.stdout for one in done}) == 1
    assert not [path for path in cache.iterdir() if path.suffix not in (".so", ".lock")]


def test_every_processor_gets_the_same_answer(cache: Path) -> None:
    answers = {}
    for architecture in ("native", "x86-64-v3", "x86-64"):
        done = run_script(SCRIPT + ATTENTION, GEARSAIL_CPU_ARCH=architecture)
        assert done.returncode == 0, done.stderr
        answers[architecture] = [float(word) for word in done.stdout.split()]
    for other in answers.values():
        assert other == pytest.approx(answers["native"], rel=1e-5)


def test_without_a_compiler_torch_takes_over_and_says_so_once(cache: Path) -> None:
    done = run_script(SCRIPT + "spmm(graph, x)\n", CXX="no-such-compiler")
    assert done.returncode == 0, done.stderr
    assert done.stdout == run_script().stdout
    assert done.stderr.count("BackendWarning") == 1
    assert "no C++ compiler (no-such-compiler not found)" in done.stderr


def test_a_compiler_that_fails_is_quoted(cache: Path, tmp_path: Path) -> None:
    compiler = tmp_path / "cxx"
    compiler.write_text(
        "#!/bin/sh\n[ \"$1\" = --version ] && echo odd 1.0 && exit 0\necho 'x.cpp:1: error: what is this' >&2; exit 1\n"
    )
    compiler.chmod(0o755)
    done = run_script(CXX=str(compiler))
    assert done.returncode == 0, done.stderr
    assert "x.cpp:1: error: what is this" in done.stderr


def test_a_cache_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("in the way")
    done = run_script(GEARSAIL_CACHE=str(file / "cache"))
    assert done.returncode == 0, done.stderr
    assert "set GEARSAIL_CACHE" in done.stderr


def test_a_wrong_kernel_is_caught(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Break a copy of the sources in ways that are easy to get wrong; each must show in the comparison with the reference."""
    from runner.kernels.ops import spmm

    graph = adjacency(random_edges(60, 500))
    inputs = (torch.randn(60, 16), torch.randn(60, 33))  # one vector a row, and several that overlap

    def is_right() -> bool:
        library.function.cache_clear()
        graph.ready.clear()
        pairs = [(spmm(graph, x).double(), reference.spmm(graph, x.double(), None, "sum")) for x in inputs]
        return all(torch.allclose(found, expected, atol=1e-5) for found, expected in pairs)

    mutations = {
        "": "",
        "sum[v] += message": "sum[v] = message",
        "at + W <= end ? at : end - W": "at + W <= end ? at : end - W - 1",
        "entry = begin; entry < end": "entry = begin; entry + 1 < end",
    }
    sources = {path.name: path.read_text() for path in build._SOURCES.glob("*.[ch]*")}
    monkeypatch.setattr(build, "_SOURCES", tmp_path)
    try:
        for wanted, put in mutations.items():
            for name, text in sources.items():
                (tmp_path / name).write_text(text.replace(wanted, put) if wanted else text)
            assert is_right() == (wanted == ""), wanted
    finally:
        library.function.cache_clear()


def test_dropout_keeps_the_same_elements_as_the_formula() -> None:
    from runner.kernels.ops import spmm

    loops = torch.arange(50)
    graph = adjacency((loops, loops, 50))
    for width in (1, 5, 16, 70):
        for seed in (0, 1, -5, 2**45 + 3):
            y = spmm(graph, torch.ones(50, width), dropout=0.3, seed=seed)
            mask = kept(torch.arange(50), width, 0.3, seed)
            assert torch.equal(y != 0, mask)
            assert torch.allclose(y[mask], torch.tensor(1 / 0.7))


def test_dropout_is_random_enough() -> None:
    one, other = (kept(torch.arange(2**33, 2**33 + 2000), 512, 0.25, seed).double() for seed in (0, 1))
    assert one.mean() == pytest.approx(0.75, abs=2e-3)
    assert one.mean(0).std() == pytest.approx((0.75 * 0.25 / 2000) ** 0.5, rel=0.15)
    assert one.mean(1).std() == pytest.approx((0.75 * 0.25 / 512) ** 0.5, rel=0.1)
    neighbours = {"row": one.roll(1, 0), "column": one.roll(1, 1), "diagonal": one.roll((1, 1), (0, 1)), "seed": other}
    for name, neighbour in neighbours.items():
        correlation = ((one - 0.75) * (neighbour - 0.75)).mean() / (0.75 * 0.25)
        assert abs(float(correlation)) < 4e-3, name  # 4 standard deviations of a million products


def test_torchs_thread_pool_is_used() -> None:
    library.function("elementwise", "epilogue_backward", torch.float32, None)
    runtimes = library.mapped_openmp()
    assert library._parallel_region() is not None
    assert str(Path(torch.__file__).parent) in runtimes[0]


def test_large_results_ask_for_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    from runner.kernels.cpu import launch, memory

    asked: list[Any] = []
    monkeypatch.setattr(memory, "_HUGE_BYTES", 1000)
    monkeypatch.setattr(memory, "_ask_for_huge_pages", asked.append)
    launch.epilogue_backward(torch.ones(20, 20), torch.ones(20, 20), reference.Epilogue())
    assert len(asked) == 1


def test_a_folder_that_keeps_nothing_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEARSAIL_CACHE", "/proc/none")
    with pytest.warns(BackendWarning, match="/proc/none") as told:
        folders = {cache_folder() for _ in range(3)}
    assert (len(folders), len(told)) == (1, 1)
