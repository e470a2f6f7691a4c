"""Dropout by seed: each forward draws one number, and each of its dropouts has a seed made of that and of its place in the forward.

A mask is then a function of (seed, row, column), so that a kernel computes it where it is needed and nobody keeps it.
:class:`seeded_dropouts` gives a module's own ``F.dropout`` the same masks, which is how a strategy that draws so is compared with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from runner.kernels.opgraph import Call
from runner.kernels.parameters import kept

_ODD = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: multiples of it are far apart


class Seeds:
    """The seeds of a forward's dropouts; :meth:`draw` begins the next forward."""

    def __init__(self) -> None:
        self._base = 0

    def draw(self) -> None:
        """Draw the next forward's number from torch's default generator."""
        self._base = int(torch.randint(2**62, ()))

    def __call__(self, number: int) -> int:
        """Return the seed, an int64, of the dropout with this number."""
        mixed = (self._base + (number + 1) * _ODD) % 2**64
        return mixed - 2**64 if mixed >= 2**63 else mixed


class seeded_dropouts(TorchFunctionMode):  # noqa: N801 (used as a context, like torch's own)
    """While active, every dropout that is switched on takes its mask by seed, counted from 0 in the order in which they run.

    Args:
        place: returns the row number that masks of a value go by, int64 [rows], where that isn't its own; given its number of rows.
    """

    def __init__(self, place: Callable[[int], Tensor | None] = lambda _: None) -> None:
        super().__init__()
        self._seeds, self._place, self._number = Seeds(), place, 0

    def __enter__(self) -> seeded_dropouts:
        self._seeds.draw()
        self._number = 0
        super().__enter__()
        return self

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        call = Call((), func, args, kwargs, "")
        if not is_dropout(call):
            return func(*args, **kwargs)
        x = args[0] if args else kwargs["input"]
        probability, _ = dropout_arguments(call)
        number, self._number = self._number, self._number + 1
        rows = self._place(x.shape[0])
        rows = torch.arange(x.shape[0], device=x.device) if rows is None else rows
        mask = kept(rows, x.shape[1:].numel(), probability, self._seeds(number)).view(x.shape)
        return x * mask / (1 - probability)


def is_dropout(op: Any) -> bool:
    """Whether an op draws random numbers: a dropout that is switched on, and doesn't drop everything."""
    if not isinstance(op, Call) or op.function not in (F.dropout, torch.dropout):
        return False
    probability, training = dropout_arguments(op)
    return training and 0 < probability < 1


def dropout_arguments(op: Call) -> tuple[float, bool]:
    """Return (probability, training) of a dropout call."""
    given = dict(zip(("input", "p", "training"), op.args, strict=False)) | op.kwargs
    default = op.function is F.dropout
    return float(given.get("p", given.get("prob", 0.5))), bool(given.get("training", given.get("train", default)))
