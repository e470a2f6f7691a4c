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


def seconds_compiling(device: torch.device) -> float:
    """Return the seconds that this process has spent compiling and loading kernels for a device; they are in no op's time but its first."""
    if device.type == "cuda":
        from runner.kernels.cuda.library import compile_seconds as cuda_seconds

        return cuda_seconds()
    from runner.kernels.cpu.build import compile_seconds

    return compile_seconds()
