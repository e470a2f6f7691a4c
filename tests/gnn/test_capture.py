"""Module → op graph: the same output and gradients, op by op in plain torch; what can't be recorded is named; nothing is disturbed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from graphs import WEIRD, adjacency
from torch import Tensor, nn
from torch.nn import functional as F

from runner.errors import CaptureError
from runner.gnn.capture import capture
from runner.gnn.dgl_compat import import_dgl
from runner.gnn.models import build_model
from runner.kernels.lower import Executable
from runner.kernels.opgraph import Aggregate, Call, OpGraph
from runner.schema import ModelConfig

dgl = import_dgl()
fn = dgl.function
WIDTH = 6
MODELS = [
    ModelConfig(name="gcn"),
    ModelConfig(name="gcn", norm="batch", residual=True, num_layers=3),
    ModelConfig(name="sage", norm="layer"),
    ModelConfig(name="sage", aggregator="pool"),
    ModelConfig(name="gin", norm="batch", learn_eps=True),
    ModelConfig(name="sgc"),
    ModelConfig(name="gat", heads=2, attention_dropout=0.3, input_dropout=0.2),
    ModelConfig(name="gatv2", heads=2),
    ModelConfig(name="appnp"),
]


def graph_of(name: str) -> Any:
    src, dst, num_nodes = WEIRD[name]
    graph = dgl.graph((src, dst), num_nodes=num_nodes)
    graph.edata["weight"] = torch.rand(len(src), generator=torch.Generator().manual_seed(5)) + 0.1
    return graph


def features_of(name: str) -> Tensor:
    return torch.randn(WEIRD[name][2], WIDTH, generator=torch.Generator().manual_seed(7))


def record(module: nn.Module, name: str = "random directed") -> OpGraph:
    return capture(module, graph_of(name), features_of(name), adjacency(WEIRD[name]))


def outcome(
    module: nn.Module, forward: Callable[[Tensor], Tensor], features: Tensor
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Output, gradients and buffers after one seeded step; the buffers are put back."""
    before = [buffer.clone() for buffer in module.buffers()]
    torch.manual_seed(11)
    module.zero_grad()
    output = forward(features)
    output.sin().sum().backward()
    gradients = [
        torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for parameter in module.parameters()
    ]
    after = [buffer.clone() for buffer in module.buffers()]
    with torch.no_grad():
        for buffer, value in zip(module.buffers(), before, strict=True):
            buffer.copy_(value)
    return output.detach(), gradients, after


def assert_same(module: nn.Module, name: str) -> OpGraph:
    graph, features = graph_of(name), features_of(name)
    recorded = capture(module, graph, features, adjacency(WEIRD[name]))
    expected = outcome(module, lambda x: module(graph, x), features)
    found = outcome(module, Executable(recorded), features)
    assert torch.allclose(found[0], expected[0], rtol=1e-4, atol=1e-5)
    largest = max((float(gradient.abs().max()) for gradient in expected[1]), default=0.0)
    for mine, other in zip(found[1], expected[1], strict=True):
        assert torch.allclose(mine, other, rtol=1e-4, atol=1e-5 * max(largest, 1))
    for mine, other in zip(found[2], expected[2], strict=True):
        assert torch.allclose(mine, other, rtol=1e-4, atol=1e-6), "buffers move alike"
    return recorded


@pytest.mark.parametrize("name", [name for name in WEIRD if name not in ("one node, no edge", "one loop")])
@pytest.mark.parametrize("config", MODELS, ids=lambda config: f"{config.name}-{config.norm}-{config.aggregator}")
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_the_runners_models_on_weird_graphs(config: ModelConfig, name: str, training: bool) -> None:
    if name == "no edges" and config.name in ("gat", "gatv2"):
        pytest.skip("DGL's own attention fails on a graph without edges")
    if name == "no edges" and config.aggregator == "pool":
        pytest.skip("DGL's maximum over no edges sends a gradient to a node")
    torch.manual_seed(0)
    assert_same(build_model(config, WIDTH, 3, "node").train(training), name)


