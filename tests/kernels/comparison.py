"""An op in fp32 against the same formula in fp64: how far it may be off, in terms of how far plain torch in fp32 is."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Op = Callable[..., Tensor]

FORWARD, GRADIENT = 2, 3  # times the error of plain torch
_ROUNDING = 4 * torch.finfo(torch.float32).eps  # where plain torch happens to be exact


def check(name: object, ours: Op, plain: Op, inputs: Sequence[Tensor], scale: float = 1.0) -> None:
    """Compare output and every gradient.

    Args:
        name: for the message.
        ours, plain: the op and its formula in torch; called with ``inputs``.
        inputs: float32; a gradient is taken of each.
        scale: size of the terms that are summed, where it exceeds that of the result.
    """
    expected = _answers(plain, [entry.double() for entry in inputs])
    usual = _answers(plain, inputs)
    found = _answers(ours, inputs)
    for number, (right, other, mine) in enumerate(zip(expected, usual, found, strict=True)):
        assert mine.shape == right.shape, (name, number, mine.shape, right.shape)
        assert mine.dtype == torch.float32
        if not right.numel():
            continue
        floor = _ROUNDING * max(scale, float(right.abs().max()))
        allowed = (FORWARD if number == 0 else GRADIENT) * max(float((other.double() - right).abs().max()), floor)
        error = float((mine.double() - right).abs().max())
        what = "output" if number == 0 else f"gradient of input {number - 1}"
        assert error <= allowed, f"{name}: {what} is off by {error:.2e}, allowed is {allowed:.2e}"


def _answers(op: Op, inputs: Sequence[Tensor]) -> list[Tensor]:
    leaves = [entry.detach().clone().requires_grad_() for entry in inputs]
    output = op(*leaves)
    generator = torch.Generator().manual_seed(7)
    upstream = torch.randn(output.shape, generator=generator).to(output.dtype)
    return [output.detach(), *torch.autograd.grad(output, leaves, upstream)]
