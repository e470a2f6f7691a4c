"""SpMM: ``y[i] = epilogue(reduce over the edges j → i of weight · col_scale[j] · x[j])``.

Legend: N destinations, M sources, E edges, F features, H heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from runner.errors import UserError, suggestion
from runner.kernels import reference
from runner.kernels.adjacency import Adjacency, Csr
from runner.kernels.cpu import launch as cpu_launch
from runner.kernels.ops.backend import has_kernels
from runner.kernels.ops.checks import check_features, check_shape, num_heads_of
from runner.kernels.ops.registry import GRAPH, TURNED, Gradients, define, is_direct, launcher
from runner.kernels.parameters import Epilogue

REDUCERS = ("sum", "mean", "max", "min")
_SLOPES = {"elu": 1.0, "leaky_relu": 0.01}  # torch's defaults


def spmm(
    adjacency: Adjacency,
    x: Tensor,
    weight: Tensor | None = None,
    *,
    reduce: str = "sum",
    row_scale: Tensor | None = None,
    col_scale: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str = "identity",
    slope: float | None = None,
    dropout: float = 0.0,
    seed: int = 0,
) -> Tensor:
    """Aggregate neighbours; differentiable in x, weight, both scales and bias.

    Args:
        adjacency: N × M; A[i, j] is the edge j → i.
        x: float32, float64 or bfloat16 (summed in float32), [M, …]; may be strided.
        weight: by edge id: [E], [E, H] for x [M, H, …], or [E, …] with the trailing dimensions of x; None: 1.
        reduce: sum, mean, max, min. A destination without edges gets 0; a tie of max or min goes to its first entry, which in a graph made
            from edges is the lowest source, then edge id.
        row_scale: [N], multiplies the reduced value.
        col_scale: [M], multiplies x.
        bias: trailing dimensions of x, added after the scale.
        activation: identity, relu, elu, leaky_relu.
        slope: of leaky_relu below 0 (default 0.01), or elu's alpha (default 1); at least 0.
        dropout: probability that an element of the result is dropped, after the activation; the rest is scaled by 1 / (1 - dropout).
        seed: the same seed drops the same elements.

    Returns:
        [N, …], dtype of x.

    Raises:
        UserError: where a shape, dtype, device or name doesn't fit; it names the argument and both shapes.
    """
    is_plain = row_scale is None and col_scale is None and bias is None and activation == "identity" and not dropout
    if is_plain and not _needs_gradient(x, weight) and is_direct((x, weight)):
        ready = _ready(adjacency, x, weight, reduce)
        if ready is not None:
            return ready(x, weight)
    epilogue = Epilogue(
        row_scale, bias, activation, _SLOPES.get(activation, 0.0) if slope is None else slope, dropout, seed
    )
    num_heads = _check(adjacency, x, weight, reduce, col_scale, epilogue)
    if not has_kernels(x.device) or not x.shape[1:].numel():
        return reference.spmm(adjacency, x, _broadcast(weight, x), reduce, col_scale, epilogue)
    if reduce == "mean":
        mean = adjacency.mean_scale(x.dtype)
        row_scale = mean if row_scale is None else mean * row_scale
    flat = x.reshape(x.shape[0], x.shape[1:].numel())
    weight = None if weight is None else weight.reshape(adjacency.num_edges, num_heads).contiguous()
    tensors = [entry if entry is None else entry.contiguous() for entry in (weight, col_scale, row_scale)]
    bias = None if bias is None else bias.reshape(-1).contiguous()
    needs_turned = torch.is_grad_enabled() and (x.requires_grad or (col_scale is not None and col_scale.requires_grad))
    turned: tuple[Tensor | None, ...] = adjacency.transposed.csr if needs_turned else (None,) * 4
    told = (activation, epilogue.slope, dropout, seed, adjacency.reach)
    if reduce in ("sum", "mean"):
        y = _spmm(flat, *tensors, bias, *told, *adjacency.csr, *turned)
    else:
        entries = adjacency.turned_entries if needs_turned else None
        needs_places = torch.is_grad_enabled() and any(
            entry is not None and entry.requires_grad for entry in (flat, *tensors, bias)
        )
        y, _ = _extremum(flat, *tensors, bias, reduce, needs_places, *told, *adjacency.csr, *turned, entries)
    return y.reshape(y.shape[0], *x.shape[1:])


def _ready(adjacency: Adjacency, x: Tensor, weight: Tensor | None, reduce: str) -> Callable[..., Tensor] | None:
    """Return the prepared call for operands like these, made and checked at the first of their kind."""
    key = _key(x, weight, reduce)
    if key not in adjacency.ready:
        _check(adjacency, x, weight, reduce, None, Epilogue())
        adjacency.ready[key] = _prepare(adjacency, x, weight, reduce)
    return adjacency.ready[key]


def _key(x: Tensor, weight: Tensor | None, reduce: str) -> tuple[Any, ...]:
    """What a prepared call depends on."""
    if weight is None:
        return reduce, x.shape, x.stride(), x.dtype, x.device
    return reduce, x.shape, x.stride(), x.dtype, x.device, weight.shape, weight.stride(), weight.dtype, weight.device


def _needs_gradient(x: Tensor, weight: Tensor | None) -> bool:
    return torch.is_grad_enabled() and (x.requires_grad or (weight is not None and weight.requires_grad))


def _prepare(adjacency: Adjacency, x: Tensor, weight: Tensor | None, reduce: str) -> Callable[..., Tensor] | None:
    """Return a call for checked operands of these shapes and strides, where they can be handed on as they are; else None.

    Small graphs need it: checking and converting take longer than their kernels.
    """
    is_flat = x.shape[1:].numel() > 0 and (x.is_contiguous() or (x.dim() == 2 and x.stride(1) == 1))
    can_take = is_flat and (weight is None or weight.is_contiguous())
    if not can_take or x.device.type != "cpu" or not has_kernels(x.device):
        return None
    num_heads = 1 if weight is None else weight.shape[1:].numel()
    shaped = None if weight is None else weight.detach().reshape(adjacency.num_edges, num_heads)
    row_scale = adjacency.mean_scale(x.dtype) if reduce == "mean" else None
    reduce = "sum" if reduce == "mean" else reduce
    return cpu_launch.ready_spmm(adjacency.csr, x, shaped, reduce, row_scale, adjacency.reach)


def _check(
    adjacency: Adjacency, x: Tensor, weight: Tensor | None, reduce: str, col_scale: Tensor | None, epilogue: Epilogue
) -> int:
    """Check everything; returns the number of weights an edge."""
    if reduce not in REDUCERS:
        raise UserError(f"reduce is '{reduce}': {suggestion(reduce, REDUCERS)}")
    check_features("x", x, adjacency.num_src, adjacency)
    if x.dim() < 2:
        raise UserError(
            f"x has shape {list(x.shape)}: a row of features for each of the {adjacency.num_src} sources is needed"
        )
    epilogue.check()
    for name, given, wanted in (
        ("row_scale", epilogue.row_scale, (adjacency.num_dst,)),
        ("col_scale", col_scale, (adjacency.num_src,)),
        ("bias", epilogue.bias, tuple(x.shape[1:])),
    ):
        if given is not None:
            check_shape(name, given, wanted, "x", x)
    return 1 if weight is None else num_heads_of(weight, x, adjacency)


def _broadcast(weight: Tensor | None, x: Tensor) -> Tensor | None:
    """Bring a weight into the form that broadcasts against messages [E, …]: [E], [E, H], or [E, …]."""
    if weight is None or weight.shape[1:] == x.shape[1:]:
        return weight
    width = weight.shape[1:].numel()
    return weight.reshape(-1) if width == 1 else weight.reshape(-1, width)


# --- the ops: arguments are flat and checked -----------------------------------------------------------------------------

_EPILOGUE = "str activation, float slope, float dropout, int seed"
_TOLD = f"{_EPILOGUE}, int reach"
_GRAPHS = f"{GRAPH}, {TURNED}"
_OPERANDS = "Tensor x, Tensor? weight, Tensor? col_scale, Tensor? row_scale, Tensor? bias"


def _run_spmm(x: Tensor, weight: Any, col_scale: Any, row_scale: Any, bias: Any, *rest: Any) -> Tensor:
    epilogue, reach, csr = Epilogue(row_scale, bias, *rest[:4]), rest[4], Csr(*rest[5:9])
    y: Tensor = launcher(x).spmm(csr, x, weight, col_scale, epilogue, reach=reach)[0]
    return y


def _fake_spmm(x: Tensor, _weight: Any, _col_scale: Any, _row_scale: Any, _bias: Any, *rest: Any) -> Tensor:
    return x.new_empty(rest[5].shape[0] - 1, x.shape[1])


def _save_spmm(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    y, places = output if isinstance(output, tuple) else (output, None)
    if places is not None:
        ctx.mark_non_differentiable(places)
    tensors, rest = inputs[:5], inputs[5:]
    ctx.told = tuple(entry for entry in rest if not isinstance(entry, Tensor) and entry is not None)
    graphs = rest[len(ctx.told) :]
    x = tensors[0] if any(ctx.needs_input_grad[1:4]) else None
    ctx.save_for_backward(x, *tensors[1:4], y if _is_curved(ctx) else None, places, *graphs)


def _is_curved(ctx: Any) -> bool:
    activation, _, dropout, _, _ = ctx.told[-5:]
    return activation != "identity" or dropout > 0


def _through_epilogue(ctx: Any, y: Tensor | None, dy: Tensor) -> Tensor:
    """Gradient of what went into activation and dropout."""
    dy = dy.contiguous()
    return dy if y is None else _epilogue_backward(dy, y, *ctx.told[-5:-1])


def weighted_sum(
    x: Tensor,
    weight: Tensor | None,
    graph: Sequence[Tensor | None],
    *,
    col_scale: Tensor | None = None,
    row_scale: Tensor | None = None,
    reach: int = 0,
) -> Tensor:
    """Return a sum over each row's edges for a backward: flat and checked arguments, no epilogue, no gradient of its own."""
    y: Tensor = _spmm(
        x, weight, col_scale, row_scale, None, "identity", 0.0, 0.0, 0, reach, *graph, None, None, None, None
    )
    return y


