"""Rewriting: every rule's result equals the module in fp64, output and gradients, on weird graphs; what would be wrong is refused."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from graphs import WEIRD, adjacency
from rewriting import (
    MODULES,
    WIDTH,
    Plain,
    answer,
    assert_close,
    captured,
    dgl,
    exact,
    features_of,
    fn,
    graph_of,
    in_plain,
    on_kernels,
    programs,
    stored,
)
from torch import Tensor, nn

from runner.gnn.capture import capture
from runner.gnn.models import build_model
from runner.kernels.fused.invariants import Expressions, Invariants
from runner.kernels.fused.lower import executable
from runner.kernels.lower import Executable
from runner.kernels.opgraph import Aggregate, EdgeApply, EdgeSoftmax, Ref
from runner.kernels.rewrite.canonical import canonical
from runner.kernels.rewrite.cost import Machine
from runner.kernels.rewrite.engine import apply_all
from runner.kernels.rewrite.made import Attend, GraphLinear, Propagate, SparseProduct
from runner.kernels.rewrite.ops import Linear
from runner.kernels.rewrite.rules.order import sites
from runner.kernels.rewrite.search import FAMILIES, Plan, Search, rules_before
from runner.schema import RULE_FAMILIES, ModelConfig

GRAPHS = [name for name in WEIRD if name not in ("one node, no edge", "one loop", "no edges")]
WITHOUT_EDGES = ("GraphConv both", "SAGEConv mean", "GINConv", "APPNP", "GCN")  # what DGL itself can take


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("case", MODULES)
def test_the_best_programs_equal_the_module(case: str, name: str) -> None:
    module, x = MODULES[case](), features_of(name)
    expected = exact(module, name)
    graph = captured(module, name)
    assert_close(answer(module, in_plain_of(graph), x, False), expected, "in typed ops")
    for found in programs(graph, training=True):
        assert_close(answer(module, in_plain(found), x, False), expected, f"{found.plan}, in torch")
        assert_close(answer(module, on_kernels(found, x), x, False), expected, f"{found.plan}, on kernels")


def in_plain_of(graph: Any) -> Any:
    return Executable(canonical(graph).finish())


@pytest.mark.parametrize("case", WITHOUT_EDGES)
@pytest.mark.parametrize("name", ["no edges", "one loop"])
def test_graphs_with_hardly_anything_in_them(case: str, name: str) -> None:
    module, x = MODULES[case](), features_of(name)
    graph = captured(module, name)
    expected = exact(module, name)
    for found in programs(graph, training=True, count=2):
        assert_close(answer(module, on_kernels(found, x), x, False), expected, str(found.plan))


@pytest.mark.parametrize("case", MODULES)
def test_evaluation_mode(case: str) -> None:
    module, x = MODULES[case]().eval(), features_of("random directed")
    with torch.no_grad():
        expected = module(graph_of("random directed"), x)
        for found in programs(captured(module, "random directed"), training=False):
            assert_close([on_kernels(found, x)(x)], [expected], str(found.plan))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", ["GCN", "SAGE", "GIN", "GAT", "MoNet", "EdgeNet", "RelGraphConv basis"])
def test_each_family_can_be_switched_off(case: str, family: str) -> None:
    module, x = MODULES[case](), features_of("random directed")
    expected = exact(module, "random directed")
    for found in programs(captured(module, "random directed"), True, 2, frozenset([family])):
        assert_close(answer(module, on_kernels(found, x), x, False), expected, f"without {family}")


def test_families_are_those_of_the_config() -> None:
    assert FAMILIES == RULE_FAMILIES


def ops_of(case: str, name: str = "random directed") -> list[Any]:
    return programs(captured(MODULES[case](), name), training=True)[0].draft.ops


def test_attention_is_one_op_and_nothing_is_left_on_edges() -> None:
    for case in ("GAT", "GATv2", "DotGatConv"):
        ops = ops_of(case)
        assert any(isinstance(op, Attend) for op in ops)
        assert not any(isinstance(op, EdgeApply | EdgeSoftmax | Aggregate) for op in ops)


def test_edgeconv_is_a_minimum_over_nodes() -> None:
    ops = ops_of("EdgeConv")
    assert [op.reduce for op in ops if isinstance(op, Propagate)] == ["min"]
    assert not any(isinstance(op, EdgeApply | Aggregate) for op in ops)


def test_a_propagation_of_the_features_is_computed_once() -> None:
    found = programs(captured(MODULES["SGConv"](), "random directed"), training=True)[0]
    assert [type(op) for op in found.draft.prologue] == [Propagate, Propagate]
    assert not any(isinstance(op, Propagate) for op in found.draft.ops)


# --- what is tempting and wrong ------------------------------------------------------------------------------------------


class Between(nn.Module):
    """An aggregation, something, and a linear layer."""

    def __init__(self, reduce: Any, between: nn.Module) -> None:
        super().__init__()
        self.reduce, self.between, self.linear = reduce, between, nn.Linear(WIDTH, 2)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        with graph.local_scope():
            graph.ndata["h"] = x.sin()
            graph.update_all(fn.copy_u("h", "m"), self.reduce("m", "o"))
            return self.linear(self.between(graph.ndata["o"]))


def refusals(module: nn.Module, name: str = "random directed") -> list[str]:
    found = programs(captured(module, name), training=True)[0]
    return [str(step) for step in found.steps if step.reason]


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (Between(fn.max, nn.Identity()), "max doesn't commute with a product"),
        (Between(fn.sum, nn.BatchNorm1d(WIDTH)), "batch_norm lies between"),
        (Between(fn.sum, nn.LayerNorm(WIDTH)), "layer_norm lies between"),
        (Between(fn.sum, nn.Dropout(0.5)), "a dropout lies between"),
        (Between(fn.sum, nn.ReLU()), "relu lies between"),
        (Plain(dgl.nn.EdgeConv(WIDTH, 4, batch_norm=True)), "isn't a source's row shifted"),
        (MODULES["CFConv"](), "a weight for each head or channel"),
        (MODULES["APPNP"](), "its bias would be added once an edge"),
        (MODULES["GCN"](), "input dropout draws anew at each step"),
        (MODULES["EdgeGATConv"](), "its weights are not those of a sum over the source's rows"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_tempting_rewrites_are_refused_and_the_reason_is_given(module: nn.Module, words: str) -> None:
    told = refusals(module)
    assert any(words in line for line in told), told
    x = features_of("random directed")
    for found in programs(captured(module, "random directed"), training=True):
        assert_close(answer(module, on_kernels(found, x), x, False), exact(module, "random directed"), words)


class OfBothEnds(nn.Module):
    """A linear layer over edges of both ends' rows, one of which may be a single number, or gathered without gradients."""

    def __init__(self, operation: str, narrow: str = "", is_detached: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.operation, self.narrow, self.is_detached = operation, narrow, is_detached

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        with graph.local_scope():
            h = self.first(x)
            graph.ndata["a"] = h[:, :1] if self.narrow == "a" else h
            graph.ndata["b"] = h[:, 1:2] if self.narrow == "b" else h.cos()
            message = fn.copy_u("a", "m") if self.operation == "copy" else getattr(fn, self.operation)("a", "b", "m")
            with torch.no_grad() if self.is_detached else nullcontext():
                graph.apply_edges(message)
            graph.edata["n"] = self.second(graph.edata["m"])
            graph.update_all(fn.copy_e("n", "k"), fn.max("k", "o"))
            return graph.ndata["o"]


@pytest.mark.parametrize("is_detached", [False, True])
@pytest.mark.parametrize(
    ("operation", "narrow"),
    [("u_add_v", "a"), ("u_add_v", "b"), ("u_sub_v", "a"), ("u_sub_v", ""), ("u_add_v", ""), ("copy", "")],
)
def test_a_layer_of_both_ends_moves_only_where_each_has_a_row(operation: str, narrow: str, is_detached: bool) -> None:
    module, x = OfBothEnds(operation, narrow, is_detached), features_of("random directed")
    for found in programs(captured(module, "random directed"), training=True):
        assert_close(answer(module, on_kernels(found, x), x, False), exact(module, "random directed"), str(found.plan))
        is_on_edges = any(
            isinstance(op, Linear) and found.draft.value(op.output).space == "edge" for op in found.draft.ops
        )
        assert is_on_edges == (bool(narrow) or is_detached)


class TrainsItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.ones(WIDTH)), dgl.nn.SGConv(WIDTH, 3, 2, allow_zero_in_degree=True)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        return self.layer(graph, x * self.scale)