@pytest.mark.parametrize("name", ["gcn", "sage", "gin", "sgc", "appnp"])
def test_edge_weights_and_their_normalisation_are_constants(name: str) -> None:
    torch.manual_seed(0)
    model = build_model(ModelConfig(name=name, edge_weight=True), WIDTH, 3, "node")
    recorded = assert_same(model, "random directed")
    sums = [op for op in recorded.ops if isinstance(op, Aggregate)]
    assert sums
    for op in sums:
        weights = [operand.ref for operand in op.operands if operand.target == "e"]
        assert all(ref.index in recorded.constants for ref in weights)


CONV = dgl.nn
STOCK: dict[str, Callable[[], nn.Module]] = {
    "GraphConv right": lambda: CONV.GraphConv(WIDTH, 4, norm="right", allow_zero_in_degree=True),
    "GraphConv left": lambda: CONV.GraphConv(WIDTH, 4, norm="left", allow_zero_in_degree=True),
    "GraphConv none": lambda: CONV.GraphConv(WIDTH, 9, norm="none", allow_zero_in_degree=True),
    "SAGEConv gcn": lambda: CONV.SAGEConv(WIDTH, 4, "gcn"),
    "TAGConv": lambda: CONV.TAGConv(WIDTH, 4),
    "EdgeConv": lambda: CONV.EdgeConv(WIDTH, 4, allow_zero_in_degree=True),
    "GINConv max": lambda: CONV.GINConv(nn.Linear(WIDTH, 4), "max"),
    "DotGatConv": lambda: CONV.DotGatConv(WIDTH, 4, 2, allow_zero_in_degree=True),
    "AGNNConv": lambda: CONV.AGNNConv(allow_zero_in_degree=True),
}


class Homogeneous(nn.Module):
    """Flattens the heads of a stock layer and gives one with no parameters something to train."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.scale = layer, nn.Parameter(torch.ones(WIDTH))

    def forward(self, graph: Any, features: Tensor) -> Tensor:
        return self.layer(graph, features * self.scale).flatten(1)


@pytest.mark.parametrize("name", STOCK)
def test_stock_layers(name: str) -> None:
    torch.manual_seed(0)
    assert_same(Homogeneous(STOCK[name]()), "random directed")


class Handwritten(nn.Module):
    """Base for modules written with DGL's built-in functions."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 4)


class MaxOfGated(Handwritten):
    def forward(self, graph: Any, features: Tensor) -> Tensor:
        with graph.local_scope():
            graph.ndata["h"] = self.linear(features)
            graph.apply_edges(fn.u_sub_v("h", "h", "d"))
            graph.edata["g"] = torch.sigmoid(graph.edata["d"])
            graph.update_all(fn.u_mul_e("h", "g", "m"), fn.max("m", "o"))
            return graph.ndata["o"] + features[:, :4]


class DegreesAndStack(Handwritten):
    def forward(self, graph: Any, features: Tensor) -> Tensor:
        h = self.linear(features)
        degree = torch.log1p(graph.in_degrees().to(h)).unsqueeze(1)
        graph.ndata["h"] = h / (1 + degree)
        graph.update_all(fn.copy_u("h", "m"), fn.min("m", "o"))
        return torch.cat([graph.ndata.pop("o"), h * degree], 1).relu_()


class TwoOutputs(Handwritten):
    def forward(self, graph: Any, features: Tensor) -> Tensor:
        one, two = self.linear(features).split(2, dim=1)
        values, _ = torch.max(one, dim=1, keepdim=True)
        return two * values


class FrozenAndShared(Handwritten):
    def __init__(self) -> None:
        super().__init__()
        self.linear.weight.requires_grad_(False)
        self.twice = nn.Linear(4, 4)

    def forward(self, graph: Any, features: Tensor) -> Tensor:
        return self.twice(F.elu(self.twice(self.linear(features))))


class EdgesEqualNodes(Handwritten):
    def forward(self, graph: Any, features: Tensor) -> Tensor:
        h = self.linear(features)
        with graph.local_scope():
            graph.ndata["h"] = h
            graph.apply_edges(fn.u_dot_v("h", "h", "a"))
            weight = dgl.nn.functional.edge_softmax(graph, graph.edata["a"])
            graph.edata["w"] = F.dropout(weight, 0.4, self.training)
            graph.update_all(fn.u_mul_e("h", "w", "m"), fn.sum("m", "o"))
            return graph.ndata["o"]


