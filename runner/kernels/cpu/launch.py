"""The kernels on CPU tensors: outputs are allocated, pointers passed. Arguments have been checked.

Legend: N rows, M columns, E edges, F features, H heads, C channels a head. Every ``[E, …]`` is in the order of the edge ids.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from runner.kernels.adjacency import Csr
from runner.kernels.cpu.library import SpmmCall, function, last_cache_bytes
from runner.kernels.cpu.memory import empty
from runner.kernels.launching import OPERATION, PER_HEAD, REDUCE, activation_of, walkable, weighting
from runner.kernels.parameters import SCORE, Epilogue, Scoring, sum_dtype

# Features a slice, edges a row of X, from which packing paid: 2 cores, AVX-512, 32 MB of L3; 50 000 × 256 floats, 600 000 edges at random:
# 22 ms instead of 38; 20 000 × 128, which half fit: 3.5 instead of 3.1 (measured).
_SLICE = 32
_MIN_REUSE = 4
_MAX_LANES = 16
_MAX_HEADS = 2  # of a weight per head: so many lanes the narrowest vectors have, at 64 bits and without AVX
_MAX_PARTS = 64  # partial sums of a gradient that every row adds to


def spmm(
    csr: Csr, x: Tensor, weight: Tensor | None, col_scale: Tensor | None, epilogue: Epilogue, reduce: str = "sum",
    with_places: bool = False, reach: int = 0,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Reduce ``weight · col_scale[source] · x[source]`` over each row's edges, then the epilogue.

    Args:
        csr: N × M.
        x: float [M, F].
        weight: [E, H] with H in {1, …, F} a divisor of F, or None.
        col_scale: [M], or None.
        epilogue: see there.
        reduce: sum, max, min.
        with_places: whether max and min also return the entry that each output took, [N, F], -1 for none.
        reach: see :attr:`runner.kernels.adjacency.Adjacency.reach`.
    """
    x = walkable(x)
    num_heads = 1 if weight is None else weight.shape[1]
    variant = (("REDUCE", REDUCE[reduce]), ("PLACES", int(with_places)))
    run = _spmm_call(csr, x, num_heads, weight is not None, col_scale, epilogue, reach, *variant)
    return run(x, weight)


def ready_spmm(
    csr: Csr, x: Tensor, weight: Tensor | None, reduce: str, row_scale: Tensor | None, reach: int
) -> Callable[[Tensor, Tensor | None], Tensor]:
    """Return :func:`spmm`, with a row scale at most, for operands of these shapes and strides, all done but the call itself.

    Args:
        csr, reduce, row_scale, reach: as there.
        x: [M, …], rows of neighbouring elements.
        weight: [E, H], contiguous, or None; the call takes it in any shape.
    """
    flat = x.detach().flatten(1)
    num_heads = 1 if weight is None else weight.shape[1]
    variant = (("REDUCE", REDUCE[reduce]), ("PLACES", 0))
    epilogue = Epilogue(row_scale)
    run = _spmm_call(csr, flat, num_heads, weight is not None, None, epilogue, reach, *variant, trailing=x.shape[1:])
    return lambda x, weight: run(x, weight)[0]


def _spmm_call(
    csr: Csr, x: Tensor, num_heads: int, is_weighted: bool, col_scale: Tensor | None, epilogue: Epilogue, reach: int,
    *variant: tuple[str, int], trailing: tuple[int, ...] | None = None,
) -> Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]:  # fmt: skip
    """Return what takes x and weight and calls the kernel; ``trailing`` dimensions of the result are those of x unless given."""
    num_rows, num_features = csr.indptr.numel() - 1, x.shape[1]
    with_places = ("PLACES", 1) in variant
    kind = weighting(is_weighted, col_scale, num_heads, num_features)
    can_pack = kind < PER_HEAD or (kind == PER_HEAD and num_heads <= _MAX_HEADS)
    room = _rows_to_pack(csr, x, reach) if can_pack else 0
    kernel = function("spmm", "spmm", x.dtype, csr.indices.dtype, *variant, ("WEIGHTING", kind))
    activation, *numbers = activation_of(epilogue)
    call = SpmmCall(
        *_graph(csr), csr.indices.numel(), x.shape[0], x.stride(0), num_features, num_heads, _pointer(epilogue.row_scale),
        _pointer(col_scale), _pointer(epilogue.bias), activation, *numbers, _SLICE, _pointer(epilogue.addend),
        _pointer(epilogue.addend_scale),
    )  # fmt: skip
    held = (call, csr, col_scale, epilogue)  # what is pointed to
    address, dtype, index_dtype = ctypes.addressof(call), x.dtype, csr.indices.dtype
    shape = (num_rows, *(trailing or (num_features,)))

    def run(x: Tensor, weight: Tensor | None, _held: Any = held) -> tuple[Tensor, Tensor | None]:
        y = empty(*shape, dtype=dtype)
        places = torch.empty(shape, dtype=index_dtype, device="cpu") if with_places else None
        packed = torch.empty(room, _SLICE + _MAX_LANES, dtype=dtype, device="cpu") if room else None
        pointers = (x.data_ptr(), _pointer(weight), y.data_ptr(), _pointer(places), _pointer(packed))
        kernel(address, *pointers, torch.get_num_threads())
        return y, places

    return run


