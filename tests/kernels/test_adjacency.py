"""The CSR graph: against a dense fp64 matrix, on weird graphs."""

from __future__ import annotations

import pytest
import torch
from graphs import WEIRD, adjacency, dense, random_edges, symmetric

from runner.errors import DataError
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