@pytest.mark.parametrize("cls", [MaxOfGated, DegreesAndStack, TwoOutputs, FrozenAndShared, EdgesEqualNodes])
@pytest.mark.parametrize("name", ["random directed", "duplicates and loops", "as many edges as nodes"])
def test_handwritten_modules(cls: type[nn.Module], name: str) -> None:
    torch.manual_seed(0)
    assert_same(cls(), name)


def test_dropout_on_a_constant_is_drawn_anew_each_time() -> None:
    class DropsEdges(Handwritten):
        def forward(self, graph: Any, features: Tensor) -> Tensor:
            graph.ndata["h"] = self.linear(features)
            graph.edata["w"] = F.dropout(torch.ones(graph.num_edges(), 1), 0.5, self.training)
            graph.update_all(fn.u_mul_e("h", "w", "m"), fn.sum("m", "o"))
            return graph.ndata.pop("o")

    recorded = assert_same(DropsEdges(), "random directed")
    executable, features = Executable(recorded), features_of("random directed")
    assert not torch.equal(executable(features), executable(features))


class Branches(Handwritten):
    def forward(self, graph: Any, features: Tensor) -> Tensor:
        h = self.linear(features)
        return h if h.sum() > 0 else -h


class Draws(Handwritten):
    def forward(self, graph: Any, features: Tensor) -> Tensor:
        return self.linear(features) + torch.rand(1)


class UserFunction(Handwritten):
    def forward(self, graph: Any, features: Tensor) -> Tensor:
        graph.ndata["h"] = self.linear(features)
        graph.update_all(lambda edges: {"m": edges.src["h"]}, fn.sum("m", "o"))
        return graph.ndata.pop("o")


class UserReduction(Handwritten):
    """Mean, largest and spread of the messages, scaled by the degree, as PNA does."""

    def forward(self, graph: Any, features: Tensor) -> Tensor:
        def reduce(nodes: Any) -> dict[str, Tensor]:
            mailbox = nodes.mailbox["m"]
            centred = mailbox - torch.mean(mailbox, dim=1, keepdim=True)
            spread = torch.mean(centred * centred, dim=1) * np.log(mailbox.size(1) + 1)
            return {"o": torch.cat([torch.max(mailbox, dim=1)[0], spread, mailbox.sum(dim=1) / mailbox.shape[1]], 1)}

        graph.ndata["h"] = self.linear(features)
        graph.update_all(lambda edges: {"m": edges.src["h"] * edges.dst["h"]}, reduce)
        return graph.ndata.pop("o")


class FunctionOfEdges(Handwritten):
    def forward(self, graph: Any, features: Tensor) -> Tensor:
        graph.ndata["h"] = self.linear(features)
        graph.apply_edges(lambda edges: {"g": torch.tanh(edges.src["h"] - edges.dst["h"])})
        graph.update_all(fn.u_mul_e("h", "g", "m"), lambda nodes: {"o": nodes.mailbox["m"].sum(dim=1)})
        return graph.ndata.pop("o")


@pytest.mark.parametrize("cls", [UserFunction, UserReduction, FunctionOfEdges])
@pytest.mark.parametrize(
    "name", ["random directed", "duplicates and loops", "isolated nodes", "as many edges as nodes"]
)
def test_python_functions_over_edges_and_mailboxes(cls: type[nn.Module], name: str) -> None:
    torch.manual_seed(0)
    assert_same(cls(), name)


class TakesTheMedian(Handwritten):
    def forward(self, graph: Any, features: Tensor) -> Tensor:
        graph.ndata["h"] = self.linear(features)
        graph.update_all(fn.copy_u("h", "m"), lambda nodes: {"o": nodes.mailbox["m"].median(1)[0]})
        return graph.ndata.pop("o")


