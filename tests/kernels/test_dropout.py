"""Dropout: the masks that torch draws, bit for bit, and torch's generator left where torch leaves it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from runner.kernels import dropout
from runner.kernels.dropout import DropoutFunction, draw_mask, draws_as_torch
from runner.kernels.opgraph import Call, Ref
from runner.kernels.seeds import is_dropout

SHAPES = [(1,), (7,), (0, 5), (5, 0), (3, 1), (1, 3), (311, 2), (313, 16), (1000, 33), (60, 4, 5), (5000, 3)]


def torchs(shape: tuple[int, ...], keep: float) -> Tensor:
    """The mask of F.dropout itself, read off ones."""
    return F.dropout(torch.ones(shape), 1 - keep) != 0


@pytest.fixture
def is_ours() -> None:
    if not draws_as_torch():
        pytest.skip("torch draws from another generator on this processor, so it draws for us too")


@pytest.mark.usefixtures("is_ours")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("keep", [0.5, 0.1, 0.999999, 1 / 3])
def test_masks_and_the_state_after_them_are_torchs(shape: tuple[int, ...], keep: float) -> None:
    found = []
    for draw in (torchs, lambda shape, keep: draw_mask(torch.empty(shape), keep)):
        torch.manual_seed(3)
        torch.rand(5)  # from the middle of a state
        first = draw(shape, keep)
        between = torch.rand(3)
        found.append((first, between, draw(shape, keep), torch.randn(17), draw(shape, keep), torch.get_rng_state()))
    for wanted, ours in zip(*found, strict=True):
        assert torch.equal(wanted, ours)


def test_a_place_moves_rows_and_nothing_else() -> None:
    order = torch.randperm(50)
    torch.manual_seed(1)
    plain = draw_mask(torch.empty(50, 7), 0.4)
    torch.manual_seed(1)
    placed = draw_mask(torch.empty(50, 7), 0.4, order)
    assert torch.equal(placed[order], plain)


def test_without_our_generator_torch_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dropout, "draws_as_torch", lambda: False)
    order = torch.randperm(50)
    torch.manual_seed(1)
    expected = torchs((50, 7), 0.4)
    torch.manual_seed(1)
    assert torch.equal(draw_mask(torch.empty(50, 7), 0.4, order)[order], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_dropped_values_and_gradients_are_torchs(dtype: torch.dtype) -> None:
    x = torch.randn(40_000, dtype=dtype).view(400, 100).t().requires_grad_()  # not contiguous
    results = []
    for apply in (lambda: F.dropout(x, 0.3), lambda: DropoutFunction.apply(x, draw_mask(x, 0.7), 1 / 0.7)):
        torch.manual_seed(5)
        y = apply()
        (gradient,) = torch.autograd.grad((y * y).sum(), x)
        results += [y, gradient]
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-6  # torch rounds the scale to bfloat16 first
    assert torch.allclose(results[0], results[2], rtol=tolerance)
    assert torch.allclose(results[1], results[3], rtol=tolerance)
    assert torch.equal(results[0] == 0, results[2] == 0)


def test_dropping_everything_is_left_to_torch() -> None:
    for probability, is_ours in ((0.0, False), (0.5, True), (1.0, False)):
        call = Call((Ref(1),), F.dropout, (Ref(0), probability, True), {}, "here")
        assert is_dropout(call) == is_ours


def test_what_is_not_finite_stays_so() -> None:
    x = torch.tensor([float("inf"), float("nan"), float("inf")])
    mask = torch.tensor([True, True, False])
    assert torch.equal(
        torch.nan_to_num(DropoutFunction.apply(x, mask, 2.0), nan=7.0, posinf=8.0), torch.tensor([8.0, 7, 7])
    )
