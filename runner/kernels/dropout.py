"""Dropout with the masks that torch draws from the same seed, faster.

On most processors torch draws a mask's elements one by one from its Mersenne Twister, 11 ns each: half the time of a GIN's
training step. Ours reads and advances the same generator in vectors: equal masks, equal state afterwards.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F

from runner.kernels.cpu import library
from runner.kernels.cpu.memory import empty
from runner.kernels.lower import Kernel, Resolve, fill
from runner.kernels.opgraph import Call
from runner.kernels.seeds import dropout_arguments

_STATE_BYTES = 5056  # of torch's CPU generator, as get_state gives it: seed, left, seeded, next, 624 words, what normal numbers need


def dropout_kernel(op: Call, place: Tensor | None = None) -> Kernel:
    """Return the kernel of a dropout call that is switched on; ``place`` as :func:`draw_mask` has it."""
    probability, _ = dropout_arguments(op)

    def run(resolve: Resolve) -> Tensor:
        x = fill(op.args, resolve)[0] if op.args else resolve(op.kwargs["input"])
        mask = draw_mask(x, 1 - probability, place)
        dropped: Tensor = DropoutFunction.apply(x, mask, 1 / (1 - probability))
        return dropped

    return run


def draw_mask(x: Tensor, keep: float, place: Tensor | None = None) -> Tensor:
    """Draw which elements of ``x`` are kept, as ``F.dropout`` would with torch's default generator.

    Args:
        x: [N, …]; torch draws in the order in which its elements lie in memory.
        keep: probability.
        place: int64 [N]: row i of what is drawn is row ``place[i]`` of the result; None: row i.

    Returns:
        bool, of the shape of ``x``.
    """
    if x.device.type != "cpu":  # F.dropout's generator is no other op's there
        mask = F.dropout(torch.ones_like(x), 1 - keep) != 0
        return mask if place is None else torch.empty_like(mask).index_copy_(0, place, mask)
    if not draws_as_torch() or not x.is_contiguous():
        mask = torch.empty_like(x, dtype=torch.bool).bernoulli_(keep)
        return mask if place is None else torch.empty_like(mask).index_copy_(0, place, mask)
    return _draw(x.shape, keep, place)


def _draw(shape: torch.Size, keep: float, place: Tensor | None) -> Tensor:
    mask = empty(*shape, dtype=torch.bool)
    if not mask.numel():
        return mask
    state = torch.get_rng_state()
    first, num_rows = state.data_ptr(), shape[0] if shape else 1
    kernel = library.function("dropout", "draw_mask", torch.float32, None)
    kernel(
        first + 24, first + 8, first + 16, num_rows, mask.numel() // num_rows, keep,
        None if place is None else place.data_ptr(), mask.data_ptr(), 1,
    )  # fmt: skip
    torch.set_rng_state(state)
    return mask


@cache
def draws_as_torch() -> bool:
    """Whether our masks are torch's here: on Intel's processors torch draws from MKL's generator. Its state is left as it was."""
    if not library.is_available():
        return False
    before = torch.get_rng_state()
    if before.numel() != _STATE_BYTES:
        return False
    found = []
    for draw in (
        lambda: torch.empty(1000, 3, dtype=torch.bool).bernoulli_(0.7),
        lambda: _draw(torch.Size([1000, 3]), 0.7, None),
    ):
        found.append((draw(), torch.get_rng_state()))
        torch.set_rng_state(before)
    (wanted, after), (ours, reached) = found
    return torch.equal(wanted, ours) and torch.equal(after, reached)


class DropoutFunction(torch.autograd.Function):
    """``x · mask · scale``; keeps the mask as bytes, a quarter of the floats that torch's dropout keeps."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, mask: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.scale = scale  # type: ignore[attr-defined]
        return _scaled(x, mask, scale)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor | None, None, None]:
        if not ctx.needs_input_grad[0]:  # type: ignore[attr-defined]
            return None, None, None
        (mask,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return _scaled(gradients[0], mask, ctx.scale), None, None  # type: ignore[attr-defined]


def _scaled(x: Tensor, mask: Tensor, scale: float) -> Tensor:
    if x.device.type != "cpu" or x.dtype not in (torch.float32, torch.float64) or not library.is_available():
        return (x * mask).mul_(scale)
    x, mask, y = x.contiguous(), mask.contiguous(), empty(*x.shape, dtype=x.dtype)
    kernel = library.function("dropout", "apply_mask", x.dtype, None)
    kernel(x.data_ptr(), mask.data_ptr(), x.numel(), scale, y.data_ptr(), torch.get_num_threads())
    return y