class BranchesOnTheDegree(Handwritten):
    def forward(self, graph: Any, features: Tensor) -> Tensor:
        graph.ndata["h"] = self.linear(features)
        graph.update_all(
            fn.copy_u("h", "m"),
            lambda nodes: {"o": nodes.mailbox["m"].sum(1) * (2 if nodes.mailbox["m"].size(1) else 1)},
        )
        return graph.ndata.pop("o")


class SumsFeatures(Handwritten):
    def forward(self, graph: Any, features: Tensor) -> Tensor:
        graph.ndata["h"] = self.linear(features)
        graph.update_all(fn.copy_u("h", "m"), lambda nodes: {"o": nodes.mailbox["m"].sum(2).sum(1, keepdim=True)})
        return graph.ndata.pop("o")


class OnAnotherGraph(Handwritten):
    def forward(self, graph: Any, features: Tensor) -> Tensor:
        turned = dgl.reverse(graph)
        turned.ndata["h"] = self.linear(features)
        turned.update_all(fn.copy_u("h", "m"), fn.sum("m", "o"))
        return turned.ndata["o"] * 2


class AddsLoops(Handwritten):
    def forward(self, graph: Any, features: Tensor) -> Tensor:
        looped = dgl.add_self_loop(graph)
        looped.ndata["h"] = self.linear(features)
        looped.update_all(fn.copy_u("h", "m"), fn.sum("m", "o"))
        return looped.ndata["o"]


class OnAnotherGraphUnseen(Handwritten):
    """Without gradients nothing gives the result away but the door it came through."""

    def forward(self, graph: Any, features: Tensor) -> Tensor:
        h = self.linear(features)
        with torch.no_grad():
            mean = dgl.ops.copy_u_mean(dgl.reverse(graph), h)
        return h + mean


class ReadsOut(Handwritten):
    def forward(self, graph: Any, features: Tensor) -> Tensor:
        graph.ndata["h"] = self.linear(features)
        with torch.no_grad():
            return graph.ndata["h"] + dgl.mean_nodes(graph, "h")


class SetsColumn(Handwritten):
    def forward(self, graph: Any, features: Tensor) -> Tensor:
        h = self.linear(features)
        h[:, 0] = features[:, 0]
        return h


class ChangesView(Handwritten):
    def forward(self, graph: Any, features: Tensor) -> Tensor:
        h = self.linear(features)
        h[:, 0].mul_(3)
        return h


class FillsConstant(Handwritten):
    def forward(self, graph: Any, features: Tensor) -> Tensor:
        out = torch.zeros(features.shape[0], 4)
        out[:, :] = self.linear(features)
        return out


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return -gradients[0]


class OwnBackward(Handwritten):
    def forward(self, graph: Any, features: Tensor) -> Tensor:
        out: Tensor = Doubled.apply(self.linear(features))
        return out


class KeepsState(Handwritten):
    def forward(self, graph: Any, features: Tensor) -> Tensor:
        h = self.linear(features)
        self.last = getattr(self, "last", 0) * 0.5 + h.detach()
        return h + self.last


class CountsPositives(Handwritten):
    def forward(self, graph: Any, features: Tensor) -> Tensor:
        h = self.linear(features)
        return h / (h > 0).nonzero().shape[0]


class PicksByMask(Handwritten):
    def forward(self, graph: Any, features: Tensor) -> Tensor:
        h = self.linear(features)
        return h + h[h > 0].mean()


class ThroughNumpy(Handwritten):
    def forward(self, graph: Any, features: Tensor) -> Tensor:
        h = self.linear(features)
        return h + float(h.detach().numpy().mean())


class ReturnsTwo(Handwritten):
    def forward(self, graph: Any, features: Tensor) -> Any:
        return self.linear(features), features