def by_edge(graph: Any) -> tuple[Any, ...]:
    """Return the graph whose sources are the edges themselves: a sum over it adds up values per edge."""
    indptr, indices, entry_ids, row_blocks = graph
    if entry_ids is None:
        entry_ids = torch.arange(indices.shape[0], dtype=indices.dtype, device=indices.device)
    return indptr, entry_ids, None, row_blocks


def _back_spmm(ctx: Any, dy: Tensor) -> Gradients:
    x, weight, col_scale, row_scale, y, _, *graphs = ctx.saved_tensors
    graph, turned, reach = graphs[:4], graphs[4:8], ctx.told[-1]
    needs_x, needs_weight, needs_col, needs_row, needs_bias = ctx.needs_input_grad[:5]
    dz = _through_epilogue(ctx, y, dy)
    dx = dweight = dcol = drow = None
    if needs_col:
        unscaled = weighted_sum(dz, weight, turned, col_scale=row_scale, reach=reach)
        dcol = (x * unscaled).sum(1)
        dx = unscaled * col_scale.unsqueeze(1) if needs_x else None
    elif needs_x:
        dx = weighted_sum(dz, weight, turned, col_scale=row_scale, row_scale=col_scale, reach=reach)
    if needs_weight:
        left = x if col_scale is None else x * col_scale.unsqueeze(1)
        right = dz if row_scale is None else dz * row_scale.unsqueeze(1)
        dweight = torch.ops.gearsail.sddmm_dot(left, right, weight.shape[1], *graph)
    if needs_row:
        drow = (dz * weighted_sum(x, weight, graph, col_scale=col_scale, reach=reach)).sum(1)
    return dx, dweight, dcol, drow, dz.sum(0) if needs_bias else None


