"""The runner's models on PyTorch Geometric's layers, with the same parameters: peers in the table of strategies.

PyG runs as it is best on a CPU: on a sparse matrix (torch's CSR) where it isn't compiled, on edge lists where torch.compile takes it.

Legend: N nodes, E edges, F features, K classes.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from runner.gnn.kernel_peers import has_pyg
from runner.gnn.models import StackedNet
from runner.kernels.adjacency import Adjacency

MODELS = ("gcn", "gin")
_MAX_EDGE_BYTES = 2**28  # of a value per edge and feature: an edge list stores that for every layer


class PygNet(nn.Module):
    """A :class:`StackedNet` of GCN or GIN layers, its parameters copied, message passing by PyG.

    Args:
        module: the DGL module.
        adjacency: the graph.
        is_sparse: whether PyG is given a sparse matrix; else an edge list.
    """

    def __init__(self, module: StackedNet, adjacency: Adjacency, is_sparse: bool) -> None:
        super().__init__()
        self._net = copy.deepcopy(module)
        name = module.config.name
        weight = _normalisation(adjacency) if name == "gcn" else None
        graph = _sparse(adjacency, weight) if is_sparse else torch.stack(adjacency.src_dst).long()
        passed = (graph,) if is_sparse or weight is None else (graph, weight[adjacency_order(adjacency)])
        layers = [_Layer(_convolution(name, layer), passed) for layer in self._net.layers]
        self._net.layers = nn.ModuleList(layers)

    def forward(self, features: Tensor) -> Tensor:
        """Features [N, F] -> logits [N, K]."""
        logits: Tensor = self._net(None, features)
        return logits


class _Layer(nn.Module):
    """A PyG layer that looks like one of DGL's: it has its graph already."""

    def __init__(self, convolution: nn.Module, passed: tuple[Tensor, ...]) -> None:
        super().__init__()
        self._convolution, self._passed = convolution, passed

    def forward(self, _graph: Any, h: Tensor) -> Tensor:
        out: Tensor = self._convolution(h, *self._passed)
        return out


def reason_against(name: str, adjacency: Adjacency, width: int, is_sparse: bool) -> str | None:
    """Return why PyG is left out; None where it can take part."""
    if not has_pyg():
        return "PyG is not installed (extra bench)"
    if name not in MODELS:
        return f"there is no PyG counterpart of model={name} here"
    if not is_sparse and 4 * adjacency.num_edges * width > _MAX_EDGE_BYTES:
        return f"a value per edge and feature takes {4 * adjacency.num_edges * width / 2**20:.0f} MiB a layer"
    return None


def adjacency_order(adjacency: Adjacency) -> Tensor:
    """Return int64 [E]: the entry of each edge of ``src_dst``."""
    order = torch.empty(adjacency.num_edges, dtype=torch.int64)
    order[adjacency.edge_ids.long()] = torch.arange(adjacency.num_edges)
    return order


def _convolution(name: str, layer: Any) -> Any:
    from torch_geometric.nn import GCNConv, GINConv

    if name == "gin":
        weights = copy.deepcopy(layer.apply_func.state_dict())
        aggregate = GINConv(layer.apply_func, eps=float(layer.eps))  # which gives the module new weights
        layer.apply_func.load_state_dict(weights)
        return aggregate
    built = GCNConv(*layer.weight.shape, bias=layer.bias is not None, normalize=False)
    with torch.no_grad():
        built.lin.weight.copy_(layer.weight.t())
        if layer.bias is not None:
            built.bias.copy_(layer.bias)
    return built


def _normalisation(adjacency: Adjacency) -> Tensor:
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
