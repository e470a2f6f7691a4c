"""The runner's models on PyTorch Geometric's layers, with the same parameters: peers in the tables.

PyG runs as it is best on a CPU: on a sparse matrix (torch's CSR) where its layer takes one and isn't compiled, else on edge lists.

Legend: N nodes, E edges, F features, H heads, C channels a head, K classes or Gaussians.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from runner.gnn.kernel_peers import has_pyg
from runner.kernels.adjacency import Adjacency
from runner.schema import ModelConfig

_MAX_EDGE_BYTES = 2**29  # of a value per edge and feature: an edge list stores that for every layer, some several times


@dataclass(frozen=True)
class _Graph:
    """The graph as PyG takes it."""

    adjacency: Adjacency
    is_sparse: bool

    def passed(self, weight: Tensor | None = None) -> tuple[Tensor, ...]:
        """What a layer is given: a matrix, or an edge list and the weights (float [E], in the order of the entries)."""
        if self.is_sparse:
            return (_sparse(self.adjacency, weight),)
        edges = torch.stack(self.adjacency.src_dst).long()
        return (edges,) if weight is None else (edges, weight[adjacency_order(self.adjacency)])

    def edges(self) -> Tensor:
        """The edge list, int64 [2, E]."""
        return torch.stack(self.adjacency.src_dst).long()


class PygNet(nn.Module):
    """One of the runner's DGL modules, its parameters copied, message passing by PyG.

    Args:
        module: the DGL module.
        config: what it was built by.
        adjacency: the graph.
        is_sparse: whether PyG is given a sparse matrix where its layer takes one; else an edge list.
    """

    def __init__(self, module: nn.Module, config: ModelConfig, adjacency: Adjacency, is_sparse: bool) -> None:
        super().__init__()
        self._net = copy.deepcopy(module)
        graph = _Graph(adjacency, is_sparse and config.name in _TAKES_MATRIX)
        _CONVERSIONS[config.name](self._net, config, graph)

    def forward(self, features: Tensor) -> Tensor:
        """Features [N, F] -> logits [N, K]."""
        logits: Tensor = self._net(None, features)
        return logits


class _Layer(nn.Module):
    """A PyG layer that looks like one of DGL's: it has its graph already."""

    def __init__(self, convolution: nn.Module, passed: tuple[Any, ...]) -> None:
        super().__init__()
        self._convolution, self._passed = convolution, passed

    def forward(self, _graph: Any, h: Tensor, *given: Any) -> Tensor:
        out: Tensor = self._convolution(h, *self._passed, *(entry for entry in given if entry is not None))
        return out


def reason_against(config: ModelConfig, adjacency: Adjacency, num_features: int, is_sparse: bool) -> str | None:
    """Return why PyG is left out; None where it can take part."""
    if not has_pyg():
        return "PyG is not installed (extra bench)"
    if config.name not in _CONVERSIONS:
        return f"there is no PyG counterpart of model={config.name} here"
    if is_sparse and config.name in _TAKES_MATRIX:
        return None
    propagated = max(num_features, config.hidden) if config.name in ("gin", "sage") else config.hidden
    widths = {"gat": config.heads, "gatv2": config.heads, "monet": config.num_kernels, "edgeconv": 2}
    size = 4 * adjacency.num_edges * propagated * widths.get(config.name, 1)
    return f"a value per edge and feature takes {size / 2**20:.0f} MiB a layer" if size > _MAX_EDGE_BYTES else None


def adjacency_order(adjacency: Adjacency) -> Tensor:
    """Return int64 [E]: the entry of each edge of ``src_dst``."""
    order = torch.empty(adjacency.num_edges, dtype=torch.int64)
    order[adjacency.edge_ids.long()] = torch.arange(adjacency.num_edges)
    return order


# --- a conversion for each model: its DGL layers are replaced ------------------------------------------------------------


def _stacked(
    convert: Callable[[Any, ModelConfig], nn.Module], passed: Callable[[_Graph], tuple[Any, ...]]
) -> Callable[..., None]:
    def replace(net: Any, config: ModelConfig, graph: _Graph) -> None:
        given = passed(graph)
        net.layers = nn.ModuleList(_Layer(convert(layer, config), given) for layer in net.layers)

    return replace


def _gcn(layer: Any, _: ModelConfig) -> nn.Module:
    from torch_geometric.nn import GCNConv

    built = GCNConv(*layer.weight.shape, bias=layer.bias is not None, normalize=False)
    _copy(built.lin.weight, layer.weight.t())
    _copy(built.bias, layer.bias)
    return built


def _gin(layer: Any, _: ModelConfig) -> nn.Module:
    from torch_geometric.nn import GINConv

    weights = copy.deepcopy(layer.apply_func.state_dict())
    built: nn.Module = GINConv(layer.apply_func, eps=float(layer.eps))  # which gives the module new weights
    layer.apply_func.load_state_dict(weights)
    return built


def _sage(layer: Any, _: ModelConfig) -> nn.Module:
    from torch_geometric.nn import SAGEConv

    built = SAGEConv(layer.fc_neigh.in_features, layer.fc_neigh.out_features, bias=layer.fc_self.bias is not None)
    _copy(built.lin_l.weight, layer.fc_neigh.weight)
    _copy(built.lin_l.bias, layer.fc_self.bias)
    _copy(built.lin_r.weight, layer.fc_self.weight)
    return built


