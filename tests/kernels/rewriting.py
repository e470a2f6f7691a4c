"""Modules for the tests of rewriting, and how a rewritten program is compared with the module that it came from."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from graphs import WEIRD, adjacency
from torch import Tensor, nn
from torch.nn import functional as F

from runner.gnn.capture import capture
from runner.gnn.dgl_compat import import_dgl
from runner.gnn.models import build_model
from runner.kernels.fused.invariants import Invariants
from runner.kernels.fused.lower import executable
from runner.kernels.lower import Executable
from runner.kernels.opgraph import OpGraph, Ref
from runner.kernels.rewrite.cost import Machine
from runner.kernels.rewrite.draft import Draft
from runner.kernels.rewrite.search import Rewritten, Search
from runner.kernels.seeds import seeded_dropouts
from runner.schema import ModelConfig

dgl = import_dgl()
fn, CONV = dgl.function, dgl.nn
WIDTH, NUM_TYPES = 6, 3


class OnEdges(nn.Module):
    """A stock layer that also takes a value an edge: float [E, width], or types."""

    def __init__(self, layer: nn.Module, width: int = 0, norm: bool = False) -> None:
        super().__init__()
        self.layer, self.width, self.norm = layer, width, norm

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        number = torch.arange(graph.num_edges())
        if self.width:
            values = torch.sin(number.unsqueeze(1) * torch.linspace(0.3, 2.1, self.width)).to(x.dtype)
            return self.layer(graph, x, values).flatten(1)
        norm = 1 / (1.0 + number % 4).unsqueeze(1).to(x.dtype) if self.norm else None
        return self.layer(graph, x, number * 7 % NUM_TYPES, norm)


class Plain(nn.Module):
    """A stock layer of a graph and features, heads side by side."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        return self.layer(graph, x).flatten(1)


class Gated(nn.Module):
    """Residual gated convolution, by hand: ``sum of sigmoid(k_j + q_i) · v_j``."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(WIDTH, 5) for _ in range(3))

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        with graph.local_scope():
            graph.ndata["k"], graph.ndata["q"], graph.ndata["v"] = self.key(x), self.query(x), self.value(x)
            graph.apply_edges(fn.u_add_v("k", "q", "e"))
            graph.edata["g"] = torch.sigmoid(graph.edata["e"])
            graph.update_all(fn.u_mul_e("v", "g", "m"), fn.sum("m", "o"))
            return graph.ndata["o"]


class EdgeMlp(nn.Module):
    """EdgeConv with a two-layer MLP on ``x_i ‖ x_j``, by hand, with Python functions: only the first layer can move."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2 * WIDTH, 5), nn.Linear(5, 4)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        def message(edges: Any) -> dict[str, Tensor]:
            return {"m": self.second(F.relu(self.first(torch.cat([edges.dst["h"], edges.src["h"]], 1))))}

        with graph.local_scope():
            graph.ndata["h"] = x
            graph.update_all(message, fn.max("m", "o"))
            return graph.ndata["o"]


