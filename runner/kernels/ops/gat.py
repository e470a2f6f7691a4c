"""GAT's attention. Its scores are made of one number of each end, so that neither direction stores anything of an edge's size.

Legend: N destinations, M sources, E edges, H heads, C channels a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from runner.kernels import reference
from runner.kernels.adjacency import Adjacency, Csr
from runner.kernels.ops.backend import has_kernels
from runner.kernels.ops.checks import check_shape, check_value
from runner.kernels.ops.registry import GRAPH, TURNED, Gradients, define, launcher
from runner.kernels.parameters import Scoring, check_dropout, sum_dtype


def gat_attention(
    adjacency: Adjacency,
    value: Tensor,
    key: Tensor,
    query: Tensor,
    *,
    negative_slope: float = 0.2,
    dropout: float = 0.0,
    seed: int = 0,
) -> Tensor:
    """GAT: ``sum over j → i of softmax(LeakyReLU(key_j + query_i)) · value_j``; differentiable in all three.

    Args:
        adjacency: N × M.
        value: float32, float64 or bfloat16 [M, H, C].
        key, query: score of a source [M, H] and of a destination [N, H].
        negative_slope: of the LeakyReLU below 0.
        dropout: probability that an edge's weight is dropped (the softmax is over all of them); the rest is scaled by 1 / (1 - dropout).
        seed: the same seed drops the same edges.

    Returns:
        [N, H, C]; 0 where a destination has no edges.

    Raises:
        UserError: where a shape, dtype or device doesn't fit; it names the argument and both shapes.

    Source: Veličković et al., 2018, section 2.1.
    """
    check_value(adjacency, value)
    check_shape("key", key, tuple(value.shape[:2]), "value", value)
    check_shape("query", query, (adjacency.num_dst, value.shape[1]), "value", value)
    scoring = Scoring("gat", float(negative_slope), 1.0, dropout, seed)
    check_dropout(dropout, seed)
    if not has_kernels(value.device):
        return reference.attention(adjacency, value, key, query, None, scoring)
    operands = [entry.contiguous() for entry in (value, key, query)]
    needs_gradient = torch.is_grad_enabled() and any(entry.requires_grad for entry in operands)
    turned = adjacency.transposed.csr if needs_gradient else (None,) * 4
    return _gat(*operands, scoring.slope, dropout, seed, *adjacency.csr, *turned)[0]


_OPERANDS = "Tensor value, Tensor key, Tensor query"
_SCORING = "float slope, float dropout, int seed"


def _scoring(slope: float, dropout: float, seed: int) -> Scoring:
    return Scoring("gat", slope, 1.0, dropout, seed)


def _save(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*outputs[1:])
    ctx.scoring = inputs[3:6]
    ctx.save_for_backward(*inputs[:3], *outputs, *inputs[10:])


def _back(ctx: Any, dout: Tensor, *_: Any) -> Gradients:
    return _backward(*ctx.saved_tensors[:8], dout.contiguous(), *ctx.scoring, *ctx.saved_tensors[8:])


def _fake(value: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    indptr, turned_indptr = rest[5], rest[9]
    out = value.new_empty(indptr.shape[0] - 1, *value.shape[1:])
    sums = sum_dtype(value.dtype)
    positive = out.new_empty(0, dtype=sums) if turned_indptr is None else torch.empty_like(out, dtype=sums)
    return (
        out,
        *(out.new_empty(out.shape[:2], dtype=sums) for _ in range(2)),
        positive,
        out.new_empty(out.shape[:2], dtype=sums),
    )


_backward = define(
    f"gat_backward({_OPERANDS}, Tensor out, Tensor high, Tensor total, Tensor positive, Tensor positive_share, Tensor dout, {_SCORING}, "
    f"{GRAPH}) -> (Tensor, Tensor, Tensor)",
    lambda *inputs: launcher(inputs[0]).gat_backward(
        Csr(*inputs[12:]), inputs[:3], inputs[3:8], inputs[8], _scoring(*inputs[9:12])
    ),
    lambda *inputs: tuple(torch.empty_like(operand) for operand in inputs[:3]),
)
# with the transposed graph, what its backward needs is kept
_gat = define(
    f"gat({_OPERANDS}, {_SCORING}, {GRAPH}, {TURNED}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    lambda *inputs: launcher(inputs[0]).gat(
        Csr(*inputs[6:10]), *inputs[:3], _scoring(*inputs[3:6]), inputs[10] is not None
    ),
    _fake,
    _save,
    _back,
)
