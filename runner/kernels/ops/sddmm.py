"""SDDMM: a value for each edge from the rows of its ends.

Legend: N destinations, M sources, E edges, F features, H heads, C channels a head.
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
from runner.kernels.ops.registry import Gradients, define, launcher
from runner.kernels.ops.spmm import by_edge, weighted_sum

OPERATIONS = ("dot", "add", "sub", "mul")


def sddmm(adjacency: Adjacency, u: Tensor, v: Tensor, operation: str = "dot") -> Tensor:
    """Combine ``u[source]`` and ``v[destination]`` at each edge; differentiable in both.

    Args:
        adjacency: N × M.
        u: float32, float64 or bfloat16 [M, …], may be strided.
        v: [N, …], trailing dimensions, dtype and device of u.
        operation: dot (over the last dimension), add, sub, mul.

    Returns:
        By edge id: [E, …] with the trailing dimensions of u; for dot without the last.

    Raises:
        UserError: where a shape, dtype, device or name doesn't fit; it names the argument and both shapes.
    """
    if operation not in OPERATIONS:
        raise UserError(f"operation is '{operation}': {suggestion(operation, OPERATIONS)}")
    check_features("u", u, adjacency.num_src, adjacency)
    check_features("v", v, adjacency.num_dst, adjacency, like=u)
    if u.shape[1:] != v.shape[1:]:
        raise UserError(f"u has shape {list(u.shape)}, v {list(v.shape)}: all but the first dimension must be the same")
    if u.dim() < 2:
        raise UserError(
            f"u has shape {list(u.shape)}: a row of features for each of the {adjacency.num_src} sources is needed"
        )
    if not has_kernels(u.device) or not u.shape[1:].numel():
        sides = reference.gather(adjacency, u, "u"), reference.gather(adjacency, v, "v")
        combined = reference.edge_apply(operation, *sides)
        return combined.squeeze(-1) if operation == "dot" else combined
    trailing = u.shape[1:]
    flat = (u.reshape(u.shape[0], trailing.numel()), v.reshape(v.shape[0], trailing.numel()))
    turned = adjacency.transposed.csr if torch.is_grad_enabled() and u.requires_grad else (None,) * 4
    if operation == "dot":
        found: Tensor = _dot(*flat, trailing[:-1].numel(), *adjacency.csr, *turned)
        return found.reshape(adjacency.num_edges, *trailing[:-1])
    found = _elementwise(*flat, operation, *adjacency.csr, *turned)
    return found.reshape(adjacency.num_edges, *trailing)


_GRAPHS = (
    "Tensor indptr, Tensor indices, Tensor? entry_ids, Tensor row_blocks, "
    "Tensor? turned_indptr=None, Tensor? turned_indices=None, Tensor? turned_ids=None, Tensor? turned_blocks=None"
)


def _save_dot(ctx: Any, inputs: tuple[Any, ...], _: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2], *inputs[3:])


def _back_dot(ctx: Any, dout: Tensor) -> Gradients:
    u, v, *graphs = ctx.saved_tensors
    dout = dout.contiguous()
    du = weighted_sum(v, dout, graphs[4:]) if ctx.needs_input_grad[0] else None
    return du, weighted_sum(u, dout, graphs[:4]) if ctx.needs_input_grad[1] else None


_dot = define(
    f"sddmm_dot(Tensor u, Tensor v, int num_heads, {_GRAPHS}) -> Tensor",
    lambda u, v, num_heads, *graphs: launcher(u).sddmm(Csr(*graphs[:4]), u, v, "dot", num_heads),
    lambda u, _v, num_heads, _indptr, indices, *_: u.new_empty(indices.shape[0], num_heads),
    _save_dot,
    _back_dot,
)


def _save_elementwise(ctx: Any, inputs: tuple[Any, ...], _: Tensor) -> None:
    u, v, ctx.operation, *graphs = inputs
    sides = (u, v) if ctx.operation == "mul" else (None, None)
    ctx.save_for_backward(*sides, *graphs)


def _back_elementwise(ctx: Any, dout: Tensor) -> Gradients:
    u, v, *graphs = ctx.saved_tensors
    dout = dout.contiguous()
    graph, turned = graphs[:4], graphs[4:]
    du = dv = None
    if ctx.operation == "mul":
        du = weighted_sum(v, dout, turned) if ctx.needs_input_grad[0] else None
        dv = weighted_sum(u, dout, graph) if ctx.needs_input_grad[1] else None
        return du, dv
    if ctx.needs_input_grad[0]:
        du = weighted_sum(dout, None, by_edge(turned))
    if ctx.needs_input_grad[1]:
        dv = weighted_sum(dout, None, by_edge(graph))
        dv = -dv if ctx.operation == "sub" else dv
    return du, dv


_elementwise = define(
    f"sddmm(Tensor u, Tensor v, str operation, {_GRAPHS}) -> Tensor",
    lambda u, v, operation, *graphs: launcher(u).sddmm(Csr(*graphs[:4]), u, v, operation, 1),
    lambda u, _v, _operation, _indptr, indices, *_: u.new_empty(indices.shape[0], u.shape[1]),
    _save_elementwise,
    _back_elementwise,
)