class Residuals(nn.Module):
    """Two propagations by hand, with a skip, a norm and a mean of what goes in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.outer = (
            nn.Linear(WIDTH, WIDTH, bias=False),
            nn.BatchNorm1d(WIDTH),
            nn.Linear(2 * WIDTH, 3),
        )

    def propagate(self, graph: Any, x: Tensor, reduce: Any) -> Tensor:
        with graph.local_scope():
            graph.ndata["h"] = x
            graph.update_all(fn.copy_u("h", "m"), reduce("m", "o"))
            return graph.ndata["o"]

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        h = torch.relu(self.norm(self.propagate(graph, self.inner(x), fn.mean))) + x
        return self.outer(torch.cat([h, self.propagate(graph, h, fn.sum) * 0.5], 1))


SCALERS = ("identity", "amplification", "attenuation")
LOOSE = {"allow_zero_in_degree": True}
MODULES: dict[str, Callable[[], nn.Module]] = {
    **{f"GraphConv {norm}": lambda norm=norm: Plain(CONV.GraphConv(WIDTH, 4, norm=norm, **LOOSE))
       for norm in ("both", "right", "left", "none")},
    "GraphConv wide": lambda: Plain(CONV.GraphConv(WIDTH, 9, **LOOSE)),
    **{f"SAGEConv {kind}": lambda kind=kind: Plain(CONV.SAGEConv(WIDTH, 4, kind, 0.3)) for kind in ("mean", "gcn", "pool")},
    "GINConv": lambda: Plain(CONV.GINConv(nn.Sequential(nn.Linear(WIDTH, 5), nn.ReLU(), nn.Linear(5, 4)), "sum", learn_eps=True)),
    "GINConv max": lambda: Plain(CONV.GINConv(nn.Linear(WIDTH, 4), "max")),
    "GATConv": lambda: Plain(CONV.GATConv(WIDTH, 3, 2, 0.2, 0.3, residual=True, **LOOSE)),
    "GATv2Conv": lambda: Plain(CONV.GATv2Conv(WIDTH, 3, 2, 0.2, 0.3, **LOOSE)),
    "DotGatConv": lambda: Plain(CONV.DotGatConv(WIDTH, 4, 2, **LOOSE)),
    "EdgeConv": lambda: Plain(CONV.EdgeConv(WIDTH, 4, **LOOSE)),
    "EdgeConv norm": lambda: Plain(CONV.EdgeConv(WIDTH, 4, batch_norm=True, **LOOSE)),
    "GMMConv": lambda: OnEdges(CONV.GMMConv(WIDTH, 5, 2, 3, "mean", **LOOSE), 2),
    "EdgeGATConv": lambda: OnEdges(CONV.EdgeGATConv(WIDTH, 4, 3, 2, **LOOSE), 4),
    "CFConv": lambda: OnEdges(CONV.CFConv(WIDTH, 4, 7, 5), 4),
    "NNConv": lambda: OnEdges(CONV.NNConv(WIDTH, 3, nn.Linear(4, WIDTH * 3), "mean"), 4),
    "TAGConv": lambda: Plain(CONV.TAGConv(WIDTH, 4)),
    "SGConv": lambda: Plain(CONV.SGConv(WIDTH, 4, 2, **LOOSE)),
    "PNAConv": lambda: Plain(CONV.PNAConv(WIDTH, 4, ["mean", "max", "min", "sum", "var"], [*SCALERS], 1.5)),
    "RelGraphConv": lambda: OnEdges(CONV.RelGraphConv(WIDTH, 4, NUM_TYPES), norm=True),
    "RelGraphConv basis": lambda: OnEdges(CONV.RelGraphConv(WIDTH, 8, NUM_TYPES, "basis", 2)),
    "RelGraphConv bdd": lambda: OnEdges(CONV.RelGraphConv(WIDTH, 4, NUM_TYPES, "bdd", 2)),
    "APPNP": lambda: build_model(ModelConfig(name="appnp", hidden=5), WIDTH, 3, "node"),
    "GCN": lambda: build_model(ModelConfig(name="gcn", input_dropout=0.3, norm="layer", num_layers=3), WIDTH, 3, "node"),
    "SAGE": lambda: build_model(ModelConfig(name="sage", hidden=7), WIDTH, 3, "node"),
    "GIN": lambda: build_model(ModelConfig(name="gin", hidden=7, learn_eps=True, residual=True), WIDTH, 3, "node"),
    "GAT": lambda: build_model(ModelConfig(name="gat", hidden=3, heads=2, activation="elu", attention_dropout=0.3), WIDTH, 3, "node"),
    "GATv2": lambda: build_model(ModelConfig(name="gatv2", hidden=3, heads=2), WIDTH, 3, "node"),
    "MoNet": lambda: build_model(ModelConfig(name="monet", hidden=5), WIDTH, 3, "node"),
    "EdgeNet": lambda: build_model(ModelConfig(name="edgeconv", hidden=5), WIDTH, 3, "node"),
    "gated": Gated,
    "edge MLP": EdgeMlp,
    "residuals": Residuals,
}  # fmt: skip


def graph_of(name: str) -> Any:
    src, dst, num_nodes = WEIRD[name]
    return dgl.graph((src, dst), num_nodes=num_nodes)


def features_of(name: str) -> Tensor:
    """Mostly 0, so that sparse products have something to leave out."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(WEIRD[name][2], WIDTH, generator=generator)
    return x * (torch.rand(x.shape, generator=generator) < 0.6)


def captured(module: nn.Module, name: str) -> OpGraph:
    return capture(module, graph_of(name), features_of(name), adjacency(WEIRD[name]))


def stored(draft: Draft, ref: Ref) -> float:
    """As if a quarter of every fixed value were stored."""
    shape = draft.value(ref).shape
    return 0.25 * shape[0] * (shape[1] if len(shape) > 1 else 1)


def programs(graph: OpGraph, training: bool, count: int = 4, without: frozenset[str] = frozenset()) -> list[Rewritten]:
    return Search(graph, Machine(), stored, training, without).best(count)


def answer(module: nn.Module, forward: Callable[[Tensor], Tensor], x: Tensor, seeded: bool) -> list[Tensor]:
    """Output, gradients of the parameters, and buffers after a step; buffers and gradients are left as they were."""
    before = [buffer.clone() for buffer in module.buffers()]
    torch.manual_seed(11)
    with seeded_dropouts() if seeded else nullcontext():
        output = forward(x)
    parameters = list(module.parameters())
    gradients = torch.autograd.grad(output.sin().sum(), parameters, allow_unused=True)
    after = [buffer.clone() for buffer in module.buffers()]
    with torch.no_grad():
        for buffer, value in zip(module.buffers(), before, strict=True):
            buffer.copy_(value)
    filled = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)]
    return [output.detach(), *filled, *(value for value in after if value.is_floating_point())]


def exact(module: nn.Module, name: str) -> list[Tensor]:
    """The module's answer in fp64, by DGL; in fp32 where a layer has constants of its own in that."""
    graph, x = graph_of(name), features_of(name)
    if any(isinstance(part, CONV.APPNPConv) for part in module.modules()):
        return answer(module, lambda x: module(graph, x), x, seeded=True)
    twin = copy.deepcopy(module).double()
    return answer(twin, lambda x: twin(graph, x), x.double(), seeded=True)


def assert_close(found: list[Tensor], expected: list[Tensor], what: str) -> None:
    """Within 1e-5 of the largest entry (gradients: of any gradient's)."""
    largest = max((float(entry.abs().max()) for entry in expected[1:] if entry.numel()), default=0.0)
    for number, (mine, right) in enumerate(zip(found, expected, strict=True)):
        assert mine.shape == right.shape, what
        if right.numel():
            scale = max(float(right.abs().max()), largest if number else 0.0, 1e-3)
            off = float((mine.double() - right.double()).abs().max())
            assert off <= 2e-5 * scale, (
                f"{what}: {'output' if not number else f'gradient or buffer {number}'} is off by {off / scale:.1e}"
            )


def in_plain(found: Rewritten) -> Executable:
    """A rewritten program in plain torch."""
    return Executable(found.draft.finish())


def on_kernels(found: Rewritten, x: Tensor) -> Callable[[Tensor], Tensor]:
    """A rewritten program on kernels."""
    invariants = Invariants()
    invariants.follow(x)
    return executable(found.draft, invariants)