_spmm = define(f"spmm({_OPERANDS}, {_TOLD}, {_GRAPHS}) -> Tensor", _run_spmm, _fake_spmm, _save_spmm, _back_spmm)


def _run_extremum(
    x: Tensor, weight: Any, col_scale: Any, row_scale: Any, bias: Any, reduce: str, with_places: bool, *rest: Any
) -> tuple[Tensor, Tensor]:
    epilogue, reach, csr = Epilogue(row_scale, bias, *rest[:4]), rest[4], Csr(*rest[5:9])
    y, places = launcher(x).spmm(csr, x, weight, col_scale, epilogue, reduce, with_places, reach)
    return y, csr.indices.new_empty(0) if places is None else places


def _fake_extremum(x: Tensor, _w: Any, _c: Any, _r: Any, _b: Any, _reduce: str, with_places: bool, *rest: Any) -> Any:
    y = x.new_empty(rest[5].shape[0] - 1, x.shape[1])
    return y, rest[6].new_empty(y.shape if with_places else (0,))


def _back_extremum(ctx: Any, dy: Tensor, _: Any) -> Gradients:
    x, weight, col_scale, row_scale, y, places, *graphs = ctx.saved_tensors
    graph, turned, entries = graphs[:4], graphs[4:8], graphs[8]
    needs_x, needs_weight, needs_col, needs_row, needs_bias = ctx.needs_input_grad[:5]
    dz = _through_epilogue(ctx, y, dy)
    dx = dweight = dcol = drow = None
    if needs_x or needs_col:
        unscaled = _extremum_grad_x(dz, weight, row_scale, None if needs_col else col_scale, places, entries, *turned)
        dx = unscaled if not needs_col else unscaled * col_scale.unsqueeze(1)
        dcol = (x * unscaled).sum(1) if needs_col else None
    if needs_weight:
        dweight = _extremum_grad_weight(dz, x, weight.shape[1], row_scale, col_scale, places, *graph)
    if needs_row:
        told = ("identity", 0.0, 0.0, 0, ctx.told[-1])
        reduced, _ = _extremum(x, weight, col_scale, None, None, ctx.told[0], False, *told, *graph, *[None] * 5)
        drow = (dz * reduced).sum(1)
    return dx if needs_x else None, dweight, dcol, drow, dz.sum(0) if needs_bias else None


