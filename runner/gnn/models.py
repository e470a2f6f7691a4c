"""The models, each a plain DGL module: ``model(graph, features) -> logits``.

``graph`` is a DGLGraph, or a list of sampled blocks, one a message-passing layer. For graph classification it is a batch of
graphs and a readout follows.

Legend: N nodes, F features, H heads, C channels a head, K classes, G graphs of a batch.
"""

from __future__ import annotations

import importlib
import os
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from runner.errors import ConfigError, suggestion
from runner.gnn.dgl_compat import import_dgl
from runner.gnn.edge_models import EdgeNet, MoNet
from runner.gnn.layers import ACTIVATIONS, graphs_of, norm_of
from runner.schema import ModelConfig

ALLOWED_PACKAGES = "GEARSAIL_MODEL_PACKAGES"


def build_model(config: ModelConfig, num_features: int, num_classes: int, task: str) -> nn.Module:
    """Build the module that ``config`` names.

    Args:
        config: architecture and sizes.
        num_features: F.
        num_classes: K.
        task: ``node`` or ``graph``.

    Returns:
        A module with ``forward(graph, features [N, F]) -> [N, K]``, or ``[G, K]`` for graphs.

    Raises:
        ConfigError: for a custom module that is not allowed, not there, or not an ``nn.Module``.
    """
    if config.name == "custom":
        return _build_custom(config, num_features, num_classes)
    if task == "graph":
        return (GraphGIN if config.name == "gin" else GraphGCN)(config, num_features, num_classes)
    match config.name:
        case "sgc":
            return SGC(config, num_features, num_classes)
        case "appnp":
            return APPNP(config, num_features, num_classes)
        case "monet":
            return MoNet(config, num_features, num_classes)
        case "edgeconv":
            return EdgeNet(config, num_features, num_classes)
    return StackedNet(config, num_features, num_classes)


def _build_custom(config: ModelConfig, num_features: int, num_classes: int) -> nn.Module:
    target = config.target or ""
    module_name, colon, class_name = target.partition(":")
    if not colon or not module_name or not class_name:
        raise ConfigError(f"model.target={target}: must be package.module:Class")
    allowed = [name.strip() for name in os.environ.get(ALLOWED_PACKAGES, "").split(",") if name.strip()]
    if module_name.split(".")[0] not in allowed:
        raise ConfigError(
            f"model.target={target}: importing runs code, so its package must be listed in the environment: "
            f"{ALLOWED_PACKAGES}={module_name.split('.')[0]} (now: {', '.join(allowed) or 'empty'})"
        )
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # a console script has not, what `python -m` has: the user's own folder
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"model.target={target}: {error}") from error
    cls = getattr(module, class_name, None)
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        modules = [
            name for name, value in vars(module).items() if isinstance(value, type) and issubclass(value, nn.Module)
        ]
        raise ConfigError(f"model.target={target}: no torch module of that name; {suggestion(class_name, modules)}")
    try:
        built: nn.Module = cls(num_features, num_classes, **config.kwargs)
    except TypeError as error:
        raise ConfigError(
            f"model.target={target}: {class_name}(num_features, num_classes, **model.kwargs) failed: {error}"
        ) from error
    return built


def _weight(graph: Any, used: bool) -> Tensor | None:
    return graph.edata["weight"] if used else None


class MLP(nn.Module):
    """Linear layers with normalisation and activation between them: ``[N, in] -> [N, out]``."""

    def __init__(self, widths: list[int], norm: str, activation: str) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.norms = nn.ModuleList(norm_of(norm, width) for width in widths[1:-1])
        self.activation = ACTIVATIONS[activation]

    def forward(self, h: Tensor) -> Tensor:
        for linear, norm in zip(self.linears, self.norms, strict=False):
            h = self.activation(norm(linear(h)))
        out: Tensor = self.linears[-1](h)
        return out


class StackedNet(nn.Module):
    """GCN, GraphSAGE, GIN, GAT, GATv2: ``dgl.nn`` layers with normalisation, activation, dropout and residuals between them.

    Source: arXiv 1609.02907, 1706.02216, 1810.00826, 1710.10903, 2105.14491.
    """

    def __init__(self, config: ModelConfig, num_features: int, num_outputs: int) -> None:
        super().__init__()
        self.config = config
        self.layers, self.norms = nn.ModuleList(), nn.ModuleList()
        width = num_features
        for index in range(config.num_layers):
            is_last = index == config.num_layers - 1
            layer, out = _make_layer(config, width, num_outputs if is_last else config.hidden, is_last)
            self.layers.append(layer)
            if not is_last:
                self.norms.append(norm_of(config.norm, out))
            width = out
        self.input_dropout, self.dropout = nn.Dropout(config.input_dropout), nn.Dropout(config.dropout)
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, graph: Any, features: Tensor) -> Tensor:
        graphs = graphs_of(graph, len(self.layers))
        h = self.input_dropout(features)
        for layer, norm, block in zip(self.layers, self.norms, graphs, strict=False):
            out = self._convolve(layer, block, h).flatten(1)
            if self.config.residual and out.shape[1] == h.shape[1]:
                out = out + h[: out.shape[0]]
            h = self.dropout(self.activation(norm(out)))
        out = self._convolve(self.layers[-1], graphs[-1], h)
        return out.mean(1) if out.dim() == 3 else out

    def _convolve(self, layer: nn.Module, graph: Any, h: Tensor) -> Tensor:
        out: Tensor = layer(graph, h, edge_weight=_weight(graph, True)) if self.config.edge_weight else layer(graph, h)
        return out