def _rows_to_pack(csr: Csr, x: Tensor, reach: int) -> int:
    """Return M where slices of x are to be packed: its rows don't fit the cache, a slice of them does, and edges reuse them; else 0."""
    num_rows, num_features = x.shape
    row_bytes, cache_bytes = num_features * x.element_size(), last_cache_bytes()
    if (
        num_features < 2 * _SLICE
        or reach * row_bytes <= cache_bytes * 3 // 8
        or csr.indices.numel() < _MIN_REUSE * num_rows
    ):
        return 0
    return 0 if num_rows * _SLICE * x.element_size() > cache_bytes else num_rows


def finish(x: Tensor, epilogue: Epilogue) -> Tensor:
    """Return the epilogue of x [N, F], its rows' elements side by side."""
    x = walkable(x)
    y = _new(*x.shape, like=x)
    run = function("elementwise", "finish", x.dtype, None)
    run(
        _pointer(x), _pointer(y), *x.shape, _pointer(epilogue.bias), _pointer(epilogue.addend), _pointer(epilogue.addend_scale),
        *activation_of(epilogue), x.stride(0), torch.get_num_threads(),
    )  # fmt: skip
    return y


def drop_entries(csr: Csr, values: Tensor | None, is_turned: bool, probability: float, seed: int) -> Tensor:
    """Return the values [nnz] of a sparse matrix with dropout: entry (row, column) is kept as element (row, column) of a dense one.

    Args:
        csr: of the matrix, or, ``is_turned``, of its transpose; entry k has value k.
        values: float32 [nnz], or None: all are 1.
        probability, seed: of the dropout.
    """
    out = torch.empty(csr.indices.numel(), dtype=torch.float32, device="cpu")
    run = function("elementwise", "drop_entries", torch.float32, csr.indices.dtype)
    num_rows = csr.indptr.numel() - 1
    run(
        csr.indptr.data_ptr(), csr.indices.data_ptr(), num_rows, _pointer(values), int(is_turned), probability, seed,
        _pointer(out), torch.get_num_threads(),
    )  # fmt: skip
    return out


def epilogue_backward(dy: Tensor, y: Tensor, epilogue: Epilogue) -> Tensor:
    """Return the gradient, [N, F], of what went into activation and dropout, from y and its gradient."""
    dz = _new(*y.shape, like=y)
    run = function("elementwise", "epilogue_backward", y.dtype, None)
    run(_pointer(dy), _pointer(y), *y.shape, *activation_of(epilogue), _pointer(dz), torch.get_num_threads())
    return dz


def extremum_grad_x(
    turned: Csr, entries: Tensor, places: Tensor, dy: Tensor, weight: Tensor | None, row_scale: Tensor | None,
    col_scale: Tensor | None,
) -> Tensor:  # fmt: skip
    """Return the gradient of x, [M, F], of a max or min.

    Args:
        turned: the transposed graph; ``entries`` [E] are the graph's entries in its order.
        places: [N, F], as :func:`spmm` gave them.
        dy: [N, F], gradient of what went into the activation.
        weight, row_scale, col_scale: as in the forward.
    """
    dx = _new(turned.indptr.numel() - 1, dy.shape[1], like=dy)
    run = function("extremum", "extremum_grad_x", dy.dtype, turned.indices.dtype)
    run(
        *_graph(turned), _pointer(entries), _pointer(places), _pointer(dy), dy.shape[1], _pointer(weight),
        1 if weight is None else weight.shape[1], _pointer(row_scale), _pointer(col_scale), _pointer(dx),
        torch.get_num_threads(),
    )  # fmt: skip
    return dx