_extremum = define(
    f"spmm_extremum({_OPERANDS}, str reduce, bool with_places, {_TOLD}, {_GRAPHS}, Tensor? turned_entries) -> (Tensor, Tensor)",
    _run_extremum,
    _fake_extremum,
    _save_spmm,
    _back_extremum,
)

_epilogue_backward = define(
    f"epilogue_backward(Tensor dy, Tensor y, {_EPILOGUE}) -> Tensor",
    lambda dy, y, *told: launcher(y).epilogue_backward(dy, y, Epilogue(None, None, *told)),
    lambda _dy, y, *_: torch.empty_like(y),
)

_extremum_grad_x = define(
    "spmm_extremum_grad_x(Tensor dy, Tensor? weight, Tensor? row_scale, Tensor? col_scale, Tensor places, Tensor entries, "
    "Tensor indptr, Tensor indices, Tensor? entry_ids, Tensor row_blocks) -> Tensor",
    lambda dy, weight, row_scale, col_scale, places, entries, *turned: launcher(dy).extremum_grad_x(
        Csr(*turned), entries, places, dy, weight, row_scale, col_scale
    ),
    lambda dy, _w, _r, _c, _p, _e, indptr, *_: dy.new_empty(indptr.shape[0] - 1, dy.shape[1]),
)

_extremum_grad_weight = define(
    "spmm_extremum_grad_weight(Tensor dy, Tensor x, int num_heads, Tensor? row_scale, Tensor? col_scale, Tensor places, "
    "Tensor indptr, Tensor indices, Tensor? entry_ids, Tensor row_blocks) -> Tensor",
    lambda dy, x, num_heads, row_scale, col_scale, places, *graph: launcher(dy).extremum_grad_weight(
        Csr(*graph), places, dy, x, num_heads, row_scale, col_scale
    ),
    lambda dy, _x, num_heads, _r, _c, _p, _indptr, indices, *_: dy.new_empty(indices.shape[0], num_heads),
)