def _gat(layer: Any, config: ModelConfig) -> nn.Module:
    from torch_geometric.nn import GATConv

    num_heads, channels = layer.attn_l.shape[1:]
    built = GATConv(
        layer.fc.in_features,
        channels,
        num_heads,
        dropout=config.attention_dropout,
        add_self_loops=False,
        bias=layer.bias is not None,
    )
    _copy(built.lin.weight, layer.fc.weight)
    _copy(built.att_src, layer.attn_l)
    _copy(built.att_dst, layer.attn_r)
    _copy(built.bias, layer.bias)
    return _ByHead(built, num_heads)


def _gatv2(layer: Any, config: ModelConfig) -> nn.Module:
    from torch_geometric.nn import GATv2Conv

    num_heads, channels = layer.attn.shape[1:]
    has_bias = layer.fc_src.bias is not None
    built = GATv2Conv(
        layer.fc_src.in_features,
        channels,
        num_heads,
        dropout=config.attention_dropout,
        add_self_loops=False,
        bias=has_bias,
    )
    for mine, theirs in ((built.lin_l, layer.fc_src), (built.lin_r, layer.fc_dst)):
        _copy(mine.weight, theirs.weight)
        _copy(mine.bias, theirs.bias)
    _copy(built.att, layer.attn)
    return _ByHead(built, num_heads)  # its bias of the result stays 0, as DGL has none


class _ByHead(nn.Module):
    """Gives the heads a dimension of their own, as DGL does."""

    def __init__(self, convolution: nn.Module, num_heads: int) -> None:
        super().__init__()
        self._convolution, self._num_heads = convolution, num_heads

    def forward(self, h: Tensor, edges: Tensor) -> Tensor:
        out: Tensor = self._convolution(h, edges)
        return out.view(out.shape[0], self._num_heads, -1)


def _appnp(net: Any, config: ModelConfig, graph: _Graph) -> None:
    from torch_geometric.nn import APPNP

    propagate = APPNP(config.num_hops, config.alpha, add_self_loops=False, normalize=False)
    net.propagate = _Layer(propagate, graph.passed(normalisation(graph.adjacency)))


def _monet(net: Any, config: ModelConfig, graph: _Graph) -> None:
    from torch_geometric.nn import GMMConv

    edges, adjacency, layers = graph.edges(), graph.adjacency, []
    for layer in net.layers:
        built = GMMConv(
            layer.fc.in_features, layer.bias.numel() if layer.bias is not None else layer.fc.out_features // config.num_kernels,
            config.pseudo_dim, config.num_kernels, aggr="mean", root_weight=False, bias=layer.bias is not None,
        )  # fmt: skip
        built.root = None  # which PyG's forward looks at, and leaves out without a root weight (2.8.1)
        _copy(built.g, layer.fc.weight.t())
        _copy(built.mu, layer.mu)
        _copy(built.sigma, 1 / layer.inv_sigma)
        _copy(built.bias, layer.bias)
        layers.append(_Layer(built, (edges,)))
    net.layers = nn.ModuleList(layers)
    src, dst = adjacency.src_dst
    coordinates = (torch.stack([adjacency.out_degrees[src], adjacency.in_degrees[dst]], 1) + 1).float().rsqrt()
    net.coordinates = lambda _: coordinates


def _edgeconv(layer: Any, _: ModelConfig) -> nn.Module:
    from torch_geometric.nn import EdgeConv

    theta, phi = layer.theta, layer.phi
    both = nn.Linear(2 * theta.in_features, theta.out_features)
    weight = torch.cat([phi.weight, -theta.weight], 1).detach().clone()
    built: nn.Module = EdgeConv(both, aggr="max")  # which gives the layer new weights
    _copy(both.weight, weight)
    _copy(both.bias, phi.bias + theta.bias)
    return built


def _of_edges(graph: _Graph) -> tuple[Any, ...]:
    return (graph.edges(),)


_TAKES_MATRIX = ("gcn", "gin", "sage", "appnp")
_CONVERSIONS: dict[str, Callable[[Any, ModelConfig, _Graph], None]] = {
    "gcn": _stacked(_gcn, lambda graph: graph.passed(normalisation(graph.adjacency))),
    "gin": _stacked(_gin, lambda graph: graph.passed()),
    "sage": _stacked(_sage, lambda graph: graph.passed()),
    "gat": _stacked(_gat, _of_edges),
    "gatv2": _stacked(_gatv2, _of_edges),
    "appnp": _appnp,
    "monet": _monet,
    "edgeconv": _stacked(_edgeconv, _of_edges),
}


@torch.no_grad()
def _copy(to: Tensor | None, values: Tensor | None) -> None:
    if to is not None and values is not None:
        to.copy_(values)


def normalisation(adjacency: Adjacency) -> Tensor:
    """float32 [E], in the order of the entries: 1 / sqrt(out-degree of the source · in-degree of the destination), as DGL's GCN has it."""
    source = adjacency.out_degrees.clamp(min=1).float().rsqrt()
    destination = adjacency.in_degrees.clamp(min=1).float().rsqrt()
    return source[adjacency.indices.long()] * destination[adjacency.rows.long()]


def _sparse(adjacency: Adjacency, weight: Tensor | None) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support")
        return torch.sparse_csr_tensor(
            adjacency.indptr, adjacency.indices.long(), adjacency.values(None) if weight is None else weight,
            (adjacency.num_dst, adjacency.num_src), check_invariants=False,
        )  # fmt: skip
