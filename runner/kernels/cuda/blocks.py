"""The kernels whose communities own their rows, and coordinates added atomically, on CUDA tensors.

Legend: N nodes, E edges, F features, P communities, B nodes of a community.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from runner.kernels.cuda import launch, library
from runner.kernels.cuda.library import INDEX
from runner.kernels.launching import INTRA, STORAGE, Blocks, check_values

_THREADS = 128  # a block
_SHARED_BYTES = 48 * 2**10  # that every GPU gives a block unasked
STAGED = (0, 64, 96, 128)  # rows of X that a block may keep; 0: none
MMA_COLUMNS = (1, 2, 4)  # times 8 features that a warp takes
UNITS = {"tf32": "Tf32", "bf16": "Bf16"}


def blocks_spmm(blocks: Blocks) -> Callable[[Tensor], Tensor]:
    """Return the product with a matrix on a GPU: contiguous float [N, F] -> [N, F]."""
    largest = int(blocks.part_ptr.diff().max())
    num_parts = blocks.part_ptr.numel() - 1

    def run(x: Tensor) -> Tensor:
        check_values(x.dtype, blocks.weight, blocks.inside if blocks.intra == "tiles" else None, blocks.inside_weight)
        y = launch.empty(*x.shape, like=x)
        vector = launch.vector_length(x, y)
        group = launch.group_of(-(-x.shape[1] // vector))
        row_bytes = group * vector * x.element_size()
        staged = next((rows for rows in STAGED[1:] if rows >= largest and rows * row_bytes <= _SHARED_BYTES), 0)
        local = "uint16" if blocks.inside is not None and blocks.inside.dtype == torch.uint16 else "uint8"
        function = library.function(
            "blocks", "blocks", STORAGE=STORAGE[x.dtype], INDEX=INDEX[blocks.indices.dtype], GROUP=group, VEC=vector,
            INTRA=INTRA[blocks.intra], WEIGHTED=int(blocks.weight is not None), LOCAL=local,
            ROWS=staged if blocks.intra != "rest" else 0,
        )  # fmt: skip
        slices = -(-x.shape[1] // (group * vector))
        function(
            (min(num_parts, launch.MAX_BLOCKS), min(slices, launch.MAX_SLICES)), (_THREADS,),
            (*_matrix(blocks), *map(launch.pointer, (blocks.starts, blocks.inside, blocks.inside_weight)),
             launch.pointer(x), x.shape[1], launch.pointer(y)),
            x.device,
        )  # fmt: skip
        return y

    return run


def blocks_mma_spmm(blocks: Blocks, unit: str) -> Callable[[Tensor], Tensor]:
    """Return the product with a matrix whose dense tiles go to the matrix units: contiguous float32 [N, F] -> [N, F].

    Args:
        blocks: with tiles.
        unit: ``tf32`` (10 bits of mantissa) or ``bf16`` (7 bits): what factors inside communities are rounded to.
    """
    assert blocks.intra == "tiles"
    num_parts = blocks.part_ptr.numel() - 1

    def run(x: Tensor) -> Tensor:
        check_values(torch.float32, x, blocks.weight, blocks.inside)
        y = launch.empty(*x.shape, like=x)
        columns = next((count for count in MMA_COLUMNS if 8 * count >= x.shape[1]), MMA_COLUMNS[-1])
        function = library.function(
            "blocks_mma", "blocks_mma", STORAGE="float", INDEX=INDEX[blocks.indices.dtype], GROUP=32, VEC=1, UNIT=UNITS[unit],
            WEIGHTED=int(blocks.weight is not None), COLUMNS=columns,
        )  # fmt: skip
        slices = -(-x.shape[1] // (8 * columns))
        function(
            (min(num_parts, launch.MAX_BLOCKS), min(slices, launch.MAX_SLICES)), (_THREADS,),
            (*_matrix(blocks), *map(launch.pointer, (blocks.starts, blocks.inside)), launch.pointer(x), x.shape[1], launch.pointer(y)),
            x.device,
        )  # fmt: skip
        return y

    return run


def coo_spmm(rows: Tensor, columns: Tensor, weight: Tensor | None, num_rows: int) -> Callable[[Tensor], Tensor]:
    """Return the product with a matrix in coordinates, added atomically: contiguous float32 or float64 [M, F] -> [N, F].

    Args:
        rows, columns: int32 or int64 [E].
        weight: one value each, or None.
        num_rows: N.
    """

    def run(x: Tensor) -> Tensor:
        check_values(x.dtype, weight)
        y = launch.empty(num_rows, x.shape[1], like=x).zero_()
        if not rows.numel():
            return y
        vector = launch.vector_length(x, y)
        group = launch.group_of(-(-x.shape[1] // vector))
        function = library.function(
            "coo", "coo", STORAGE=STORAGE[x.dtype], INDEX=INDEX[rows.dtype], GROUP=group, VEC=vector,
            WEIGHTED=int(weight is not None),
        )  # fmt: skip
        num_blocks = min(-(-rows.numel() * group // _THREADS), launch.MAX_BLOCKS)
        slices = min(-(-x.shape[1] // (group * vector)), launch.MAX_SLICES)
        function(
            (num_blocks, slices), (_THREADS,),
            (launch.pointer(rows), launch.pointer(columns), launch.pointer(weight), rows.numel(), launch.pointer(x), x.shape[1],
             launch.pointer(y)),
            x.device,
        )  # fmt: skip
        return y

    return run


def _matrix(blocks: Blocks) -> tuple[int, ...]:
    pointers = map(launch.pointer, (blocks.indptr, blocks.indices, blocks.weight))
    return (launch.pointer(blocks.part_ptr), blocks.part_ptr.numel() - 1, *pointers)
