"""The CSR graph: against a dense fp64 matrix, on weird graphs."""

from __future__ import annotations

import pytest
import torch
from graphs import WEIRD, adjacency, dense, random_edges, symmetric

from runner.errors import DataError, UserError
from runner.kernels.adjacency import Adjacency


@pytest.mark.parametrize("name", WEIRD)
def test_equals_the_dense_matrix(name: str) -> None:
    edges = WEIRD[name]
    graph, matrix = adjacency(edges), dense(edges)
    assert torch.equal(torch.from_numpy(graph.matrix(graph.values(None)).toarray()).double(), matrix)
    assert torch.equal(
        torch.from_numpy(graph.transposed.matrix(graph.transposed.values(None)).toarray()).double(), matrix.T
    )
    assert torch.equal(graph.in_degrees.double(), matrix.sum(1))
    assert torch.equal(graph.out_degrees.double(), matrix.sum(0))
    assert graph.is_symmetric() == torch.equal(matrix, matrix.T)


@pytest.mark.parametrize("name", WEIRD)
def test_edge_ids_lead_back_to_the_edges(name: str) -> None:
    src, dst, _ = WEIRD[name]
    graph = adjacency(WEIRD[name])
    for version in (graph, graph.permuted(torch.randperm(graph.num_dst, generator=torch.Generator().manual_seed(1)))):
        assert sorted(version.edge_ids.tolist()) == list(range(len(src)))
    assert torch.equal(graph.src_dst[0], src)
    assert torch.equal(graph.src_dst[1], dst)
    assert torch.equal(graph.transposed.src_dst[0], dst)


@pytest.mark.parametrize("name", WEIRD)
def test_permuted_renumbers_rows_and_columns(name: str) -> None:
    edges = WEIRD[name]
    weight = torch.rand(len(edges[0]))
    order = torch.randperm(edges[2], generator=torch.Generator().manual_seed(3))
    moved = adjacency(edges).permuted(order)
    expected = dense(edges, weight)[order][:, order]
    assert torch.allclose(torch.from_numpy(moved.matrix(moved.values(weight)).toarray()).double(), expected, atol=1e-6)


def test_asking_for_symmetry_does_not_change_the_graph() -> None:
    graph = adjacency(WEIRD["random symmetric"])
    before = (graph.indptr.clone(), graph.indices.clone())
    graph.is_symmetric()
    abs(graph.matrix(graph.values(None)))
    assert torch.equal(graph.indptr, before[0])
    assert torch.equal(graph.indices, before[1])


def test_symmetry_is_of_values_too() -> None:
    edges = symmetric(random_edges(9, 20))
    weight = torch.rand(20)
    graph = adjacency(edges)
    assert graph.is_symmetric()
    assert graph.is_symmetric(torch.cat([weight, weight]))
    assert not graph.is_symmetric(torch.rand(40))


def test_bipartite() -> None:
    graph = Adjacency.from_edges(torch.tensor([4, 0, 4]), torch.tensor([1, 1, 0]), 5, 2)
    assert graph.matrix(graph.values(None)).toarray().tolist() == [[0, 0, 0, 0, 1], [1, 0, 0, 0, 1]]
    assert (graph.transposed.num_dst, graph.transposed.num_src) == (5, 2)
    assert not graph.is_symmetric()


def test_select_keeps_ids() -> None:
    graph = adjacency(WEIRD["duplicates and loops"])
    loops = graph.select(graph.rows == graph.indices)
    assert loops.edge_ids.tolist() == [3, 4]


def test_bad_edges_name_the_array() -> None:
    with pytest.raises(DataError, match="src has 1 entries, dst 2"):
        Adjacency.from_edges(torch.tensor([0]), torch.tensor([0, 1]), 2, 2)
    with pytest.raises(DataError, match=r"dst holds ids from 0 to 7, allowed are 0 … 1"):
        Adjacency.from_edges(torch.tensor([0, 1]), torch.tensor([0, 7]), 2, 2)


@pytest.mark.parametrize("name", WEIRD)
def test_row_blocks_cover_all_rows_in_order(name: str) -> None:
    blocks = adjacency(WEIRD[name]).row_blocks
    assert blocks[0] == 0
    assert blocks[-1] == WEIRD[name][2]
    assert bool((blocks.diff() > 0).all())


def test_row_blocks_are_balanced_by_edges() -> None:
    graph = adjacency(random_edges(20_000, 200_000))
    work = (graph.indptr + torch.arange(20_001))[graph.row_blocks].diff()
    assert graph.row_blocks.numel() - 1 == -(-220_000 // 2048)
    assert int(work.max()) < 1.1 * 2048


def test_index_types() -> None:
    src, dst, num_nodes = WEIRD["random directed"]
    narrow, wide = (
        adjacency(WEIRD["random directed"]),
        Adjacency.from_edges(src, dst, num_nodes, num_nodes, torch.int64),
    )
    assert narrow.indices.dtype == narrow.edge_ids.dtype == narrow.transposed.indices.dtype == torch.int32
    assert wide.indices.dtype == wide.edge_ids.dtype == wide.transposed.indices.dtype == torch.int64
    assert torch.equal(narrow.indices.long(), wide.indices)
    with pytest.raises(UserError, match=r"index_dtype is torch.float32: torch.int32 and torch.int64"):
        Adjacency.from_edges(src, dst, num_nodes, num_nodes, torch.float32)
    with pytest.raises(UserError, match="too narrow for 3000000000"):
        Adjacency.from_edges(src, dst, 3_000_000_000, num_nodes, torch.int32)


@pytest.mark.parametrize("name", WEIRD)
def test_transposing_twice_and_incidence(name: str) -> None:
    graph = adjacency(WEIRD[name])
    assert graph.transposed.transposed is graph
    assert torch.equal(graph.edge_ids[graph.turned_entries.long()], graph.transposed.edge_ids)
    values = torch.rand(graph.num_edges)
    sums = torch.zeros(graph.num_dst).index_add(0, graph.src_dst[1], values)
    incidence = graph.incidence
    matrix = torch.from_numpy(incidence.matrix(incidence.values(None)).toarray())
    assert torch.allclose(matrix @ values, sums)
    turned = torch.from_numpy(incidence.transposed.matrix(torch.ones(graph.num_edges)).toarray())
    assert torch.equal(turned, matrix.T)


def test_edges_in_the_order_of_the_entries_need_no_ids() -> None:
    graph = adjacency(WEIRD["random directed"])
    assert graph.entry_ids is graph.edge_ids
    assert Adjacency.from_csr(graph.indptr, graph.indices, graph.num_src).entry_ids is None


def test_reach_tells_neighbours_from_strangers() -> None:
    nodes = torch.arange(999)
    path = Adjacency.from_edges(nodes, nodes + 1, 1000, 1000)
    assert path.reach <= 3
    assert adjacency(random_edges(1000, 9000)).reach > 500
