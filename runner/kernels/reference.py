"""Message passing in plain torch, any dtype, differentiable: the oracle of every test, and how an op runs without a kernel of its own.

Everything of size E × F is really stored here; that is the point of a reference.

Legend: N destinations, M sources, E edges. Edge values are in the order of the edge ids.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runner.kernels.adjacency import Adjacency
from runner.kernels.opgraph import Target


def gather(adjacency: Adjacency, value: Tensor, target: Target) -> Tensor:
    """Return a value at each edge, [E, …]: of its source (u), its destination (v), or its own (e)."""
    src, dst = adjacency.src_dst
    match target:
        case "u":
            return value[src]
        case "v":
            return value[dst]
    return value


def edge_apply(operation: str, lhs: Tensor, rhs: Tensor | None) -> Tensor:
    """Combine two edge values, [E, …] each, with broadcasting; ``copy`` returns the first.

    As in DGL, a value with fewer dimensions is broadcast over the trailing ones: [E] against [E, F].
    """
    if operation == "copy" or rhs is None:
        return lhs
    while lhs.dim() < rhs.dim():
        lhs = lhs.unsqueeze(-1)
    while rhs.dim() < lhs.dim():
        rhs = rhs.unsqueeze(-1)
    match operation:
        case "add":
            return lhs + rhs
        case "sub":
            return lhs - rhs
        case "mul":
            return lhs * rhs
        case "div":
            return lhs / rhs
        case "dot":
            return (lhs * rhs).sum(-1, keepdim=True)
    raise AssertionError(f"unknown message operation {operation}")


def aggregate(adjacency: Adjacency, message: Tensor, reduce: str) -> Tensor:
    """Reduce messages [E, …] at each destination to [N, …]; 0 where there are none.

    The gradient of max and min goes to one edge, the first that attains it, as in DGL.
    """
    _, dst = adjacency.src_dst
    shape = (adjacency.num_dst, *message.shape[1:])
    if reduce in ("sum", "mean"):
        total = message.new_zeros(shape).index_add(0, dst, message)
        if reduce == "sum":
            return total
        degree = adjacency.in_degrees.clamp(min=1).to(message.dtype)
        return total / degree.reshape(-1, *[1] * (message.dim() - 1))
    assert reduce in ("max", "min"), reduce
    index = dst.reshape(-1, *[1] * (message.dim() - 1)).expand_as(message)
    mode = "amax" if reduce == "max" else "amin"
    best = message.detach().new_zeros(shape).scatter_reduce(0, index, message.detach(), mode, include_self=False)
    number = torch.arange(message.shape[0]).reshape(index.shape[:1] + (1,) * (message.dim() - 1)).expand_as(message)
    attained = torch.where(message.detach() == best.gather(0, index), number, message.shape[0])
    first = torch.full(shape, message.shape[0]).scatter_reduce(0, index, attained, "amin")
    padded = torch.cat([message, message.new_zeros(1, *message.shape[1:])])
    return padded.gather(0, first)


def edge_softmax(adjacency: Adjacency, logits: Tensor, norm_by: str) -> Tensor:
    """Softmax of edge values [E, …] over the edges that share a destination (``dst``) or a source (``src``)."""
    graph = adjacency if norm_by == "dst" else adjacency.transposed
    _, ends = graph.src_dst
    highest = aggregate(graph, logits.detach(), "max")
    weight = torch.exp(logits - highest[ends])
    return weight / aggregate(graph, weight, "sum")[ends]
