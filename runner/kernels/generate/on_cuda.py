"""Generated kernels on CUDA tensors; the functions of :mod:`runner.kernels.generate.on_cpu`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from runner.kernels.adjacency import Adjacency
from runner.kernels.cuda import launch, library
from runner.kernels.generate import cuda
from runner.kernels.generate.description import Description
from runner.kernels.generate.walks import Walk
from runner.kernels.launching import STORAGE

source = cuda.source
_MOST_GROUPS = 4096  # where weights have gradients: each leaves parts of their sums


def new(num_rows: int, width: int, like: Tensor) -> Tensor:
    """See the CPU's."""
    return launch.empty(num_rows, width, like=like)


def run(
    text: str,
    walk: Walk,
    description: Description,
    graph: Adjacency,
    given: Sequence[Tensor],
    out: Sequence[Tensor | None],
) -> Tensor:
    """See the CPU's."""
    csr, like = graph.csr, given[0]
    group = launch.group_of(description.channels)
    num_totals = walk.num_totals(description.channels)
    num_groups = min(graph.num_dst, _MOST_GROUPS) if num_totals else graph.num_dst
    places = launch.groups_of(num_groups, group)
    parts = launch.empty(places if num_totals else 1, max(num_totals, 1), like=like, dtype=torch.float64).zero_()
    defines = {"STORAGE": STORAGE[like.dtype], "INDEX": library.INDEX[csr.indices.dtype], "GROUP": group, "VEC": 1}
    kernel = library.function("generated", walk.name, text, **defines)
    num_slots = len(description.slots)
    inputs = [*given, *[None] * (num_slots + 1 - len(given))]
    outputs = [*[None] * num_slots, out[0]] if walk.name == "forward" else [*out, None]
    launch.launch(
        like.device, kernel, num_groups * group, 1, *launch.graph_arguments(csr), *map(launch.pointer, inputs),
        *map(launch.pointer, outputs), launch.pointer(parts),
    )  # fmt: skip
    return parts[:, :num_totals]
