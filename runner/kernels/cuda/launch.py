"""The kernels on CUDA tensors: the same functions as :mod:`runner.kernels.cpu.launch`, and what a group of lanes takes on.

Legend: N rows, M columns, E edges, F features, H heads, C channels a head. Every ``[E, …]`` is in the order of the edge ids.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runner.kernels.adjacency import Csr
from runner.kernels.cuda import library
from runner.kernels.cuda.library import CHUNKS, GROUPS, INDEX, WIDE_LOAD_BYTES
from runner.kernels.launching import OPERATION, REDUCE, STORAGE, activation_of, walkable, weighting
from runner.kernels.parameters import SCORE, Epilogue, Scoring, sum_dtype

_THREADS = 128  # a block
MAX_BLOCKS = 2**20  # kernels stride over what is left, so that no count of rows is too large for a grid
MAX_SLICES = 2**15
_NUM_PARTS = 1024  # partial sums of a gradient that every row adds to


def spmm(
    csr: Csr, x: Tensor, weight: Tensor | None, col_scale: Tensor | None, epilogue: Epilogue, reduce: str = "sum",
    with_places: bool = False, reach: int = 0,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """See the CPU's; ``reach`` is of no use here."""
    del reach
    num_rows, num_features = _num_rows(csr), x.shape[1]
    y = empty(num_rows, num_features, like=x)
    places = empty(num_rows, num_features, like=csr.indices) if with_places else None
    num_heads = 1 if weight is None else weight.shape[1]
    x = walkable(x)
    vector = vector_length(x, y)
    group = group_of(-(-num_features // vector))
    slices = -(-num_features // (group * vector))
    kind = weighting(weight is not None, col_scale, num_heads, num_features)
    variant = {"REDUCE": REDUCE[reduce], "WEIGHTING": kind, "PLACES": int(with_places)}
    run = library.function("spmm", "spmm", **_types(x, csr), GROUP=group, VEC=vector, **variant)
    launch(
        x.device, run, num_rows * group, min(slices, MAX_SLICES), *graph_arguments(csr), pointer(x), x.stride(0), num_features,
        pointer(weight), num_heads, pointer(epilogue.row_scale), pointer(col_scale), pointer(epilogue.bias),
        *activation_of(epilogue), pointer(epilogue.addend), pointer(epilogue.addend_scale), pointer(y), pointer(places),
    )  # fmt: skip
    return y, places


def finish(x: Tensor, epilogue: Epilogue) -> Tensor:
    """See the CPU's."""
    x = walkable(x)
    y = empty(*x.shape, like=x)
    run = library.function("elementwise", "finish", STORAGE=STORAGE[x.dtype], INDEX="int", GROUP=1, VEC=1)
    launch(
        x.device, run, x.numel(), 1, pointer(x), pointer(y), *x.shape, pointer(epilogue.bias), pointer(epilogue.addend),
        pointer(epilogue.addend_scale), *activation_of(epilogue), x.stride(0),
    )  # fmt: skip
    return y


def drop_entries(csr: Csr, values: Tensor | None, is_turned: bool, probability: float, seed: int) -> Tensor:
    """See the CPU's."""
    counts = csr.indptr.diff()
    nodes = torch.arange(counts.numel(), dtype=csr.indices.dtype, device=counts.device)
    rows, columns = torch.repeat_interleave(nodes, counts, output_size=csr.indices.numel()), csr.indices
    if is_turned:
        rows, columns = columns, rows
    out = empty(columns.numel(), like=columns, dtype=torch.float32)
    run = library.function("elementwise", "drop_entries", STORAGE="float", INDEX=INDEX[columns.dtype], GROUP=1, VEC=1)
    launch(
        columns.device, run, columns.numel(), 1, pointer(rows), pointer(columns), columns.numel(), pointer(values),
        float(probability), seed, pointer(out),
    )  # fmt: skip
    return out


def epilogue_backward(dy: Tensor, y: Tensor, epilogue: Epilogue) -> Tensor:
    """See the CPU's."""
    dz = empty(*y.shape, like=y)
    run = library.function("elementwise", "epilogue_backward", STORAGE=STORAGE[y.dtype], INDEX="int", GROUP=1, VEC=1)
    launch(y.device, run, y.numel(), 1, pointer(dy), pointer(y), *y.shape, *activation_of(epilogue), pointer(dz))
    return dz


def extremum_grad_x(
    turned: Csr, entries: Tensor, places: Tensor, dy: Tensor, weight: Tensor | None, row_scale: Tensor | None,
    col_scale: Tensor | None,
) -> Tensor:  # fmt: skip
    """See the CPU's."""
    num_rows, num_features = _num_rows(turned), dy.shape[1]
    dx = empty(num_rows, num_features, like=dy)
    group = group_of(num_features)
    run = library.function("extremum", "extremum_grad_x", **_types(dy, turned), GROUP=group, VEC=1)
    launch(
        dy.device, run, num_rows * group, 1, *graph_arguments(turned), pointer(entries), pointer(places), pointer(dy), num_features,
        pointer(weight), 1 if weight is None else weight.shape[1], pointer(row_scale), pointer(col_scale), pointer(dx),
    )  # fmt: skip
    return dx


def extremum_grad_weight(
    csr: Csr, places: Tensor, dy: Tensor, x: Tensor, num_heads: int, row_scale: Tensor | None, col_scale: Tensor | None
) -> Tensor:
    """See the CPU's."""
    x = walkable(x)
    dweight = empty(csr.indices.numel(), num_heads, like=dy)
    group = group_of(num_heads)
    run = library.function("extremum", "extremum_grad_weight", **_types(dy, csr), GROUP=group, VEC=1)
    launch(
        dy.device, run, _num_rows(csr) * group, 1, *graph_arguments(csr), pointer(places), pointer(dy), pointer(x),
        x.stride(0), dy.shape[1],
        num_heads, pointer(row_scale), pointer(col_scale), pointer(dweight),
    )  # fmt: skip
    return dweight


def sddmm(csr: Csr, u: Tensor, v: Tensor, operation: str, num_heads: int) -> Tensor:
    """See the CPU's."""
    u, v = walkable(u), walkable(v)
    is_dot, num_features = operation == "dot", u.shape[1]
    out = empty(csr.indices.numel(), num_heads if is_dot else num_features, like=u)
    group = group_of(num_features // num_heads if is_dot else num_features)
    operation_number = OPERATION[operation]
    run = library.function("sddmm", "sddmm", **_types(u, csr), GROUP=group, VEC=1, OPERATION=operation_number)
    launch(
        u.device, run, _num_rows(csr) * (num_heads if is_dot else 1) * group, 1, *graph_arguments(csr), pointer(u), u.stride(0), pointer(v),
        v.stride(0), num_features, num_heads, pointer(out),
    )  # fmt: skip
    return out


def edge_softmax(csr: Csr, logits: Tensor) -> Tensor:
    """See the CPU's."""
    out = empty(*logits.shape, like=logits)
    group = group_of(_mean_degree(csr))
    run = library.function("softmax", "edge_softmax", **_types(logits, csr), GROUP=group, VEC=1)
    items = _num_rows(csr) * logits.shape[1]
    launch(logits.device, run, items * group, 1, *_rows_only(csr), pointer(logits), logits.shape[1], pointer(out))
    return out


def edge_softmax_backward(csr: Csr, out: Tensor, dout: Tensor) -> Tensor:
    """See the CPU's."""
    dlogits = empty(*out.shape, like=out)
    group = group_of(_mean_degree(csr))
    run = library.function("softmax", "edge_softmax_backward", **_types(out, csr), GROUP=group, VEC=1)
    items = _num_rows(csr) * out.shape[1]
    launch(
        out.device,
        run,
        items * group,
        1,
        *_rows_only(csr),
        pointer(out),
        pointer(dout),
        out.shape[1],
        pointer(dlogits),
    )
    return dlogits


def gat(
    csr: Csr, value: Tensor, key: Tensor, query: Tensor, scoring: Scoring, keeps: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See the CPU's."""
    num_rows, (num_heads, channels) = _num_rows(csr), value.shape[1:]
    out = empty(num_rows, num_heads, channels, like=value)
    sums = sum_dtype(value.dtype)
    high, total, positive_share = (empty(num_rows, num_heads, like=out, dtype=sums) for _ in range(3))
    positive = empty(*(out.shape if keeps else (0,)), like=out, dtype=sums)
    saved = (out, high, total, positive, positive_share)
    widths = _widths(value, csr)
    run = library.function("gat", "gat", **widths, KEEPS=int(keeps))
    launch(
        value.device, run, num_rows * num_heads * int(widths["GROUP"]), 1, *graph_arguments(csr),
        *map(pointer, (value, key, query)), num_heads,
        channels, *_gat_numbers(scoring), *map(pointer, saved),
    )  # fmt: skip
    return saved


def gat_backward(
    turned: Csr, operands: tuple[Tensor, Tensor, Tensor], saved: tuple[Tensor, ...], dout: Tensor, scoring: Scoring
) -> tuple[Tensor, Tensor, Tensor]:
    """See the CPU's."""
    value, _, query = operands
    out, high, total, positive, positive_share = saved
    dvalue, dkey, dquery = (empty(*operand.shape, like=operand) for operand in operands)
    dot = empty(*high.shape, like=high)
    shape = num_heads, _ = tuple(value.shape[1:])
    widths = _widths(value, turned)
    lanes = num_heads * int(widths["GROUP"])
    of_destinations = library.function("gat", "gat_backward_destinations", **widths, KEEPS=1)
    launch(
        value.device, of_destinations, query.shape[0] * lanes, 1, *map(pointer, (dout, out, total, positive, positive_share)),
        query.shape[0], *shape, float(scoring.slope), pointer(dot), pointer(dquery),
    )  # fmt: skip
    of_sources = library.function("gat", "gat_backward_sources", **widths, KEEPS=1)
    launch(
        value.device, of_sources, value.shape[0] * lanes, 1, *graph_arguments(turned), *map(pointer, operands), *shape,
        *_gat_numbers(scoring), *map(pointer, (dout, high, total, dot, dvalue, dkey)),
    )  # fmt: skip
    return dvalue, dkey, dquery


def attention(
    csr: Csr, value: Tensor, key: Tensor | None, query: Tensor, vector: Tensor | None, scoring: Scoring
) -> tuple[Tensor, Tensor, Tensor]:
    """See the CPU's."""
    num_rows, (num_heads, channels) = _num_rows(csr), value.shape[1:]
    out = empty(num_rows, num_heads, channels, like=value)
    high = empty(num_rows, num_heads, like=out, dtype=sum_dtype(value.dtype))
    total = empty(num_rows, num_heads, like=high)
    variant = _attention_variant(value, csr, scoring)
    run = library.function("attention", "attention", **variant)
    launch(
        value.device, run, num_rows * num_heads * int(variant["GROUP"]), 1, *graph_arguments(csr),
        pointer(value), pointer(key), pointer(query),
        pointer(vector), num_heads, channels, *_told(scoring), pointer(out), pointer(high), pointer(total),
    )  # fmt: skip
    return out, high, total


def attention_backward_sources(
    turned: Csr, operands: tuple[Tensor, Tensor | None, Tensor, Tensor | None], saved: tuple[Tensor, Tensor, Tensor],
    dout: Tensor, scoring: Scoring,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """See the CPU's."""
    value, key, query, vector = operands
    out, high, total = saved
    num_heads, channels = value.shape[1:]
    dvalue = empty(*value.shape, like=value)
    dkey = None if key is None else empty(*key.shape, like=key)
    dscore = empty(turned.indices.numel(), num_heads, like=high)
    dot = empty(*high.shape, like=high)
    variant = _attention_variant(value, turned, scoring)
    group = int(variant["GROUP"])
    dots = library.function("attention", "attention_dots", **variant)
    shape = (out.shape[0], num_heads, channels)
    launch(value.device, dots, out.shape[0] * num_heads * group, 1, pointer(out), pointer(dout), *shape, pointer(dot))
    run = library.function("attention", "attention_backward_sources", **variant)
    launch(
        value.device, run, value.shape[0] * num_heads * group, 1, *graph_arguments(turned), pointer(value), pointer(key), pointer(query),
        pointer(vector), num_heads, channels, *_told(scoring), pointer(dout), pointer(high), pointer(total), pointer(dot),
        pointer(dscore), pointer(dvalue), pointer(dkey),
    )  # fmt: skip
    return dscore, dvalue, dkey


def attention_backward_destinations(
    csr: Csr, value: Tensor, query: Tensor, vector: Tensor, dscore: Tensor, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """See the CPU's."""
    num_heads, channels = value.shape[1:]
    dquery = empty(*query.shape, like=query)
    num_parts = max(1, min(_NUM_PARTS, query.shape[0]))
    parts = empty(num_parts, num_heads, channels, like=dscore, dtype=torch.float64)
    variant = _attention_variant(value, csr, scoring)
    run = library.function("attention", "attention_backward_destinations", **variant)
    launch(
        value.device, run, num_parts * num_heads * int(variant["GROUP"]), 1, *graph_arguments(csr), pointer(value), pointer(query),
        pointer(vector), num_heads, channels, float(scoring.slope), pointer(dscore), pointer(dquery), pointer(parts), num_parts,
    )  # fmt: skip
    return dquery, parts.sum(0).to(vector.dtype)


def _attention_variant(value: Tensor, csr: Csr, scoring: Scoring) -> dict[str, str | int]:
    return {**_widths(value, csr), "SCORE": SCORE[scoring.score]}


def _widths(value: Tensor, csr: Csr) -> dict[str, str | int]:
    """Return the macros of kernels whose groups of lanes own a row and head."""
    channels = value.shape[2]
    group = group_of(channels)
    chunks = next((size for size in CHUNKS if size * group >= channels), CHUNKS[-1])
    return {**_types(value, csr), "GROUP": group, "VEC": 1, "CHUNKS": chunks}


def launch(
    device: torch.device, run: library.Launch, num_threads: int, num_slices: int, *arguments: int | float
) -> None:
    """Run a kernel with about a lane for each unit of work; nothing to do, nothing launched."""
    if num_threads:
        grid = (min(-(-num_threads // _THREADS), MAX_BLOCKS), num_slices)
        run(grid, (_THREADS,), arguments, device)


def groups_of(num_groups: int, group: int) -> int:
    """Return how many groups of lanes a launch for ``num_groups`` has: whole blocks of them."""
    return min(-(-num_groups * group // _THREADS), MAX_BLOCKS) * _THREADS // group


def group_of(wanted: int) -> int:
    """Return the least group of lanes that has one for each of ``wanted``, at most a warp."""
    return next((size for size in GROUPS if size >= wanted), GROUPS[-1])


def vector_length(x: Tensor, y: Tensor) -> int:
    """Return how many features a lane may move at a time: 16 bytes of them where every row begins at a multiple of that, else 1."""
    length = WIDE_LOAD_BYTES // x.element_size()
    starts = (x.data_ptr(), x.stride(0) * x.element_size(), y.data_ptr())
    return length if x.shape[1] % length == 0 and all(start % WIDE_LOAD_BYTES == 0 for start in starts) else 1


def _mean_degree(csr: Csr) -> int:
    return -(-csr.indices.numel() // max(1, _num_rows(csr)))


def _types(x: Tensor, csr: Csr) -> dict[str, str | int]:
    return {"STORAGE": STORAGE[x.dtype], "INDEX": INDEX[csr.indices.dtype]}


def _gat_numbers(scoring: Scoring) -> tuple[float, float, int]:
    return float(scoring.slope), float(scoring.dropout), scoring.seed


def _told(scoring: Scoring) -> tuple[float, float, float, int]:
    """CuPy passes on an int as an int: what the kernel takes as a double must be a float."""
    return float(scoring.slope), float(scoring.scale), float(scoring.dropout), scoring.seed


def _num_rows(csr: Csr) -> int:
    return csr.indptr.numel() - 1


def graph_arguments(csr: Csr) -> tuple[int, int, int, int]:
    """What kernels are told of a graph."""
    return csr.indptr.data_ptr(), csr.indices.data_ptr(), pointer(csr.entry_ids), _num_rows(csr)


def _rows_only(csr: Csr) -> tuple[int, int, int]:
    return csr.indptr.data_ptr(), pointer(csr.entry_ids), _num_rows(csr)


def pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def empty(*shape: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(shape, dtype=dtype or like.dtype, device=like.device)