def extremum_grad_weight(
    csr: Csr, places: Tensor, dy: Tensor, x: Tensor, num_heads: int, row_scale: Tensor | None, col_scale: Tensor | None
) -> Tensor:
    """Return the gradient of the weights, [E, H], of a max or min; arguments as in :func:`extremum_grad_x`."""
    x = walkable(x)
    dweight = _new(csr.indices.numel(), num_heads, like=dy)
    run = function("extremum", "extremum_grad_weight", dy.dtype, csr.indices.dtype)
    run(
        *_graph(csr), _pointer(places), _pointer(dy), _pointer(x), x.stride(0), dy.shape[1], num_heads,
        _pointer(row_scale), _pointer(col_scale), _pointer(dweight), torch.get_num_threads(),
    )  # fmt: skip
    return dweight


def sddmm(csr: Csr, u: Tensor, v: Tensor, operation: str, num_heads: int) -> Tensor:
    """Return dot (per head, [E, H]), or sum, difference, product ([E, F]) of ``u[source]`` [M, F] and ``v[destination]`` [N, F]."""
    u, v = walkable(u), walkable(v)
    out = _new(csr.indices.numel(), num_heads if operation == "dot" else u.shape[1], like=u)
    run = function("sddmm", "sddmm", u.dtype, csr.indices.dtype, ("OPERATION", OPERATION[operation]))
    run(
        *_graph(csr), csr.indices.numel(), _pointer(u), u.stride(0), _pointer(v), v.stride(0), u.shape[1], num_heads, _pointer(out),
        torch.get_num_threads(),
    )  # fmt: skip
    return out


def edge_softmax(csr: Csr, logits: Tensor) -> Tensor:
    """Return the softmax of logits [E, H] over the edges of each row."""
    out = _new(*logits.shape, like=logits)
    run = function("softmax", "edge_softmax", logits.dtype, csr.indices.dtype)
    run(*_rows_only(csr), _pointer(logits), logits.shape[1], _pointer(out), torch.get_num_threads())
    return out


def edge_softmax_backward(csr: Csr, out: Tensor, dout: Tensor) -> Tensor:
    """Return the gradient of the logits, [E, H]."""
    dlogits = _new(*out.shape, like=out)
    run = function("softmax", "edge_softmax_backward", out.dtype, csr.indices.dtype)
    run(*_rows_only(csr), _pointer(out), _pointer(dout), out.shape[1], _pointer(dlogits), torch.get_num_threads())
    return dlogits


