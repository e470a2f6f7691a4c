"""Generated kernels at work: built once for a description, called forward and backward on flat arrays.

Legend: N nodes, E edges, C channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from runner.kernels.adjacency import Adjacency
from runner.kernels.generate.description import Description
from runner.kernels.generate.walks import Walk, walks


class EdgeKernel:
    """The kernels of one description on one graph."""

    def __init__(self, description: Description, adjacency: Adjacency) -> None:
        self.description, self._adjacency = description, adjacency
        self._walks = {walk.name: walk for walk in walks(description)}
        self._backend = _backend(adjacency.device)
        self._source = self._backend.source(description)

    def __call__(self, operands: Sequence[Tensor]) -> Tensor:
        """Return the result [N, K · C] from the operands, one a slot; differentiable in those that need it."""
        result: Tensor = _Generated.apply(self, *operands)
        return result

    def forward(self, operands: Sequence[Tensor]) -> Tensor:
        """Compute the result [N, K · C]."""
        width = len(self.description.message) * self.description.channels
        out: Tensor = self._backend.new(self._adjacency.num_dst, width, operands[0])
        self._run(self._walks["forward"], self._adjacency, operands, [out])
        return out

    def backward(self, operands: Sequence[Tensor], upstream: Tensor) -> list[Tensor | None]:
        """Compute the gradient of each operand that needs one, from that of the result."""
        if self.description.is_mean:
            upstream = upstream * self._adjacency.mean_scale(upstream.dtype).unsqueeze(1)
        given = [*operands, upstream.contiguous()]
        slots = self.description.slots
        found: list[Tensor | None] = [
            torch.zeros_like(entry) if slot.needs_gradient else None
            for slot, entry in zip(slots, operands, strict=True)
        ]
        for name, graph in (
            ("backward_destinations", self._adjacency),
            ("backward_sources", self._adjacency.transposed),
        ):
            if name in self._walks:
                walk = self._walks[name]
                parts = self._run(walk, graph, given, found)
                self._add_totals(walk, parts, found)
        return found

    def _run(self, walk: Walk, graph: Adjacency, given: Sequence[Tensor], out: Sequence[Tensor | None]) -> Tensor:
        parts: Tensor = self._backend.run(self._source, walk, self.description, graph, given, out)
        return parts

    def _add_totals(self, walk: Walk, parts: Tensor, found: Sequence[Tensor | None]) -> None:
        """Put the sums over all edges where they belong."""
        sums, at, channels = parts.sum(0), 0, self.description.channels
        for slot, index, formula in walk.totals:
            width, begin = (channels, index * channels) if formula.is_wide else (1, index)
            gradient = found[slot]
            assert gradient is not None
            gradient.view(-1)[begin : begin + width] = sums[at : at + width].to(gradient.dtype)
            at += width


def _backend(device: torch.device) -> ModuleType:
    """The module that runs kernels on a device."""
    if device.type == "cuda":
        from runner.kernels.generate import on_cuda  # CuPy is there only where there is a GPU

        return on_cuda
    from runner.kernels.generate import on_cpu

    return on_cpu


class _Generated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernel: EdgeKernel, *operands: Tensor) -> Tensor:
        flat = [operand.detach().contiguous() for operand in operands]
        ctx.kernel = kernel
        ctx.save_for_backward(*flat)
        return kernel.forward(flat)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        return None, *ctx.kernel.backward(ctx.saved_tensors, upstream)


def generated(kernel: EdgeKernel, values: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """Return a chain's result in its own shape, [N, …].

    Args:
        kernel: of the chain.
        values: one a slot of its description.
        shape: of a row of the result.
    """
    flat = kernel(values)
    assert flat.shape[1] == math.prod(shape)
    return flat.reshape(flat.shape[0], *shape)
