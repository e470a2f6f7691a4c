"""The CUDA kernels of cut matrices: compiled for two architectures without a GPU, emulated on the CPU, and run where there is a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from emulation import emulated
from graphs import WEIRD, adjacency, random_edges, symmetric
from test_cuda import ARCHITECTURES, TYPES, WIDE, gpu, has_gpu, needs_nvrtc
from torch import Tensor

from runner.kernels.adjacency import Adjacency
from runner.kernels.cuda import blocks as cuda
from runner.kernels.cuda.library import GROUPS, compile_for
from runner.kernels.density import owned
from runner.kernels.density.owned import Owned
from runner.kernels.density.partition import partition
from runner.kernels.formats import Part
from runner.kernels.launching import Blocks

GRAPHS = {name: adjacency(edges) for name, edges in WEIRD.items() if edges[2]}
GRAPHS["17 nodes, int64"] = Adjacency.from_edges(*random_edges(17, 80)[:2], 17, 17, torch.int64)
GRAPHS["a clique and long rows"] = adjacency(
    symmetric((torch.cat([*torch.combinations(torch.arange(70)).T[:1], torch.arange(70, 280)]),
               torch.cat([*torch.combinations(torch.arange(70)).T[1:], torch.full((210,), 3)]), 290))
)  # fmt: skip
GRAPHS["300 nodes"] = adjacency(symmetric(random_edges(300, 900)))
WIDTHS = (1, 3, 8, 33, 64)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulated_blocks")


def variants() -> Iterator[tuple[str, dict[str, str | int]]]:
    """Every kernel at every width; the other macros take turns, so that each value occurs."""
    types, kinds = itertools.cycle(TYPES), itertools.cycle(itertools.product(range(4), (0, 1)))
    staged = itertools.cycle(cuda.STAGED)
    for group, wide in itertools.product(GROUPS, (False, True)):
        for _ in range(2):
            (storage, index), (intra, weighted) = next(types), next(kinds)
            width = {"GROUP": group, "VEC": WIDE[storage] if wide else 1}
            rows = next(staged) if group * width["VEC"] * (8 if storage == "double" else 4) * 128 <= 48 * 2**10 else 0
            told = {"INTRA": intra, "WEIGHTED": weighted, "LOCAL": ("uint8", "uint16")[weighted], "ROWS": rows}
            yield "blocks", {"STORAGE": storage, "INDEX": index, **width, **told}
        storage, index = ("float", "double")[wide], ("int", "int64")[group > 4]
        vec = WIDE[storage] if wide else 1
        yield "coo", {"STORAGE": storage, "INDEX": index, "GROUP": group, "VEC": vec, "WEIGHTED": int(wide)}
    for unit, columns, weighted in itertools.product(cuda.UNITS.values(), cuda.MMA_COLUMNS, (0, 1)):
        told = {"UNIT": unit, "COLUMNS": columns, "WEIGHTED": weighted}
        yield "blocks_mma", {"STORAGE": "float", "INDEX": "int", "GROUP": 32, "VEC": 1, **told}


@needs_nvrtc
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("source", ["blocks", "blocks_mma", "coo"])
def test_every_kernel_compiles_at_every_width(source: str, architecture: str) -> None:
    compiled = [compile_for(name, defines, architecture) for name, defines in variants() if name == source]
    assert compiled
    assert all(cubin[:4] == b"\x7fELF" for cubin in compiled)


def cut(graph: Adjacency, block_size: int, weight: Tensor | None) -> list[tuple[str, Blocks]]:
    """Every format of a matrix, as arrays."""
    found: list[tuple[str, Blocks]] = []
    patch = pytest.MonkeyPatch()
    patch.setattr(owned, "_runner", lambda blocks, *_: found.append(("", blocks)) or (lambda x: x))
    try:
        parts = partition(graph, "none", block_size)
        formats = Owned(Part(graph, graph.values(weight), parts.part_ptr)).formats([0.0, 0.2])
        for entry in formats:
            entry.build()
    finally:
        patch.undo()
    return [(entry.name, blocks) for entry, (_, blocks) in zip(formats, found, strict=True)]


def guarded(blocks: Blocks, g: Callable[[Tensor], Tensor]) -> Blocks:
    changed = {name: g(entry) for name, entry in blocks.__dict__.items() if isinstance(entry, Tensor)}
    return Blocks(**(blocks.__dict__ | changed))


def expected(graph: Adjacency, weight: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor]:
    """The product, and the sum of its terms' absolute values, in fp64."""
    matrix = torch.from_numpy(graph.matrix(graph.values(weight)).toarray()).double()
    return matrix @ x.double(), matrix.abs() @ x.double().abs()


