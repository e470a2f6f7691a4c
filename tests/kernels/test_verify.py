"""The check that a strategy didn't change the answer must itself fail when it should."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from runner.errors import VerificationError
from runner.kernels.verify import Answer, answer, compare, other_weights, relative_difference, require


def reference() -> Answer:
    return Answer(
        torch.tensor([[1.0, 2.0], [3.0, 4.0]]), 0.5, {"w": torch.tensor([1.0, -2.0]), "b": torch.tensor([0.0])}
    )


def changed(output: Callable[[Tensor], Tensor] = lambda y: y, loss: float = 0.5, **gradients: Tensor) -> Answer:
    right = reference()
    return Answer(output(right.output), loss, {**right.gradients, **gradients})


@pytest.mark.parametrize(
    "wrong",
    [
        changed(lambda y: y + 1e-3),
        changed(lambda y: y * float("nan")),
        changed(lambda y: y[:1]),
        changed(loss=0.51),
        changed(loss=float("nan")),
        changed(w=torch.tensor([1.0, -2.01])),
        changed(w=torch.zeros(2)),
        changed(b=torch.tensor([0.1])),
        changed(w=torch.tensor([float("nan"), -2.0])),
    ],
    ids=[
        "output",
        "nan",
        "shape",
        "loss",
        "nan loss",
        "gradient",
        "missing gradient",
        "gradient of zero",
        "nan gradient",
    ],
)
def test_a_wrong_answer_is_refused_with_the_ops_name(wrong: Answer) -> None:
    with pytest.raises(VerificationError, match="fast differs from baseline at 'matmul'"):
        require("fast", reference(), wrong, lambda _: reference(), lambda: "'matmul'")


def test_rounding_passes_without_the_fp64_run() -> None:
    def never() -> Answer:
        raise AssertionError("not needed")

    agreement = require("fast", reference(), changed(lambda y: y * (1 + 1e-6)), never, lambda: "")
    assert 0 < agreement.max_output_diff < 2e-6


def test_past_tolerance_fp64_decides_between_the_two() -> None:
    """Where baseline is off itself, a strategy may be as far off on the other side, but not ten times as far."""
    off = changed(w=torch.tensor([1.0, -2.0 - 8e-4]))
    require("fast", off, changed(w=torch.tensor([1.0, -2.0 + 8e-4])), lambda _: reference(), lambda: "")
    with pytest.raises(VerificationError):
        require("fast", off, changed(w=torch.tensor([1.0, -2.0 + 8e-3])), lambda _: reference(), lambda: "x")


def test_a_gradient_that_cancels_is_compared_with_the_largest() -> None:
    assert compare(reference(), changed(b=torch.tensor([1e-7]))).max_grad_diff < 1e-5


def test_relative_difference_of_nothing_and_of_equal_nans() -> None:
    assert relative_difference(torch.empty(0), torch.empty(0)) == 0
    assert relative_difference(torch.tensor([float("nan"), 1.0]), torch.tensor([float("nan"), 1.0])) == 0
    assert relative_difference(torch.zeros(2), torch.zeros(2)) == 0
    assert relative_difference(torch.zeros(2), torch.ones(2)) == float("inf")


def test_answer_leaves_the_module_as_it_was() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).eval()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    state = torch.random.get_rng_state()
    x = torch.randn(8, 3)
    torch.random.set_rng_state(state)
    one = answer(module, lambda: module(x), lambda y: y.square().sum(), seed=1)
    two = answer(module, lambda: module(x), lambda y: y.square().sum(), seed=1)
    assert torch.equal(one.output, two.output)
    assert not module.training
    assert all(parameter.grad is None for parameter in module.parameters())
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_capture_that_is_not_the_module_is_refused_even_if_the_strategy_follows_it() -> None:
    """The fp64 run is of the op graph: if that is wrong, so is the oracle, and the module itself must say so."""
    for wrong in (
        changed(lambda y: y + 0.5),
        changed(w=torch.tensor([9.0, -2.0])),
        changed(lambda y: y * float("nan")),
    ):
        with pytest.raises(VerificationError, match="the captured op graph is not the module"):
            require("fast", reference(), wrong, lambda _, wrong=wrong: wrong, lambda: "x")  # type: ignore[misc]


def test_infinities_must_be_the_same() -> None:
    infinite = torch.tensor([float("inf"), 1.0])
    assert relative_difference(infinite, infinite) == 0
    assert relative_difference(infinite, torch.tensor([5.0, 1.0])) == float("inf")
    assert relative_difference(infinite, -infinite) == float("inf")
    assert relative_difference(torch.ones(2), infinite) == float("inf")


def test_other_weights_are_other_and_put_back() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    before = [parameter.clone() for parameter in module.parameters()]
    with other_weights(module, 1):
        assert all(not torch.equal(parameter, old) for parameter, old in zip(module.parameters(), before, strict=True))
    assert all(torch.equal(parameter, old) for parameter, old in zip(module.parameters(), before, strict=True))