@pytest.mark.parametrize(
    ("cls", "words"),
    [
        (Branches, "test_capture.py:.* reads the values"),
        (Draws, "test_capture.py:.* rand draws random numbers"),
        (TakesTheMedian, "test_capture.py:.* median of a mailbox is neither a reduction nor element by element"),
        (BranchesOnTheDegree, "test_capture.py:.* the in-degree as one number"),
        (SumsFeatures, "test_capture.py:.* sum of a mailbox over dimension 2"),
        (OnAnotherGraph, "test_capture.py:.* outside update_all"),
        (AddsLoops, "test_capture.py:.* outside update_all"),
        (OnAnotherGraphUnseen, "test_capture.py:.* outside update_all"),
        (ReadsOut, "test_capture.py:.* outside update_all"),
        (SetsColumn, "test_capture.py:.* changes a tensor in place"),
        (ChangesView, "test_capture.py:.* changes a tensor in place"),
        (FillsConstant, "test_capture.py:.* changes a tensor in place"),
        (OwnBackward, "test_capture.py:.* the autograd function 'Doubled'"),
        (KeepsState, "keeps state between calls in 'last'"),
        (CountsPositives, "the shape of nonzero's result depends"),
        (PicksByMask, "the shape of __getitem__'s result depends"),
        (ThroughNumpy, "numpy reads the values"),
        (ReturnsTwo, "must return one tensor"),
    ],
)
def test_what_can_not_be_recorded_is_named_with_its_place(cls: type[nn.Module], words: str) -> None:
    with pytest.raises(CaptureError, match=words):
        record(cls())


@pytest.mark.parametrize("cls", [EdgesEqualNodes, Branches, UserFunction])
def test_nothing_is_left_changed_even_after_an_error(cls: type[nn.Module]) -> None:
    module, graph = nn.ModuleDict({"m": cls()}), graph_of("random directed")
    norm = nn.BatchNorm1d(4)

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.norm = module["m"], norm

        def forward(self, graph: Any, features: Tensor) -> Tensor:
            return self.norm(self.inner(graph, features))

    whole = Normed().train()
    softmax = sys.modules["dgl.ops.edge_softmax"].edge_softmax_internal
    before = {name: value.clone() for name, value in whole.state_dict().items()}
    rng, frames = torch.random.get_rng_state(), (dict(graph.ndata), dict(graph.edata))
    try:
        capture(whole, graph, features_of("random directed"), adjacency(WEIRD["random directed"]))
    except CaptureError:
        assert cls is not EdgesEqualNodes
    assert whole.training
    assert all(torch.equal(value, before[name]) for name, value in whole.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), rng)
    assert sys.modules["dgl.ops.edge_softmax"].edge_softmax_internal is softmax
    assert (list(dict(graph.ndata)), list(dict(graph.edata))) == (list(frames[0]), list(frames[1]))
    assert all(parameter.grad is None for parameter in whole.parameters())


def test_the_op_graph_prints_what_it_is() -> None:
    text = str(record(build_model(ModelConfig(name="gcn"), WIDTH, 3, "node")))
    assert "copy_u → sum" in text
    assert "parameter layers.0.weight" in text
    assert "graphconv.py:" in text
    assert text.splitlines()[-1].startswith("return %")


class WithoutGradients(Handwritten):
    """Part of it under no_grad: executed with gradients it would train differently."""

    def forward(self, graph: Any, features: Tensor) -> Tensor:
        h = self.linear(features)
        with torch.no_grad():
            scale = h.abs().mean()
        return h / scale + h.detach()


class DropsInVain(Handwritten):
    """A dropout whose result nobody reads still moves the random state on."""

    def forward(self, graph: Any, features: Tensor) -> Tensor:
        F.dropout(features, 0.5)
        return F.dropout(self.linear(features), 0.5)


class OwnBuffer(Handwritten):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, graph: Any, features: Tensor) -> Tensor:
        h = self.linear(features)
        with torch.no_grad():
            self.mean.lerp_(h.mean(0), 0.1)
        return h - self.mean


@pytest.mark.parametrize("cls", [WithoutGradients, DropsInVain, OwnBuffer])
def test_gradient_mode_random_state_and_buffers_are_part_of_the_record(cls: type[nn.Module]) -> None:
    torch.manual_seed(0)
    assert_same(cls(), "random directed")


def test_dead_ops_are_dropped_and_values_freed() -> None:
    class Wasteful(Handwritten):
        def forward(self, graph: Any, features: Tensor) -> Tensor:
            _ = self.linear(features).exp().sum()
            return self.linear(features)

    recorded = record(Wasteful())
    assert [op.label for op in recorded.ops if isinstance(op, Call)] == ["linear"]