def test_features_that_are_trained_are_not_kept() -> None:
    for found in programs(captured(TrainsItsInput(), "random directed"), training=True):
        assert not found.draft.prologue
        assert not any(isinstance(op, SparseProduct) for op in found.draft.ops)


def test_sampled_blocks_are_not_captured() -> None:
    graph = graph_of("random directed")
    block = dgl.to_block(dgl.in_subgraph(graph, torch.arange(5)), torch.arange(5))
    with pytest.raises(Exception, match="not a sampled block"):
        capture(MODULES["SGConv"](), block, features_of("random directed"), adjacency(WEIRD["random directed"]))


# --- what is kept, and for how long --------------------------------------------------------------------------------------


def test_other_features_and_features_changed_in_place_are_propagated_anew() -> None:
    module, x = MODULES["SGConv"](), features_of("random directed")
    graph = graph_of("random directed")
    found = programs(captured(module, "random directed"), training=True)[0]
    invariants = Invariants()
    run = executable(found.draft, invariants)

    def outcome(features: Tensor) -> Tensor:
        invariants.follow(features)
        return run(features)

    assert torch.allclose(outcome(x), module(graph, x), atol=1e-5)
    held = invariants.num_bytes
    other = x + 1
    assert torch.allclose(outcome(other), module(graph, other), atol=1e-5)
    other *= 2
    assert torch.allclose(outcome(other), module(graph, other), atol=1e-5)
    assert held > 0
    invariants.clear()
    assert invariants.num_bytes == 0
    assert torch.allclose(outcome(x), module(graph, x), atol=1e-5)