def gat(
    csr: Csr, value: Tensor, key: Tensor, query: Tensor, scoring: Scoring, keeps: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return (out [N, H, C], then for a backward, in the dtype of the sums: largest score [N, H], sum of exponentials [N, H], and over
    the edges with ``key + query > 0`` the sum of dropped weights times values [N, H, C] and of weights [N, H]).

    Args:
        csr: N × M.
        value: [M, H, C].
        key, query: [M, H], [N, H].
        scoring: of gat.
        keeps: whether a backward follows; without, the fourth is empty.
    """
    num_rows, (num_heads, channels) = csr.indptr.numel() - 1, value.shape[1:]
    out = _new(num_rows, num_heads, channels, like=value)
    sums = sum_dtype(value.dtype)
    high, total, positive_share = (_new(num_rows, num_heads, like=out, dtype=sums) for _ in range(3))
    positive = _new(*(out.shape if keeps else (0,)), like=out, dtype=sums)
    saved = (out, high, total, positive, positive_share)
    run = function("gat", "gat", value.dtype, csr.indices.dtype)
    run(
        *_graph(csr), num_rows, value.shape[0], csr.indices.numel(), *map(_pointer, (value, key, query)), num_heads, channels,
        *_gat_numbers(scoring), *map(_pointer, saved[:3]), _pointer(positive) if keeps else None, _pointer(positive_share),
        torch.get_num_threads(),
    )  # fmt: skip
    return saved


def gat_backward(
    turned: Csr, operands: tuple[Tensor, Tensor, Tensor], saved: tuple[Tensor, ...], dout: Tensor, scoring: Scoring
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of value, key and query; ``saved`` is what :func:`gat` gave."""
    value, _, query = operands
    gradients = tuple(_new(*operand.shape, like=operand) for operand in operands)
    run = function("gat", "gat_backward", value.dtype, turned.indices.dtype)
    run(
        *_graph(turned), query.shape[0], value.shape[0], turned.indices.numel(), *map(_pointer, operands), *value.shape[1:],
        *_gat_numbers(scoring), *map(_pointer, saved), _pointer(dout), *map(_pointer, gradients), torch.get_num_threads(),
    )  # fmt: skip
    return gradients  # type: ignore[return-value]


def _gat_numbers(scoring: Scoring) -> tuple[float, float, int]:
    return scoring.slope, scoring.dropout, scoring.seed


def attention(
    csr: Csr, value: Tensor, key: Tensor | None, query: Tensor, vector: Tensor | None, scoring: Scoring
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (out [N, H, C], largest score [N, H], sum of exponentials [N, H]), the last two in the dtype of the sums.

    Args:
        csr: N × M.
        value: [M, H, C].
        key: gatv2: None, it is ``value``; dot: [M, H, C].
        query: [N, H, C].
        vector: gatv2: [H, C]; dot: None.
        scoring: of gatv2 or dot.
    """
    num_rows, (num_heads, channels) = csr.indptr.numel() - 1, value.shape[1:]
    out = _new(num_rows, num_heads, channels, like=value)
    high = torch.empty(num_rows, num_heads, dtype=sum_dtype(value.dtype), device="cpu")
    total = torch.empty_like(high)
    run = function("attention", "attention", value.dtype, csr.indices.dtype, ("SCORE", SCORE[scoring.score]))
    run(
        *_graph(csr), num_rows, value.shape[0], csr.indices.numel(), _pointer(value), _pointer(key), _pointer(query),
        _pointer(vector), num_heads, channels,
        *scoring[1:], _pointer(out), _pointer(high), _pointer(total), torch.get_num_threads(),
    )  # fmt: skip
    return out, high, total


def attention_backward_sources(
    turned: Csr, operands: tuple[Tensor, Tensor | None, Tensor, Tensor | None], saved: tuple[Tensor, Tensor, Tensor],
    dout: Tensor, scoring: Scoring,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Return (dscore [E, H], dvalue, dkey): the gradient of each edge's score, and what a source gathers from its out-edges.

    ``dscore`` is by entry of ``turned``, in the dtype of the sums: written in order, since to scatter it costs more than to gather it
    afterwards; ``saved`` is what :func:`attention` gave.
    """
    value, key, query, vector = operands
    out, high, total = saved
    num_heads, channels = value.shape[1:]
    dvalue = _new(*value.shape, like=value)
    dkey = None if key is None else _new(*key.shape, like=key)
    dscore = torch.empty(turned.indices.numel(), num_heads, dtype=high.dtype, device="cpu")
    stats = torch.empty(out.shape[0], 3, num_heads, dtype=high.dtype, device="cpu")
    score = ("SCORE", SCORE[scoring.score])
    run = function("attention", "attention_backward_sources", value.dtype, turned.indices.dtype, score)
    run(
        *_graph(turned), out.shape[0], value.shape[0], turned.indices.numel(), _pointer(value), _pointer(key),
        _pointer(query), _pointer(vector), num_heads, channels, *scoring[1:], _pointer(out),
        _pointer(dout), _pointer(high), _pointer(total), _pointer(stats),
        _pointer(dscore), _pointer(dvalue), _pointer(dkey), torch.get_num_threads(),
    )  # fmt: skip
    return dscore, dvalue, dkey


def attention_backward_destinations(
    csr: Csr, value: Tensor, query: Tensor, vector: Tensor, dscore: Tensor, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """Return gatv2's (dquery [N, H, C], dvector [H, C]); ``entry_ids`` of csr says where an entry's dscore lies."""
    num_heads, channels = value.shape[1:]
    dquery = _new(*query.shape, like=query)
    num_parts = min(_MAX_PARTS, csr.row_blocks.numel() - 1)
    parts = torch.zeros(num_parts, num_heads, channels, dtype=torch.float64, device="cpu")
    score = ("SCORE", SCORE[scoring.score])
    run = function("attention", "attention_backward_destinations", value.dtype, csr.indices.dtype, score)
    run(
        *_graph(csr), query.shape[0], value.shape[0], csr.indices.numel(), _pointer(value), _pointer(query),
        _pointer(vector), num_heads, channels, scoring.slope,
        _pointer(dscore), _pointer(dquery), _pointer(parts), num_parts, torch.get_num_threads(),
    )  # fmt: skip
    return dquery, parts.sum(0).to(vector.dtype)


def _graph(csr: Csr) -> tuple[int, int, int | None, int, int]:
    indptr, indices, entry_ids, row_blocks = csr
    return (
        indptr.data_ptr(),
        indices.data_ptr(),
        _pointer(entry_ids),
        row_blocks.data_ptr(),
        row_blocks.numel() - 1,
    )


def _rows_only(csr: Csr) -> tuple[int, int | None, int, int, int]:
    indptr, _, entry_ids, blocks, num_blocks = _graph(csr)
    return indptr, entry_ids, blocks, num_blocks, csr.indices.numel()


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _new(*shape: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return empty(*shape, dtype=dtype or like.dtype)