@pytest.mark.parametrize("side", ["end", "start"])
@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("weighted", [False, True])
def test_cut_matrices_by_emulation(name: str, weighted: bool, side: str, built: Path) -> None:
    torch.manual_seed(0)
    graph = GRAPHS[name]
    weight = torch.randn(graph.num_edges) if weighted else None
    with emulated(built, guard=side) as g:
        large = [(290, 4)] if graph.num_dst > 256 else []
        wide = [(7, 260), (100, 132)] if name in ("random symmetric", "a clique and long rows") else []
        for block_size, width in [*itertools.product((7, 100), WIDTHS), *large, *wide]:
            x = torch.randn(graph.num_src, width)
            product, size = expected(graph, weight, x)
            for kind, blocks in cut(graph, block_size, weight):
                y = cuda.blocks_spmm(guarded(blocks, g))(g(x)).double()
                assert ((y - product).abs() <= 1e-6 * size + 1e-30).all(), (kind, block_size, width)


@pytest.mark.parametrize("unit", ["tf32", "bf16"])
@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("weighted", [False, True])
def test_matrix_units_by_emulation(name: str, weighted: bool, unit: str, built: Path) -> None:
    torch.manual_seed(0)
    graph = GRAPHS[name]
    weight = torch.randn(graph.num_edges) if weighted else None
    rounding = {"tf32": 2**-11, "bf16": 2**-8}[unit]  # of a factor; a product has two
    with emulated(built) as g:
        wide = [(100, 8), (40, 132)] if name == "a clique and long rows" else []
        for block_size, width in [*itertools.product((5, 40), WIDTHS), *wide]:
            x = torch.randn(graph.num_src, width)
            product, size = expected(graph, weight, x)
            for kind, blocks in cut(graph, block_size, weight):
                if blocks.intra == "tiles":
                    y = cuda.blocks_mma_spmm(guarded(blocks, g), unit)(g(x)).double()
                    assert ((y - product).abs() <= 2.1 * rounding * size + 1e-30).all(), (kind, block_size, width)


def test_a_matrix_unit_rounds(built: Path) -> None:
    """What is called TF32 isn't fp32: a unit that isn't used would show."""
    graph = GRAPHS["random symmetric"]
    with emulated(built) as g:
        (blocks,) = [blocks for name, blocks in cut(graph, 40, None) if name == "owned_tiles_0"]
        x = torch.full((graph.num_src, 8), 1 + 2**-12)
        rounded = cuda.blocks_mma_spmm(guarded(blocks, g), "tf32")(g(x))
        exact = cuda.blocks_spmm(guarded(blocks, g))(g(x))
    assert not torch.equal(rounded, exact)


@pytest.mark.parametrize("name", GRAPHS)
def test_coordinates_by_emulation(name: str, built: Path) -> None:
    graph = GRAPHS[name]
    for weight, width in itertools.product((None, torch.randn(graph.num_edges)), WIDTHS):
        with emulated(built) as g:
            x = torch.randn(graph.num_src, width)
            values = None if weight is None else g(graph.values(weight))
            run = cuda.coo_spmm(g(graph.rows.contiguous()), g(graph.indices), values, graph.num_dst)
            product, size = expected(graph, weight, x)
            assert ((run(g(x)).double() - product).abs() <= 1e-6 * size + 1e-30).all(), width


@gpu
@has_gpu
@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("weighted", [False, True])
def test_cut_matrices_on_the_gpu(name: str, weighted: bool) -> None:
    torch.manual_seed(0)
    graph = GRAPHS[name]
    weight = torch.randn(graph.num_edges) if weighted else None
    for block_size, width in itertools.product((7, 64, 100), (1, 3, 16, 33, 64, 128, 257)):
        x = torch.randn(graph.num_src, width)
        product, size = expected(graph, weight, x)
        for kind, blocks in cut(graph, block_size, weight):
            there = blocks.to(torch.device("cuda"))
            runs = {"fp32": (cuda.blocks_spmm(there), 1e-6)}
            if blocks.intra == "tiles":
                runs["tf32"] = (cuda.blocks_mma_spmm(there, "tf32"), 2.1 * 2**-11)
                runs["bf16"] = (cuda.blocks_mma_spmm(there, "bf16"), 2.1 * 2**-8)
            for unit, (run, tolerance) in runs.items():
                y = run(x.cuda()).cpu().double()
                assert ((y - product).abs() <= tolerance * size + 1e-30).all(), (kind, unit, block_size, width)