def test_what_lies_between_is_not_kept() -> None:
    module, x = MODULES["SGConv"](), features_of("random directed")
    draft = next(
        found.draft for found in programs(captured(module, "random directed"), True, 8) if found.draft.prologue
    )
    invariants = Invariants()
    invariants.follow(x)
    executable(draft, invariants)(x)
    read = {ref.index for op in draft.ops for ref in op.reads()}
    made = [output.index for op in draft.prologue for output in op.outputs]
    assert len(set(made) - read) >= 1
    names = Expressions(draft, invariants)
    is_sparse = any(isinstance(op, SparseProduct) for op in draft.ops)
    kept = {index for index in made if invariants.has(names(Ref(index)))}
    assert kept == (set() if is_sparse else set(made) & read)


def test_training_and_evaluation_share_what_is_equal() -> None:
    module, x = MODULES["SGConv"](), features_of("random directed")
    invariants = Invariants()
    invariants.follow(x)
    held = []
    for training in (True, False):
        graph = captured(module.train(training), "random directed")
        executable(programs(graph, training)[0].draft, invariants)(x)
        held.append(invariants.num_bytes)
    assert held[0] == held[1]


# --- the search ----------------------------------------------------------------------------------------------------------


def test_both_orders_are_programs_and_equal() -> None:
    module, x = Plain(dgl.nn.GraphConv(WIDTH, 4, bias=False, allow_zero_in_degree=True)), features_of("random directed")
    expected = exact(module, "random directed")
    found = programs(captured(module, "random directed"), training=True, count=20)
    orders = {order for one in found for order in one.plan.order.values()}
    assert orders == {"propagate first", "transform first"}
    assert {True, False} == {is_sparse for one in found for is_sparse in one.plan.sparse.values()}
    for one in found:
        assert_close(answer(module, on_kernels(one, x), x, False), expected, str(one.plan))


