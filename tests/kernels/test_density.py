"""Decomposition, formats, selection: against dense fp64 products, on weird graphs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from graphs import WEIRD, adjacency, dense, random_edges, symmetric
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from runner.errors import UserError, VerificationError
from runner.kernels import formats
from runner.kernels.adjacency import Adjacency
from runner.kernels.cpu import binned
from runner.kernels.density import calibration, choices, orders, select
from runner.kernels.density.candidates import Allowed, Candidates, cut
from runner.kernels.density.owned import Owned
from runner.kernels.density.partition import Partition, partition, simple_copy
from runner.kernels.density.portrait import portray
from runner.kernels.density.select import Rule
from runner.kernels.formats import Factory, Format, Kernel, Part, Work

WIDTHS = (1, 3, 16, 33)
RULE = Rule(num_trials=3)


def split(graph: Adjacency, parts: Partition, weight: Tensor | None) -> tuple[Part, Part, Part]:
    moved = graph.permuted(parts.order)
    block = parts.part_of_row
    inside = block[moved.rows] == block[moved.indices]
    intra, inter = moved.select(inside), moved.select(~inside)
    return (
        Part(moved, moved.values(weight)),
        Part(intra, intra.values(weight), parts.part_ptr),
        Part(inter, inter.values(weight)),
    )


def check(entry: Format | None, part: Part) -> None:
    assert entry is not None
    kernel = entry.build()
    matrix = torch.from_numpy(part.adjacency.matrix(part.values).toarray()).double()
    for width in WIDTHS:
        x = torch.randn(part.adjacency.num_src, width)
        assert torch.allclose(kernel.run(x).double(), matrix @ x.double(), atol=1e-5), (kernel.name, width)


@pytest.mark.parametrize("name", WEIRD)
@pytest.mark.parametrize("block_size", [2, 7, 64])
@pytest.mark.parametrize("method", ["metis", "none"])
@pytest.mark.parametrize("weighted", [False, True])
def test_parts_add_up_and_every_format_multiplies(name: str, block_size: int, method: str, weighted: bool) -> None:
    edges = WEIRD[name]
    if method == "metis" and edges[2] <= block_size and block_size != 64:
        pytest.skip("one community: METIS isn't asked")
    graph = adjacency(edges)
    weight = torch.randn(graph.num_edges) if weighted else None
    parts = partition(graph, method, block_size)
    assert sorted(parts.order.tolist()) == list(range(edges[2]))
    assert int(parts.part_ptr.diff().min()) >= 1
    assert int(parts.part_ptr[-1]) == edges[2]
    whole, intra, inter = split(graph, parts, weight)
    total = dense(edges, weight)[parts.order][:, parts.order]
    sides = []
    for part in (intra, inter):
        sides.append(torch.from_numpy(part.adjacency.matrix(part.values).toarray()).double())
    assert torch.allclose(sides[0] + sides[1], total, atol=1e-6)
    for part in (whole, intra, inter):
        check(formats.csr_torch(part), part)
        check(formats.csr_native(part), part)
        check(formats.csr_binned(part), part)
        check(formats.coo_torch(part), part)
    check(formats.dense_blocks(intra), intra)


@settings(max_examples=40, deadline=None)
@given(
    num_nodes=st.integers(1, 40),
    num_edges=st.integers(0, 200),
    block_size=st.integers(1, 50),
    seed=st.integers(0, 1000),
)
def test_any_graph_any_block_size(num_nodes: int, num_edges: int, block_size: int, seed: int) -> None:
    edges = random_edges(num_nodes, num_edges, seed)
    graph = adjacency(edges)
    _, intra, inter = split(graph, partition(graph, "none", block_size), None)
    x = torch.randn(num_nodes, 5)
    blocks = formats.dense_blocks(intra)
    assert blocks is not None
    y = blocks.build().run(x) + formats.coo_torch(inter).build().run(x)
    assert torch.allclose(y.double(), dense(edges) @ x.double(), atol=1e-4)


def test_communities_are_found() -> None:
    """Four cliques of 16 with scrambled numbers come apart again."""
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    pairs = torch.combinations(torch.arange(16))
    edges = torch.cat([order[pairs + 16 * k] for k in range(4)])
    graph = adjacency(symmetric((edges[:, 0], edges[:, 1], 64)))
    parts = partition(graph, "metis", 16)
    _, intra, inter = split(graph, parts, None)
    assert inter.adjacency.num_edges == 0
    assert intra.adjacency.num_edges == graph.num_edges


def test_metis_repeats_itself() -> None:
    graph = adjacency(random_edges(300, 2000))
    assert torch.equal(partition(graph, "metis", 20).order, partition(graph, "metis", 20).order)


def test_metis_gets_a_symmetric_simple_loop_free_copy() -> None:
    copy = simple_copy(adjacency(WEIRD["duplicates and loops"]))
    matrix = copy.toarray() != 0
    assert (matrix == matrix.T).all()
    assert not matrix.diagonal().any()
    assert copy.nnz == matrix.sum()


def test_weights_that_cancel_do_not_hide_an_edge_from_metis() -> None:
    assert simple_copy(adjacency((torch.tensor([0, 1]), torch.tensor([1, 0]), 2))).nnz == 2


@pytest.fixture
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Compiled kernels stay where they are: only what is asked of the partition's own reads and writes is moved."""
    monkeypatch.setattr("runner.kernels.cache.cache_folder", lambda: tmp_path)
    return tmp_path