def _make_layer(config: ModelConfig, width: int, out: int, is_last: bool) -> tuple[nn.Module, int]:
    """Return one DGL layer and the width of its output with the heads side by side."""
    conv = import_dgl().nn
    match config.name:
        case "gcn":
            return conv.GraphConv(width, out, bias=config.bias, allow_zero_in_degree=True), out
        case "sage":
            return conv.SAGEConv(width, out, config.aggregator, bias=config.bias), out
        case "gin":
            widths = [width, *[config.hidden] * (config.mlp_layers - 1), out]
            return conv.GINConv(MLP(widths, config.norm, config.activation), "sum", learn_eps=config.learn_eps), out
    heads = config.out_heads if is_last else config.heads
    cls = conv.GATConv if config.name == "gat" else conv.GATv2Conv
    layer = cls(width, out, heads, attn_drop=config.attention_dropout, bias=config.bias, allow_zero_in_degree=True)
    return layer, out * heads


class SGC(nn.Module):
    """Simple graph convolution: k propagations, then one linear layer. Source: arXiv 1902.07153."""

    def __init__(self, config: ModelConfig, num_features: int, num_outputs: int) -> None:
        super().__init__()
        self.edge_weight = config.edge_weight
        self.input_dropout = nn.Dropout(config.input_dropout)
        self.layer = import_dgl().nn.SGConv(
            num_features, num_outputs, k=config.num_hops, bias=config.bias, allow_zero_in_degree=True
        )

    def forward(self, graph: Any, features: Tensor) -> Tensor:
        out: Tensor = self.layer(graph, self.input_dropout(features), _weight(graph, self.edge_weight))
        return out


class APPNP(nn.Module):
    """An MLP, then personalised-PageRank propagation of its logits. Source: arXiv 1810.05997."""

    def __init__(self, config: ModelConfig, num_features: int, num_outputs: int) -> None:
        super().__init__()
        widths = [num_features, *[config.hidden] * (config.num_layers - 1), num_outputs]
        self.edge_weight = config.edge_weight
        self.linears = nn.ModuleList(nn.Linear(a, b, bias=config.bias) for a, b in pairwise(widths))
        self.norms = nn.ModuleList(norm_of(config.norm, width) for width in widths[1:-1])
        self.input_dropout, self.dropout = nn.Dropout(config.input_dropout), nn.Dropout(config.dropout)
        self.activation = ACTIVATIONS[config.activation]
        self.propagate = import_dgl().nn.APPNPConv(config.num_hops, config.alpha)

    def forward(self, graph: Any, features: Tensor) -> Tensor:
        h = self.input_dropout(features)
        for linear, norm in zip(self.linears, self.norms, strict=False):
            h = self.dropout(self.activation(norm(linear(h))))
        out: Tensor = self.propagate(graph, self.linears[-1](h), _weight(graph, self.edge_weight))
        return out


class _Readout(nn.Module):
    """Sum, mean or maximum over the nodes of each graph: ``[N, F] -> [G, F]``."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, graph: Any, h: Tensor) -> Tensor:
        with graph.local_scope():
            graph.ndata["h"] = h
            out: Tensor = import_dgl().readout_nodes(graph, "h", op=self.kind)
        return out


class GraphGCN(nn.Module):
    """GCN layers, a readout and a linear layer."""

    def __init__(self, config: ModelConfig, num_features: int, num_classes: int) -> None:
        super().__init__()
        self.net = StackedNet(config, num_features, config.hidden)
        self.readout, self.dropout = _Readout(config.readout), nn.Dropout(config.dropout)
        self.activation = ACTIVATIONS[config.activation]
        self.classify = nn.Linear(config.hidden, num_classes)

    def forward(self, graph: Any, features: Tensor) -> Tensor:
        h = self.activation(self.net(graph, features))
        out: Tensor = self.classify(self.dropout(self.readout(graph, h)))
        return out


class GraphGIN(nn.Module):
    """GIN for graphs: the scores of every layer's readout, the input's among them, are added. Source: arXiv 1810.00826, section 4.2."""

    def __init__(self, config: ModelConfig, num_features: int, num_classes: int) -> None:
        super().__init__()
        widths = [num_features, *[config.hidden] * config.num_layers]
        self.convs, self.norms = nn.ModuleList(), nn.ModuleList()
        for width in widths[:-1]:
            mlp = MLP([width, *[config.hidden] * config.mlp_layers], config.norm, config.activation)
            self.convs.append(import_dgl().nn.GINConv(mlp, "sum", learn_eps=config.learn_eps))
            self.norms.append(norm_of(config.norm, config.hidden))
        self.scores = nn.ModuleList(nn.Linear(width, num_classes) for width in widths)
        self.input_dropout, self.dropout = nn.Dropout(config.input_dropout), nn.Dropout(config.dropout)
        self.activation, self.residual = ACTIVATIONS[config.activation], config.residual
        self.readout = _Readout(config.readout)

    def forward(self, graph: Any, features: Tensor) -> Tensor:
        h = self.input_dropout(features)
        out: Tensor = self.dropout(self.scores[0](self.readout(graph, h)))
        for conv, norm, score in zip(self.convs, self.norms, list(self.scores)[1:], strict=True):
            hidden = self.activation(norm(conv(graph, h)))
            h = hidden + h if self.residual and hidden.shape == h.shape else hidden
            out = out + self.dropout(score(self.readout(graph, h)))
        return out
