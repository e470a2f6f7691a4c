"""Kernels whose communities own their rows: every format against dense fp64 products, on weird graphs and widths."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from graphs import WEIRD, adjacency, random_edges, symmetric
from torch import Tensor

from runner.errors import UserError
from runner.kernels.adjacency import Adjacency
from runner.kernels.cpu import blocks
from runner.kernels.density.owned import Owned
from runner.kernels.density.partition import partition
from runner.kernels.formats import Kernel, Part

WIDTHS = (1, 3, 16, 31, 33, 64, 100, 128, 257)


def owned(graph: Adjacency, block_size: int, weight: Tensor | None = None) -> Owned:
    parts = partition(graph, "none", block_size)
    return Owned(Part(graph, graph.values(weight), parts.part_ptr))


def kernels(of: Owned) -> Iterator[Kernel]:
    for entry in of.formats([0.0, 0.2]):
        yield entry.build()


def check(kernel: Kernel, graph: Adjacency, weight: Tensor | None) -> None:
    matrix = torch.from_numpy(graph.matrix(graph.values(weight)).toarray()).double()
    for width in WIDTHS:
        x = torch.randn(graph.num_src, width)
        error = (kernel.run(x).double() - matrix @ x.double()).abs()
        # of the sum of absolute products, as a plain fp32 sum has it
        allowed = 1e-6 * (matrix.abs() @ x.abs().double()) + 1e-30
        assert (error <= allowed).all(), (kernel.name, width)


@pytest.mark.parametrize("name", [name for name in WEIRD if WEIRD[name][2]])
@pytest.mark.parametrize("block_size", [2, 7, 64, 300])
@pytest.mark.parametrize("weighted", [False, True])
def test_every_format_multiplies(name: str, block_size: int, weighted: bool) -> None:
    torch.manual_seed(0)
    graph = adjacency(WEIRD[name])
    weight = torch.randn(graph.num_edges) if weighted else None
    names = [kernel.name for kernel in kernels(owned(graph, block_size, weight)) if not check(kernel, graph, weight)]
    assert names[0] == "owned_csr"


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_communities_of_more_than_a_byte_of_ids(index: torch.dtype) -> None:
    src, dst, num_nodes = symmetric(random_edges(700, 6000))
    graph = Adjacency.from_edges(src, dst, num_nodes, num_nodes, index)
    of = owned(graph, 400)
    entry = of.local()
    assert entry is not None
    check(entry.build(), graph, None)


@pytest.mark.parametrize("block_size", [8, 50])
def test_a_hub_rounds_as_a_short_row(block_size: int) -> None:
    num_edges = 100_000
    graph = adjacency((torch.randint(0, 50, (num_edges,)), torch.zeros(num_edges, dtype=torch.int64), 50))
    of = owned(graph, block_size)
    local = of.local()
    assert local is not None
    x = torch.rand(50, 5)
    expected = torch.from_numpy(graph.matrix(graph.values(None)).toarray()).double() @ x.double()
    for entry in (of.rest(), local):
        assert torch.allclose(entry.build().run(x).double(), expected, rtol=5e-6), "a plain running sum is off by 2e-4"


def test_bits_are_for_plain_pairs() -> None:
    clique = symmetric((*torch.combinations(torch.arange(40)).T, 40))
    graph = adjacency(clique)
    assert owned(graph, 8).bits() is not None
    assert owned(graph, 8, torch.rand(graph.num_edges)).bits() is None
    twice = adjacency((torch.cat([clique[0]] * 2), torch.cat([clique[1]] * 2), 40))
    assert owned(twice, 8).bits() is None


def test_duplicates_are_seen_in_unsorted_rows() -> None:
    graph = Adjacency.from_csr(torch.tensor([0, 3, 3, 3]), torch.tensor([1, 2, 1]), 3)
    of = owned(graph, 3)
    assert of.bits() is None
    assert of.density.tolist() == [2 / 9]
    for kernel in kernels(of):
        check(kernel, graph, None)


def test_tiles_are_for_dense_communities() -> None:
    pairs = torch.combinations(torch.arange(16)).T
    graph = adjacency(
        symmetric((torch.cat([pairs[0], torch.tensor([20])]), torch.cat([pairs[1], torch.tensor([25])]), 40))
    )
    of = owned(graph, 16)
    assert of.density.tolist() == [240 / 256, 2 / 256, 0]
    assert of.tiles(0.95) is None
    assert of.tiles(0.5) is not None


def test_a_wrong_kernel_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = adjacency(random_edges(40, 300))
    right = blocks.blocks_spmm

    def off_by_one(given: blocks.Blocks) -> object:
        run = right(given)
        return lambda x: run(x.roll(1, 0))

    monkeypatch.setattr("runner.kernels.density.owned.blocks_spmm", off_by_one)
    kernel = owned(graph, 8).rest().build()
    with pytest.raises(AssertionError, match="owned_csr"):
        check(kernel, graph, None)


def test_another_dtype_than_the_matrixs_is_refused() -> None:
    graph = adjacency(random_edges(40, 300))
    for kernel in kernels(owned(graph, 8, torch.rand(300))):
        with pytest.raises(UserError, match=r"x is torch.float64, the matrix's values are torch.float32"):
            kernel.run(torch.ones(40, 3, dtype=torch.float64))


def test_asking_for_rows_ahead_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for an X too large for a core's cache."""
    monkeypatch.setattr(blocks, "core_cache_bytes", lambda: 0)
    src, dst, num_nodes = symmetric(random_edges(700, 6000))
    check(owned(adjacency((src, dst, num_nodes)), 32).rest().build(), adjacency((src, dst, num_nodes)), None)


def test_threads_do_not_change_a_bit() -> None:
    graph = adjacency(symmetric(random_edges(500, 4000)))
    x = torch.randn(500, 33)
    before = torch.get_num_threads()
    try:
        for kernel in kernels(owned(graph, 32)):
            found = []
            for num_threads in (1, 2, 5):
                torch.set_num_threads(num_threads)
                found.append(kernel.run(x))
            assert torch.equal(found[0], found[1])
            assert torch.equal(found[0], found[2])
    finally:
        torch.set_num_threads(before)