@pytest.mark.usefixtures("fresh_cache")
def test_a_crash_of_metis_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    real = subprocess.Popen

    def crash(command: list[str], **options: object) -> object:
        return real([command[0], "-c", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"], **options)  # type: ignore[call-overload]

    monkeypatch.setattr(subprocess, "Popen", crash)
    with pytest.raises(UserError, match=r"METIS failed with exit code -11 on 300 nodes .*kernel.partition=none"):
        partition(adjacency(random_edges(300, 900)), "metis", 20)


@pytest.mark.parametrize("method", ["metis", "label_propagation", "rcm", "degree", "none"])
@pytest.mark.parametrize("name", WEIRD)
def test_every_method_orders_all_nodes(method: str, name: str, fresh_cache: Path) -> None:
    num_nodes = WEIRD[name][2]
    parts = partition(adjacency(WEIRD[name]), method, 5)
    assert sorted(parts.order.tolist()) == list(range(num_nodes))
    assert (int(parts.part_ptr[0]), int(parts.part_ptr[-1])) == (0, num_nodes)
    again = partition(adjacency(WEIRD[name]), method, 5)
    assert again.is_kept == (method != "none" and num_nodes > 5)
    assert torch.equal(again.order, parts.order)
    assert torch.equal(again.part_ptr, parts.part_ptr)
    assert again.seconds == parts.seconds
    assert not list(fresh_cache.rglob(".*")), "a file was left half written"


def test_label_propagation_finds_cliques_and_degree_puts_hubs_first() -> None:
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    pairs = torch.combinations(torch.arange(16))
    edges = torch.cat([order[pairs + 16 * k] for k in range(4)])
    clique = torch.empty(64, dtype=torch.int64)
    clique[order] = torch.arange(64) // 16
    found = orders.by_label(simple_copy(adjacency(symmetric((edges[:, 0], edges[:, 1], 64)))))
    assert all(clique[found[at : at + 16]].unique().numel() == 1 for at in (0, 16, 32, 48))
    star = simple_copy(adjacency((torch.arange(9), torch.full((9,), 9), 10)))
    assert int(orders.by_degree(star)[0]) == 9
    path = torch.randperm(30, generator=torch.Generator().manual_seed(0))
    rank = torch.empty(30, dtype=torch.int64)
    rank[orders.by_bandwidth(simple_copy(adjacency((path[:-1], path[1:], 30))))] = torch.arange(30)
    assert int((rank[path[:-1]] - rank[path[1:]]).abs().max()) == 1


@pytest.mark.parametrize("damage", ["emptied", "no zip", "cut short", "another graph's"])
def test_a_damaged_partition_is_found_again(damage: str, fresh_cache: Path) -> None:
    graph = adjacency(random_edges(60, 300))
    first = partition(graph, "metis", 10)
    (file,) = fresh_cache.glob("partitions/*.npz")
    if damage == "another graph's":
        np.savez(file, order=np.zeros(60), part_ptr=np.array([0, 60]), seconds=0.0, peak_bytes=0)
    else:
        file.write_bytes({"emptied": b"", "no zip": b"PK not a zip", "cut short": file.read_bytes()[:500]}[damage])
    second = partition(graph, "metis", 10)
    assert not second.is_kept
    assert torch.equal(first.order, second.order)
    assert partition(graph, "metis", 10).is_kept


@pytest.mark.usefixtures("fresh_cache")
def test_large_graphs_are_cut_in_two_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["runner.kernels.density.partition"]
    monkeypatch.setattr(module, "_DISTRICT_FROM", 100)
    monkeypatch.setattr(module, "_DISTRICT_SIZE", 90)
    steps: list[tuple[int, int]] = []
    graph = adjacency(symmetric(random_edges(400, 1500)))
    parts = partition(graph, "metis", 10, lambda done, total: steps.append((done, total)))
    assert steps == [(k, 6) for k in range(1, 7)]
    assert sorted(parts.order.tolist()) == list(range(400))
    assert 30 <= parts.part_ptr.numel() - 1 <= 45
    assert parts.peak_bytes is not None
    assert parts.peak_bytes > 10**7


def candidates(name: str = "random symmetric", extra: Sequence[Factory] = ()) -> Candidates:
    graph = adjacency(WEIRD[name])
    parts = partition(graph, "none", 8)
    moved = graph.permuted(parts.order)
    return cut(moved, moved.values(None), parts.part_ptr, extra)


def broken(change: Callable[[Tensor], Tensor]) -> Factory:
    def factory(part: Part) -> Format:
        right = formats.coo_torch(part).build()
        return Format("broken", Work(), lambda: Kernel("broken", lambda x: change(right.run(x)), 0))

    return factory


@pytest.mark.parametrize(
    "change",
    [lambda y: y + 1e-3, lambda y: y[:, :-1], lambda y: y * float("nan"), lambda y: torch.cat([y[:-1], y[-1:] * 1.01])],
    ids=["offset", "shape", "nan", "last row"],
)
def test_a_wrong_kernel_is_caught_before_it_is_timed(change: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(VerificationError, match="broken"):
        select.choose(candidates(extra=[broken(change)]), 4, RULE)


def test_the_fastest_wins_and_all_that_was_tried_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that sleep stand for slow ones; the clock is ours, so nothing depends on the machine."""
    now = [0.0]
    monkeypatch.setattr(formats.time, "perf_counter", lambda: now[0])

    def timed(name: str, seconds: float) -> Factory:
        def factory(part: Part) -> Format:
            right = formats.coo_torch(part).build()

            def run(x: Tensor) -> Tensor:
                now[0] += seconds
                return right.run(x)

            return Format(name, Work(), lambda: Kernel(name, run, 0))

        return factory

    kinds = {"single": (timed("slow", 3.0),), "intra": (timed("quick", 0.1),), "inter": (timed("middle", 2.0),)}
    monkeypatch.setattr("runner.kernels.density.candidates._FACTORIES", kinds)
    monkeypatch.setattr(Candidates, "_owned", None)
    choice = select.choose(candidates(), 4, RULE)
    assert choice.names == ("quick", "middle")
    assert choice.tried["final: quick + middle"] == pytest.approx(2.1)
    assert choice.tried["single: slow"] == pytest.approx(3.0)
    refused = select.choose(candidates(), 4, Rule(num_trials=3, min_gain=0.31))
    assert refused.names == ("slow",), "a gain of 30 % is not the 31 % asked for"


def test_communities_with_hardly_an_edge_are_not_cut_off() -> None:
    pairs = torch.combinations(torch.arange(10)).T
    src, dst = torch.cat([pairs[0], torch.tensor([10, 25])]), torch.cat([pairs[1], torch.tensor([11, 5])])
    graph = adjacency((src, dst, 30))
    of = cut(graph, graph.values(None), torch.tensor([0, 10, 20, 30]))
    assert of.intra is not None
    assert of.inter is not None
    assert of.intra.adjacency.num_edges == 45
    assert of.inter.adjacency.num_edges == 2


def test_long_rows_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binned, "_SEGMENT", 16)
    for name in ("hub", "random directed", "as many edges as nodes"):
        graph = adjacency(WEIRD[name])
        for weight in (None, torch.randn(graph.num_edges)):
            part = Part(graph, graph.values(weight))
            check(formats.csr_binned(part), part)
    star = adjacency(WEIRD["hub"])
    cut_rows = binned.bin_rows(star.indptr, star.indices, None, star.num_src)
    assert cut_rows.segments.tolist() == [[0, 16], [16, 32], [32, 39]]
    assert cut_rows.hubs.tolist() == [[0, 0, 3]]
    assert cut_rows.rows.numel() == 39


@pytest.mark.parametrize(
    "names", [("csr_native",), ("owned_tiles_0.1",), ("owned_bits",), ("dense_blocks", "coo_torch")]
)
def test_a_portrait_counts_every_edge_once(names: tuple[str, ...]) -> None:
    of = candidates()
    graph, whole = adjacency(WEIRD["random symmetric"]), of.whole
    densities = Owned(whole).density
    portrait = portray(graph, whole, densities, [("width 4", names), ("width 8", names)])
    (panel,) = portrait.panels
    assert panel.title == "width 4, width 8"
    assert int(portrait.before.sum()) == graph.num_edges
    assert sum(int(layer.sum()) for layer in panel.layers.values()) == graph.num_edges
    assert int(portrait.densities.sum()) == len(densities)
    expected = dense(WEIRD["random symmetric"]) != 0
    assert torch.equal(portrait.before > 0, expected), "few nodes have a cell a pair"


def test_an_unsplit_graph_has_whole_kernels_only() -> None:
    graph = adjacency(WEIRD["hub"])
    choice = select.choose(Candidates(Part(graph, graph.values(None)), None, None), 4, RULE)
    assert choice.names in (("csr_torch",), ("csr_native",), ("csr_binned",))


def test_a_choice_of_a_crowded_machine_is_not_kept(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration.os, "getloadavg", lambda: (1000.0, 0.0, 0.0))
    choices.remember("some", select.choose(candidates(), 4, RULE))
    assert not list(fresh_cache.rglob("*.json"))


def test_a_choice_is_kept_and_taken_again(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration.os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    of = candidates()
    key = choices.key_of(of, 4, RULE)
    assert choices.recall(key, of) is None
    choice = select.choose(of, 4, RULE)
    choices.remember(key, choice)
    again = choices.recall(key, candidates())
    assert again is not None
    assert (again.names, again.tried) == (choice.names, choice.tried)
    x = torch.randn(of.whole.adjacency.num_src, 4)
    assert torch.equal(again.run(x), choice.run(x))
    (file,) = fresh_cache.glob("choices/*.json")
    for damage in (
        "",
        "{}",
        '{"kernels": ["gone"], "tried_s": {}, "predicted_s": {}, "reason": ""}',
        '{"kernels": [], "tried_s": {}, "predicted_s": {}, "reason": ""}',
    ):
        file.write_text(damage)
        assert choices.recall(key, of) is None


def test_equal_duplicates_of_a_hub_are_no_wrong_kernel() -> None:
    """The same term added over and over rounds the same way each time: a plain sum, as torch's, is off by far more than chance has it."""
    src = torch.arange(30_500) % 65
    dst = torch.cat([torch.zeros(30_000, dtype=torch.int64), torch.arange(500) % 65])
    graph = Adjacency.from_edges(src * (torch.arange(30_500) < 30_000) % 7, dst, 65, 65)
    of = cut(graph, graph.values(None), torch.tensor([0, 30, 65]))
    for width in (1, 16):
        assert select.choose(of, width, Rule("exhaustive", num_trials=1)).names


def test_a_wrong_end_or_hub_of_many_rows_is_caught() -> None:
    """Of more rows than are sampled, the ends and the hub always are."""
    src, dst, num_nodes = symmetric(random_edges(500, 900))
    graph = adjacency((torch.cat([src, torch.arange(300)]), torch.cat([dst, torch.full((300,), 250)]), num_nodes))
    part = Part(graph, graph.values(None))
    for row in (0, 250, 499):

        def off(y: Tensor, row: int = row) -> Tensor:
            y[row] += 1
            return y

        with pytest.raises(VerificationError, match=f"row {row}"):
            select.choose(Candidates(part, None, None, [broken(off)]), 4, RULE)


def test_a_partition_belongs_to_a_block_size(fresh_cache: Path) -> None:
    graph = adjacency(random_edges(60, 300))
    counts = [partition(graph, "metis", size).part_ptr.numel() for size in (10, 20, 10)]
    assert counts[0] == counts[2] > counts[1]
    assert len(list(fresh_cache.glob("partitions/*.npz"))) == 2


def test_a_choice_belongs_to_weights_communities_and_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = adjacency(WEIRD["random symmetric"])
    ends = torch.tensor([0, 20, 47])
    ones, others = graph.values(None), torch.rand(graph.num_edges)
    given = [
        cut(graph, ones, ends),
        cut(graph, others, ends),
        cut(graph, ones, torch.tensor([0, 30, 47])),
        cut(graph, ones, ends, allowed=Allowed("tf32")),
        cut(graph, ones, ends, allowed=Allowed(atomics=True)),
    ]
    keys = [choices.key_of(of, 4, RULE) for of in given]
    monkeypatch.setattr(choices, "has_kernels", lambda _: False)
    keys.append(choices.key_of(given[0], 4, RULE))
    monkeypatch.setattr(choices, "processor", lambda: "another")
    keys.append(choices.key_of(given[0], 4, RULE))
    assert len(set(keys)) == len(keys)


def test_a_choice_belongs_to_a_matrix_a_width_a_rule_and_a_number_of_threads() -> None:
    keys = [
        choices.key_of(of, width, rule)
        for of, width, rule in (
            (candidates(), 4, RULE),
            (candidates("random directed"), 4, RULE),
            (candidates(), 5, RULE),
            (candidates(), 4, Rule(num_trials=4)),
            (candidates(), 4, Rule("exhaustive", num_trials=3)),
            (candidates(extra=[formats.coo_torch]), 4, RULE),
        )
    ]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(before + 1)
        keys.append(choices.key_of(candidates(), 4, RULE))
    finally:
        torch.set_num_threads(before)
    assert len(set(keys)) == len(keys)
    assert keys[0] == choices.key_of(candidates(), 4, RULE)
