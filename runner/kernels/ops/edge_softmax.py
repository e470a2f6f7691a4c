"""Softmax over the edges that share a node.

Legend: N destinations, E edges, H heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from runner.errors import UserError, suggestion
from runner.kernels import reference
from runner.kernels.adjacency import Adjacency, Csr
from runner.kernels.ops.backend import has_kernels
from runner.kernels.ops.checks import check_features
from runner.kernels.ops.registry import GRAPH, Gradients, define, launcher


def edge_softmax(adjacency: Adjacency, logits: Tensor, norm_by: str = "dst") -> Tensor:
    """Return ``exp(logit) / sum of exp(logit)`` over the edges with the same destination (``dst``) or source (``src``).

    Args:
        adjacency: the graph.
        logits: float32, float64 or bfloat16, by edge id, [E, …]; each trailing element is a softmax of its own.
        norm_by: dst or src.

    Returns:
        [E, …], dtype of ``logits``; differentiable.

    Raises:
        UserError: where a shape, dtype, device or name doesn't fit; it names the argument and both shapes.
    """
    if norm_by not in ("dst", "src"):
        raise UserError(f"norm_by is '{norm_by}': {suggestion(norm_by, ('dst', 'src'))}")
    check_features("logits", logits, adjacency.num_edges, adjacency)
    if not has_kernels(logits.device) or not logits.shape[1:].numel():
        return reference.edge_softmax(adjacency, logits, norm_by)
    graph = adjacency if norm_by == "dst" else adjacency.transposed
    flat = logits.reshape(adjacency.num_edges, logits.shape[1:].numel()).contiguous()
    return _edge_softmax(flat, *graph.csr).reshape(logits.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], out: Tensor) -> None:
    ctx.save_for_backward(out, *inputs[1:])


def _back(ctx: Any, dout: Tensor) -> Gradients:
    out, *graph = ctx.saved_tensors
    return (_backward(out, dout.contiguous(), *graph),)


_backward = define(
    f"edge_softmax_backward(Tensor out, Tensor dout, {GRAPH}) -> Tensor",
    lambda out, dout, *graph: launcher(out).edge_softmax_backward(Csr(*graph), out, dout),
    lambda out, *_: torch.empty_like(out),
)
_edge_softmax = define(
    f"edge_softmax(Tensor logits, {GRAPH}) -> Tensor",
    lambda logits, *graph: launcher(logits).edge_softmax(Csr(*graph), logits),
    lambda logits, *_: torch.empty_like(logits),
    _save,
    _back,
)
