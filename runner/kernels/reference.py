"""Message passing in plain torch, any dtype, differentiable: the oracle of every test, and how an op runs without a kernel of its own.

Everything of size E × F is really stored here; that is the point of a reference.

Legend: N destinations, M sources, E edges. Edge values are in the order of the edge ids.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor
from torch.nn import functional as F

from runner.kernels.adjacency import Adjacency
from runner.kernels.parameters import Epilogue, Scoring, activate, kept


def gather(adjacency: Adjacency, value: Tensor, target: str) -> Tensor:
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
    lhs, rhs = _align(lhs, rhs)
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

    The gradient of max and min goes to one edge: the first of the destination's entries (lowest source, then edge id) that attains it.
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
    entries = message[adjacency.edge_ids]
    rows = adjacency.rows.long()
    index = rows.reshape(-1, *[1] * (message.dim() - 1)).expand_as(entries)
    mode = "amax" if reduce == "max" else "amin"
    best = message.detach().new_zeros(shape).scatter_reduce(0, index, entries.detach(), mode, include_self=False)
    at_best = best.gather(0, index)
    number = torch.arange(entries.shape[0], device=message.device)
    number = number.reshape(index.shape[:1] + (1,) * (message.dim() - 1)).expand_as(entries)
    attains = (entries.detach() == at_best) | (entries.detach().isnan() & at_best.isnan())
    attained = torch.where(attains, number, entries.shape[0])
    first = torch.full(shape, entries.shape[0], device=message.device).scatter_reduce(0, index, attained, "amin")
    padded = torch.cat([entries, entries.new_zeros(1, *message.shape[1:])])
    return padded.gather(0, first)


def neighbour_sum(adjacency: Adjacency, x: Tensor, reduce: str) -> Tensor:
    """Return the sum or mean over in-edges of the sources' rows x [M, F], by torch's own sparse product: no message is stored.

    For fixed x: where a gradient flows to it, messages are gathered and added up.
    """
    if x.requires_grad and torch.is_grad_enabled():
        return aggregate(adjacency, gather(adjacency, x, "u"), reduce)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support")
        ones = torch.ones(adjacency.num_edges, dtype=x.dtype, device=x.device)
        shape = (adjacency.num_dst, adjacency.num_src)
        matrix = torch.sparse_csr_tensor(
            adjacency.indptr, adjacency.indices.long(), ones, shape, check_invariants=False
        )
        total = matrix @ x
    return total if reduce == "sum" else total * adjacency.mean_scale(x.dtype).unsqueeze(1)


def edge_softmax(adjacency: Adjacency, logits: Tensor, norm_by: str) -> Tensor:
    """Softmax of edge values [E, …] over the edges that share a destination (``dst``) or a source (``src``)."""
    graph = adjacency if norm_by == "dst" else adjacency.transposed
    _, ends = graph.src_dst
    highest = aggregate(graph, logits.detach(), "max")
    weight = torch.exp(logits - highest[ends])
    return weight / aggregate(graph, weight, "sum")[ends]


def typed_linear(x: Tensor, weight: Tensor, types: Tensor) -> Tensor:
    """Return ``x[e] W[types[e]]``, [E, Fo], for rows x [E, Fi] of types (int64 [E]) with a weight [R, Fi, Fo] each."""
    order = torch.argsort(types, stable=True)
    counts = torch.bincount(types, minlength=weight.shape[0]).tolist()
    parts = [rows @ one for rows, one in zip(x[order].split(counts), weight.unbind(0), strict=True)]
    return torch.cat(parts)[torch.argsort(order)]


def spmm(
    adjacency: Adjacency,
    x: Tensor,
    weight: Tensor | None = None,
    reduce: str = "sum",
    col_scale: Tensor | None = None,
    epilogue: Epilogue | None = None,
) -> Tensor:
    """Return ``epilogue(reduce over a destination's edges of weight · col_scale[source] · x[source])``.

    Args:
        adjacency: N × M.
        x: float [M, …].
        weight: [E] or [E, H, …], broadcast over the trailing dimensions of x.
        reduce: sum, mean, max, min.
        col_scale: [M].
        epilogue: see there; its bias has the shape of a row of x, its dropout numbers the elements of a row through.
    """
    if col_scale is not None:
        x = edge_apply("mul", x, col_scale)
    message = gather(adjacency, x, "u")
    y = aggregate(adjacency, message if weight is None else edge_apply("mul", message, weight), reduce)
    return y if epilogue is None else finish(y, epilogue)


def attention(
    adjacency: Adjacency, value: Tensor, key: Tensor | None, query: Tensor, vector: Tensor | None, scoring: Scoring
) -> Tensor:
    """Return softmax-weighted sums of ``value`` [M, H, C] over each destination's edges, [N, H, C]; see :class:`Scoring`."""
    assert scoring.score != "gatv2" or vector is not None
    left, right = gather(adjacency, value if key is None else key, "u"), gather(adjacency, query, "v")
    match scoring.score:
        case "gat":
            score = F.leaky_relu(left + right, scoring.slope)
        case "gatv2":
            score = (F.leaky_relu(left + right, scoring.slope) * vector).sum(-1)  # type: ignore[operator]
        case _:
            score = (left * right).sum(-1) * scoring.scale
    share = edge_softmax(adjacency, score, "dst")
    if scoring.dropout:
        edges = torch.arange(adjacency.num_edges, device=share.device)
        mask = kept(edges, share.shape[1], scoring.dropout, scoring.seed)
        share = share * mask / (1 - scoring.dropout)
    return aggregate(adjacency, gather(adjacency, value, "u") * share.unsqueeze(-1), "sum")


def finish(y: Tensor, epilogue: Epilogue) -> Tensor:
    """Return the epilogue of y [N, …]."""
    if epilogue.row_scale is not None:
        y = edge_apply("mul", y, epilogue.row_scale)
    if epilogue.addend is not None:
        scale = 1 if epilogue.addend_scale is None else epilogue.addend_scale
        y = y + epilogue.addend.reshape(y.shape) * scale
    if epilogue.bias is not None:
        y = y + epilogue.bias.reshape(y.shape[1:])
    y = activate(y, epilogue.activation, epilogue.slope)
    if epilogue.dropout:
        rows = torch.arange(y.shape[0], device=y.device)
        mask = kept(rows, y[0].numel() if len(y) else 0, epilogue.dropout, epilogue.seed).view(y.shape)
        y = y * mask / (1 - epilogue.dropout)
    return y


def _align(lhs: Tensor, rhs: Tensor) -> tuple[Tensor, Tensor]:
    """Give both as many dimensions, with ones behind those of the shorter."""
    dims = max(lhs.dim(), rhs.dim())
    return tuple(side.reshape(*side.shape, *[1] * (dims - side.dim())) for side in (lhs, rhs))  # type: ignore[return-value]
