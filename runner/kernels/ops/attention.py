"""Attention with scores that are made of features: score, softmax and weighted sum over a destination's edges in one kernel.

Nothing of size E × H × C is stored, in neither direction: the backward keeps each destination's largest score and sum of exponentials, and
recomputes the rest while it walks the transposed graph. One array of size E × H, the gradients of the scores, is held during the backward.

Legend: N destinations, M sources, E edges, H heads, C channels a head.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from runner.errors import UserError
from runner.kernels import reference
from runner.kernels.adjacency import Adjacency, Csr
from runner.kernels.ops.backend import has_kernels
from runner.kernels.ops.checks import check_shape, check_value
from runner.kernels.ops.registry import GRAPH, TURNED, Gradients, define, launcher
from runner.kernels.ops.spmm import weighted_sum
from runner.kernels.parameters import Scoring, check_dropout, sum_dtype


def gatv2_attention(
    adjacency: Adjacency,
    value: Tensor,
    query: Tensor,
    vector: Tensor,
    *,
    negative_slope: float = 0.2,
    dropout: float = 0.0,
    seed: int = 0,
) -> Tensor:
    """GATv2: ``sum over j → i of softmax(<vector, LeakyReLU(value_j + query_i)>) · value_j``; differentiable in all three.

    Args:
        adjacency: N × M.
        value: float32, float64 or bfloat16 [M, H, C].
        query: [N, H, C].
        vector: [H, C].
        negative_slope, dropout, seed: as in :func:`~runner.kernels.ops.gat.gat_attention`.

    Returns:
        [N, H, C]; 0 where a destination has no edges.

    Raises:
        UserError: where a shape, dtype or device doesn't fit; it names the argument and both shapes.

    Source: Brody et al., 2022, equation 7.
    """
    check_value(adjacency, value)
    check_shape("query", query, (adjacency.num_dst, *value.shape[1:]), "value", value)
    check_shape("vector", vector, tuple(value.shape[1:]), "value", value)
    return _run(adjacency, value, None, query, vector, Scoring("gatv2", float(negative_slope), 1.0, dropout, seed))


def dot_attention(
    adjacency: Adjacency,
    value: Tensor,
    key: Tensor,
    query: Tensor,
    *,
    scale: float | None = None,
    dropout: float = 0.0,
    seed: int = 0,
) -> Tensor:
    """Scaled dot product: ``sum over j → i of softmax(scale · <key_j, query_i>) · value_j``; differentiable in all three.

    Args:
        adjacency: N × M.
        value, key: float32, float64 or bfloat16 [M, H, C].
        query: [N, H, C].
        scale: default 1 / √C.
        dropout, seed: as in :func:`~runner.kernels.ops.gat.gat_attention`.

    Returns:
        [N, H, C]; 0 where a destination has no edges.

    Raises:
        UserError: where a shape, dtype or device doesn't fit; it names the argument and both shapes.

    Source: Vaswani et al., 2017, equation 1, over a graph's edges.
    """
    check_value(adjacency, value)
    check_shape("key", key, tuple(value.shape), "value", value)
    check_shape("query", query, (adjacency.num_dst, *value.shape[1:]), "value", value)
    if isinstance(scale, Tensor):
        raise UserError("scale is a tensor: a number is needed, no gradient flows to it")
    scale = 1 / math.sqrt(value.shape[2]) if scale is None else float(scale)
    return _run(adjacency, value, key, query, None, Scoring("dot", 0.0, scale, dropout, seed))


def _run(
    adjacency: Adjacency, value: Tensor, key: Tensor | None, query: Tensor, vector: Tensor | None, scoring: Scoring
) -> Tensor:
    check_dropout(scoring.dropout, scoring.seed)
    if not has_kernels(value.device):
        return reference.attention(adjacency, value, key, query, vector, scoring)
    operands = [entry if entry is None else entry.contiguous() for entry in (value, key, query, vector)]
    needs_gradient = torch.is_grad_enabled() and any(entry is not None and entry.requires_grad for entry in operands)
    turned = (*adjacency.transposed.csr, adjacency.transposed.turned_entries) if needs_gradient else (None,) * 5
    out, _, _ = _attention(*operands, *scoring, *adjacency.csr, *turned)
    return out


_OPERANDS = "Tensor value, Tensor? key, Tensor query, Tensor? vector"
_SCORING = "str score, float slope, float scale, float dropout, int seed"


def _save(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(*outputs[1:])
    ctx.scoring = Scoring(*inputs[4:9])
    ctx.save_for_backward(*inputs[:4], *outputs, *inputs[9:])


def _back(ctx: Any, dout: Tensor, _high: Any, _total: Any) -> Gradients:
    value, key, query, vector, out, high, total, indptr, indices, _, row_blocks, *turned, entries = ctx.saved_tensors
    scoring, graph = ctx.scoring, (indptr, indices, entries, row_blocks)  # where dscore lies, in place of the edge ids
    dscore, dvalue, dkey = _backward_sources(
        value, key, query, vector, out, high, total, dout.contiguous(), *scoring, *turned
    )
    dvector = None
    if scoring.score == "dot":
        dquery = weighted_sum(key.flatten(1), dscore.to(key.dtype), graph).view_as(query)
    else:
        dquery, dvector = _backward_destinations(value, query, vector, dscore, *scoring, *graph)
    return dvalue, dkey if key is not None else None, dquery, dvector


def _fake_attention(value: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    indptr = rest[8]
    out = value.new_empty(indptr.shape[0] - 1, *value.shape[1:])
    kept = value.new_empty(out.shape[:2], dtype=sum_dtype(value.dtype))
    return out, kept, torch.empty_like(kept)


_attention = define(
    f"attention({_OPERANDS}, {_SCORING}, {GRAPH}, {TURNED}, Tensor? turned_entries) -> (Tensor, Tensor, Tensor)",
    lambda value, key, query, vector, *rest: launcher(value).attention(
        Csr(*rest[5:9]), value, key, query, vector, Scoring(*rest[:5])
    ),
    _fake_attention,
    _save,
    _back,
)


def _run_backward_sources(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    operands, saved, dout = inputs[:4], inputs[4:7], inputs[7]
    dscore, dvalue, dkey = launcher(dout).attention_backward_sources(
        Csr(*inputs[13:]), operands, saved, dout, Scoring(*inputs[8:13])
    )
    return dscore, dvalue, dout.new_empty(0) if dkey is None else dkey


def _fake_backward_sources(value: Tensor, key: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    indices = rest[-3]
    dkey = value.new_empty(0) if key is None else torch.empty_like(key)
    dscore = value.new_empty(indices.shape[0], value.shape[1], dtype=sum_dtype(value.dtype))
    return dscore, torch.empty_like(value), dkey


_backward_sources = define(
    f"attention_backward_sources({_OPERANDS}, Tensor out, Tensor high, Tensor total, Tensor dout, {_SCORING}, {GRAPH}) "
    "-> (Tensor, Tensor, Tensor)",
    _run_backward_sources,
    _fake_backward_sources,
)
_backward_destinations = define(
    f"attention_backward_destinations(Tensor value, Tensor query, Tensor vector, Tensor dscore, {_SCORING}, {GRAPH}) "
    "-> (Tensor, Tensor)",
    lambda value, query, vector, dscore, *rest: launcher(value).attention_backward_destinations(
        Csr(*rest[5:]), value, query, vector, dscore, Scoring(*rest[:5])
    ),
    lambda _value, query, vector, *_: (torch.empty_like(query), torch.empty_like(vector)),
)
