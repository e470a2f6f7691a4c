"""Models whose messages depend on both ends of an edge: MoNet and EdgeConv networks.

Legend: N nodes, E edges, F features, C hidden channels, K classes, G Gaussians, D pseudo-coordinates an edge.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from runner.gnn.dgl_compat import import_dgl
from runner.gnn.layers import ACTIVATIONS, graphs_of, norm_of
from runner.schema import ModelConfig


class MoNet(nn.Module):
    """Gaussian mixture layers, means over in-edges, on pseudo-coordinates of the degrees.

    An edge's are ``tanh(P [(deg_u + 1)^-1/2, (deg_v + 1)^-1/2])``, P of each layer's own.

    Source: arXiv 1611.08402, equation 11 and section 5.2.
    """

    def __init__(self, config: ModelConfig, num_features: int, num_outputs: int) -> None:
        super().__init__()
        widths = [num_features, *[config.hidden] * (config.num_layers - 1), num_outputs]
        conv, dim = import_dgl().nn.GMMConv, config.pseudo_dim
        self.layers = nn.ModuleList(
            conv(a, b, dim, config.num_kernels, "mean", bias=config.bias, allow_zero_in_degree=True)
            for a, b in pairwise(widths)
        )
        self.projections = nn.ModuleList(nn.Linear(2, dim) for _ in self.layers)
        self.norms = nn.ModuleList(norm_of(config.norm, width) for width in widths[1:-1])
        self.input_dropout, self.dropout = nn.Dropout(config.input_dropout), nn.Dropout(config.dropout)
        self.activation = ACTIVATIONS[config.activation]
        self.coordinates = degree_coordinates

    def forward(self, graph: Any, features: Tensor) -> Tensor:
        h = self.input_dropout(features)
        num_layers = len(self.layers)
        for index, block in enumerate(graphs_of(graph, num_layers)):
            pseudo = torch.tanh(self.projections[index](self.coordinates(block).to(h.dtype)))
            h = self.layers[index](block, h, pseudo)
            if index < num_layers - 1:
                h = self.dropout(self.activation(self.norms[index](h)))
        return h


def degree_coordinates(graph: Any) -> Tensor:
    """Return float [E, 2]: (degree + 1)^-1/2 of each edge's source (edges out) and destination (edges in)."""
    src, dst = graph.edges()
    out_degrees, in_degrees = graph.out_degrees(), graph.in_degrees()
    return torch.stack([(out_degrees[src] + 1).float().rsqrt(), (in_degrees[dst] + 1).float().rsqrt()], dim=1)


class EdgeNet(nn.Module):
    """A linear encoder, EdgeConv layers ``max over j → i of θ (x_i - x_j) + φ x_i``, the last to classes.

    Source: arXiv 1801.07829, section 3.2, on a graph that is given.
    """

    def __init__(self, config: ModelConfig, num_features: int, num_outputs: int) -> None:
        super().__init__()
        widths = [*[config.hidden] * config.num_layers, num_outputs]
        conv = import_dgl().nn.EdgeConv
        self.encode = nn.Linear(num_features, config.hidden)
        self.layers = nn.ModuleList(conv(a, b, allow_zero_in_degree=True) for a, b in pairwise(widths))
        self.norms = nn.ModuleList(norm_of(config.norm, width) for width in widths[:-1])
        self.input_dropout, self.dropout = nn.Dropout(config.input_dropout), nn.Dropout(config.dropout)
        self.activation, self.residual = ACTIVATIONS[config.activation], config.residual

    def forward(self, graph: Any, features: Tensor) -> Tensor:
        h: Tensor = self.encode(self.input_dropout(features))
        for layer, norm, block in zip(self.layers, self.norms, graphs_of(graph, len(self.layers)), strict=False):
            h = self.dropout(self.activation(norm(h)))
            out = layer(block, h)
            h = out + h[: out.shape[0]] if self.residual and out.shape[1] == h.shape[1] else out
        return h
