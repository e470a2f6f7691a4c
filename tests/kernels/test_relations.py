"""Graphs with several relations: captured, rewritten and run as DGL does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graphs import random_edges
from rewriting import WIDTH, answer, assert_close, dgl, fn, in_plain, on_kernels, programs
from torch import Tensor, nn

from runner.errors import CaptureError
from runner.gnn.capture import capture
from runner.kernels.adjacency import Adjacency
from runner.kernels.lower import Executable
from runner.kernels.opgraph import OpGraph
from runner.kernels.rewrite.made import Propagate

NUM_NODES = 23
EDGES = {
    "a": random_edges(NUM_NODES, 60, 1)[:2],
    "b": random_edges(NUM_NODES, 60, 2)[:2],
    "c": random_edges(NUM_NODES, 9, 3)[:2],
}
CONV = dgl.nn
LOOSE = {"allow_zero_in_degree": True}


def graph_of() -> Any:
    return dgl.heterograph({("n", name, "n"): ends for name, ends in EDGES.items()}, num_nodes_dict={"n": NUM_NODES})


def recorded(module: nn.Module, x: Tensor) -> OpGraph:
    relations = [Adjacency.from_edges(*ends, NUM_NODES, NUM_NODES) for ends in EDGES.values()]
    return capture(module, graph_of(), x, relations)


class Stock(nn.Module):
    """DGL's own way: a layer a relation, results brought together."""

    def __init__(self, make: Any, aggregate: str = "sum") -> None:
        super().__init__()
        self.layer = CONV.HeteroGraphConv({name: make() for name in EDGES}, aggregate=aggregate)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        return self.layer(graph, {"n": x})["n"].flatten(1)


class Crossed(nn.Module):
    """multi_update_all: a linear layer a relation, reduced and reduced across."""

    def __init__(self, across: Any, reduce: Any = fn.sum) -> None:
        super().__init__()
        self.linears = nn.ModuleDict({name: nn.Linear(WIDTH, 4, bias=False) for name in EDGES})
        self.across, self.reduce = across, reduce

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        with graph.local_scope():
            passing = {}
            for name, linear in self.linears.items():
                graph.ndata[f"h_{name}"] = linear(x)
                passing[name] = (fn.copy_u(f"h_{name}", "m"), self.reduce("m", "o"))
            graph.multi_update_all(passing, self.across)
            return graph.ndata["o"].flatten(1)


class EdgesOfOne(nn.Module):
    """Attention over one relation, its edges named in each call; a sum over another."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 4)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        with graph.local_scope():
            graph.ndata["h"] = self.linear(x)
            graph.apply_edges(fn.u_dot_v("h", "h", "s"), etype="b")
            weight = CONV.functional.edge_softmax(graph["b"], graph.edges["b"].data["s"])
            graph.edges["b"].data["w"] = weight
            graph.update_all(fn.u_mul_e("h", "w", "m"), fn.sum("m", "o"), etype="b")
            out = graph.ndata["o"]
            graph.update_all(fn.copy_u("h", "m"), fn.max("m", "p"), etype="a")
            return out + graph.ndata["p"]


class EdgesOfAnother(nn.Module):
    """Rows gathered along one relation, a layer a type, summed along another of as many edges."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = CONV.TypedLinear(WIDTH, 3, 2)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        with graph.local_scope():
            graph.ndata["h"] = x
            graph.apply_edges(fn.copy_u("h", "m"), etype="a")
            rows = graph.edges["a"].data["m"]
            graph.edges["b"].data["n"] = self.layer(rows, torch.arange(rows.shape[0]) % 2)
            graph.update_all(fn.copy_e("n", "k"), fn.sum("k", "o"), etype="b")
            return graph.ndata["o"]


MODULES = {
    "GraphConv": lambda: Stock(lambda: CONV.GraphConv(WIDTH, 4, **LOOSE)),
    "SAGEConv, mean": lambda: Stock(lambda: CONV.SAGEConv(WIDTH, 4, "mean"), "mean"),
    "GATConv, stack": lambda: Stock(lambda: CONV.GATConv(WIDTH, 3, 2, **LOOSE), "stack"),
    "EdgeConv, max": lambda: Stock(lambda: CONV.EdgeConv(WIDTH, 4, **LOOSE), "max"),
    **{f"across {name}": lambda name=name: Crossed(name) for name in ("sum", "mean", "max", "min", "stack")},
    "across, by hand": lambda: Crossed(lambda values: torch.stack(values).prod(0)),
    "named in each call": EdgesOfOne,
    "edges of another": EdgesOfAnother,
}


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("case", MODULES)
def test_several_relations_equal_dgl(case: str) -> None:
    module, x = MODULES[case](), torch.randn(NUM_NODES, WIDTH)
    graph = graph_of()
    expected = answer(module, lambda features: module(graph, features), x, seeded=True)
    found = recorded(module, x)
    assert len(found.relations) == len(EDGES)
    assert_close(answer(module, Executable(found), x, False), expected, "as captured")
    for program in programs(found, training=True):
        assert_close(answer(module, in_plain(program), x, False), expected, f"{program.plan}, in torch")
        assert_close(answer(module, on_kernels(program, x), x, False), expected, f"{program.plan}, on kernels")


def test_each_propagation_knows_its_relation() -> None:
    found = programs(recorded(MODULES["GraphConv"](), torch.randn(NUM_NODES, WIDTH)), training=True)[0]
    ops = [*found.draft.prologue, *found.draft.ops]
    assert {op.relation for op in ops if isinstance(op, Propagate)} == {0, 1, 2}


def test_what_can_not_be_captured_is_named() -> None:
    x = torch.randn(NUM_NODES, WIDTH)
    with pytest.raises(CaptureError, match="has 3 relations, an adjacency was given for 1"):
        capture(MODULES["GraphConv"](), graph_of(), x, Adjacency.from_edges(*EDGES["a"], NUM_NODES, NUM_NODES))
    with pytest.raises(CaptureError, match="a relation leaves destinations without edges"):
        recorded(Crossed("sum", fn.max), x)
    with pytest.raises(CaptureError, match="the cross reducer 'median'"):
        recorded(Crossed("median"), x)
    two = dgl.heterograph({("n", "a", "k"): EDGES["a"]}, num_nodes_dict={"n": NUM_NODES, "k": NUM_NODES})
    with pytest.raises(CaptureError, match="one type of nodes"):
        capture(MODULES["GraphConv"](), two, x, Adjacency.from_edges(*EDGES["a"], NUM_NODES, NUM_NODES))
