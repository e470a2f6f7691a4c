"""What kinds of torch calls there are for a recorder, and small helpers on their arguments."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from runner.gnn.dgl_compat import import_dgl
from runner.kernels.opgraph import leaves


def _methods(*names: str) -> frozenset[Callable[..., Any]]:
    return frozenset(getattr(Tensor, name) for name in names)


# On values that depend on features these are branches, which an op graph can't hold: they make Python values …
READS_VALUES = _methods(
    "item",
    "tolist",
    "numpy",
    "__array__",
    "__dlpack__",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "__contains__",
) | {torch.equal, Tensor.equal, torch.allclose, Tensor.allclose, torch.is_nonzero, Tensor.is_nonzero}
# … or shapes that depend on values.
SHAPES_BY_VALUES = frozenset(
    (torch.nonzero, Tensor.nonzero, torch.argwhere, Tensor.argwhere, torch.masked_select, Tensor.masked_select, torch.unique,
     Tensor.unique, torch.unique_consecutive, Tensor.unique_consecutive, torch.bincount, Tensor.bincount)
)  # fmt: skip
# Of random calls only dropout is recorded; the others would be drawn once and kept.
RANDOM = _methods(
    "bernoulli", "bernoulli_", "uniform_", "normal_", "random_", "exponential_", "cauchy_", "log_normal_", "geometric_", "multinomial"
) | frozenset(
    (torch.rand, torch.randn, torch.randint, torch.rand_like, torch.randn_like, torch.randint_like, torch.randperm, torch.normal,
     torch.bernoulli, torch.multinomial, torch.poisson, torch.binomial, F.alpha_dropout, F.feature_alpha_dropout, F.dropout1d,
     F.dropout2d, F.dropout3d, F.gumbel_softmax, torch.feature_dropout, torch.alpha_dropout)
)  # fmt: skip
# Calls that take a tensor only for its shape, dtype or device: all of them, or every argument after the first.
READS_SHAPE = frozenset((torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like)) | _methods(
    "new_zeros", "new_ones", "new_full", "new_empty", "new_tensor"
)
READS_SHAPE_OF_OTHERS = _methods("to", "type_as", "expand_as", "view_as", "reshape_as")


def tensors_in(structure: Any) -> list[Tensor]:
    """Return the tensors in nested lists, tuples and dicts."""
    return list(leaves(structure, Tensor))


def name_of(function: Any) -> str:
    """Return a function's name for a message."""
    return str(getattr(function, "__name__", function))


def where() -> str:
    """``file.py:line`` of the model's code that is running: the innermost frame outside torch, DGL's core and this package."""
    frame = sys._getframe(1)
    torch_root, dgl_root = str(Path(torch.__file__).parent), str(Path(import_dgl().__file__ or "").parent)
    skipped = (torch_root, dgl_root, str(Path(__file__).parent))
    while frame.f_back is not None:
        file = frame.f_code.co_filename
        if not file.startswith(skipped) or file.startswith(f"{dgl_root}/nn/"):
            break
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
