"""Whether kernels of our own can run on a device."""

from __future__ import annotations

import torch


def has_kernels(device: torch.device) -> bool:
    """Whether ops on this device run on our kernels; where not, they run as torch ops, which is said once."""
    return _has_kernels(device.type)


@torch.compiler.assume_constant_result
def _has_kernels(kind: str) -> bool:
    if kind == "cuda":
        from runner.kernels.cuda.library import is_available as cuda_is_available

        return cuda_is_available()
    from runner.kernels.cpu.library import is_available

    return kind == "cpu" and is_available()
