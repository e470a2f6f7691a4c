"""The differentiable ends of the strategy's kernels.

Legend: N nodes, F features.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from runner.kernels.formats import SpMM


class SpMMFunction(torch.autograd.Function):
    """``Y = A X`` with ``dX = Aᵀ dY``, each on the kernel chosen for it."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, run: SpMM, run_transposed: SpMM | None) -> Tensor:
        ctx.run_transposed = run_transposed  # type: ignore[attr-defined]
        return run(x.detach().contiguous())

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor | None, None, None]:
        if not ctx.needs_input_grad[0]:  # type: ignore[attr-defined]
            return None, None, None
        run = ctx.run_transposed  # type: ignore[attr-defined]
        assert run is not None, "a gradient reached features that no parameter precedes"
        return run(gradients[0].contiguous()), None, None