def test_a_narrow_hidden_layer_is_transformed_where_fewer_numbers_travel() -> None:
    machine = Machine(op_s=0.0)
    for width, order in ((2, "transform first"), (40, "propagate first")):
        module = Chain(width)
        search = Search(captured(module, "random symmetric"), machine, stored, training=True)
        (chosen,) = [found for key, found in search.best(1)[0].plan.order.items() if key]
        assert chosen == order


@pytest.mark.parametrize("name", ["random directed", "hub", "duplicates and loops"])
@pytest.mark.parametrize("back", ["propagate first", "transform first"])
@pytest.mark.parametrize("order", ["propagate first", "transform first"])
@pytest.mark.parametrize("norm", ["none", "both"])
def test_the_backward_has_an_order_of_its_own(order: str, back: str, norm: str, name: str) -> None:
    module, x = Chain(3, norm), features_of(name)
    graph = captured(module, name)
    search = Search(graph, Machine(), stored, training=True)
    (site,) = sites(canonical_after_messages(graph))
    found = search.rewrite(Plan(order={site.key: order}, back={site.linear.weight.index: back}))
    joined = [op for op in found.draft.ops if isinstance(op, GraphLinear)]
    assert len(joined) == (order != back)
    expected = exact(module, name)
    assert_close(answer(module, in_plain(found), x, False), expected, f"{order}, {back}, in torch")
    assert_close(answer(module, on_kernels(found, x), x, False), expected, f"{order}, {back}, on kernels")


def canonical_after_messages(graph: Any) -> Any:
    draft = canonical(graph)
    apply_all(rules_before(Plan()), draft)
    return draft


class Chain(nn.Module):
    """A hidden layer whose input is trained, then GraphConv."""

    def __init__(self, width: int, norm: str = "none") -> None:
        super().__init__()
        self.first, self.layer = (
            nn.Linear(WIDTH, 12),
            dgl.nn.GraphConv(12, width, norm=norm, bias=False, allow_zero_in_degree=True),
        )

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        return self.layer(graph, torch.tanh(self.first(x)))


def test_rewriting_takes_little_time() -> None:
    """A guard against a rule that scans too much: the bound is ten times what was measured for ten layers."""
    graph = captured(
        build_model(ModelConfig(name="gat", num_layers=10, hidden=3, heads=2), WIDTH, 3, "node"), "random directed"
    )
    began = time.perf_counter()
    programs(graph, training=True)
    assert time.perf_counter() - began < 20


class Hops(nn.Module):
    """``h = h + mean of h over the sources``, many times: each sum reads what went into the one before twice."""

    def __init__(self, count: int, is_first: bool) -> None:
        super().__init__()
        self.count, self.is_first, self.linear = count, is_first, nn.Linear(WIDTH, 4, bias=False)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        with graph.local_scope():
            h = self.linear(x) if self.is_first else x
            for _ in range(self.count):
                graph.ndata["h"] = h
                graph.update_all(fn.copy_u("h", "m"), fn.mean("m", "o"))
                h = h * 0.5 + graph.ndata["o"] * 0.5
            return h if self.is_first else self.linear(h)


@pytest.mark.parametrize("is_first", [True, False])
def test_sums_that_fan_out_are_walked_once(is_first: bool) -> None:
    """A guard against walks that double with each sum: 2^30 steps would not end."""
    module, x = Hops(30, is_first), features_of("random directed")
    graph = captured(module, "random directed")
    began = time.perf_counter()
    found = programs(graph, training=True, count=4)
    assert time.perf_counter() - began < 20
    for one in found:
        assert_close(answer(module, on_kernels(one, x), x, False), exact(module, "random directed"), str(one.plan))


def test_a_derivation_tells_rule_place_and_effect() -> None:
    found = programs(captured(MODULES["GCN"](), "random directed"), training=True)[0]
    text = "\n".join(map(str, found.steps))
    for words in ("T1 order", "graphconv.py:", "T4 scale", "T8 epilogue", "refused: input dropout"):
        assert words in text
    assert any(isinstance(op, Linear | SparseProduct) for op in found.draft.ops)
