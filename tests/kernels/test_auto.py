"""The strategy ``auto``: it keeps what measured best of what can take the program, and leaves nothing behind."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from graphs import adjacency, random_edges
from torch import Tensor, nn

from runner.errors import UserError, VerificationError
from runner.kernels.auto import Auto
from runner.kernels.strategy import OwnOrder, Prepared, Program

MODULE = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))


@dataclass
class Slow(OwnOrder):
    """The module itself, after a nap."""

    name: str
    nap_s: float
    preprocess_s: dict[str, float] = field(default_factory=dict)
    resident_bytes: int = 0
    report: dict[str, Any] = field(default_factory=dict)

    def __call__(self, features: Tensor, training: bool) -> Tensor:
        time.sleep(self.nap_s)
        out: Tensor = MODULE(features)
        return out

    def lowered(self) -> None:
        return None

    def explain(self) -> str:
        return f"{self.name} explained"


@dataclass(frozen=True)
class Naps:
    name: str
    nap_s: float
    refusal: str = ""

    def prepare(self, _program: Program) -> Prepared:
        if self.refusal:
            raise UserError(self.refusal)
        return Slow(self.name, self.nap_s, report={"choices": [{"matrix": 0}]})


def program(verified: list[str] | None = None, wrong: str = "") -> Program:
    def verify(prepared: Prepared) -> None:
        if verified is not None:
            verified.append(prepared.name)
        if prepared.name == wrong:
            raise VerificationError("wrong")

    def never(_: bool) -> Any:
        raise AssertionError("not captured here")

    return Program(
        forward=MODULE,
        capture=never,
        adjacency=lambda: adjacency(random_edges(5, 9)),
        module=MODULE,
        features=lambda: torch.ones(5, 3),
        verify=verify,
    )


def auto(*strategies: Naps, **options: Any) -> Auto:
    return Auto(candidates=strategies, num_trials=3, **options)


def test_the_fastest_is_kept_and_the_others_are_told() -> None:
    verified: list[str] = []
    kept = auto(
        Naps("baseline", 0.02), Naps("quick", 0.001), Naps("slow", 0.03), Naps("odd", 0, "has no message passing")
    ).prepare(program(verified))
    assert kept.name == "quick"
    assert verified == ["baseline", "quick", "slow"], "nothing is timed before it is verified"
    assert set(kept.report["step_s"]) == {"baseline", "quick", "slow"}
    assert kept.report["refused"] == {"odd": "has no message passing"}
    assert "can't: has no message passing" in kept.explain()
    assert "quick explained" in kept.explain()


def test_steps_are_timed_in_training() -> None:
    seen: list[bool] = []

    class Watches(Slow):
        def __call__(self, features: Tensor, training: bool) -> Tensor:
            seen.append(training and MODULE.training)
            return super().__call__(features, training)

    class Watching(Naps):
        def prepare(self, _program: Program) -> Prepared:
            return Watches(self.name, 0.0)

    MODULE.eval()
    auto(Watching("baseline", 0.0), Watching("other", 0.0)).prepare(program())
    assert seen
    assert all(seen)


def test_a_gain_below_the_margin_leaves_baseline() -> None:
    strategies = Naps("baseline", 0.02), Naps("little", 0.018)
    assert auto(*strategies, min_gain=0.5).prepare(program()).name == "baseline"


def test_a_wrong_answer_ends_it() -> None:
    with pytest.raises(VerificationError):
        auto(Naps("baseline", 0.0), Naps("bad", 0.0)).prepare(program(wrong="bad"))


def test_buffers_gradients_mode_and_generator_stay_as_they_were() -> None:
    MODULE.eval()
    MODULE.zero_grad()
    buffers = [buffer.clone() for buffer in MODULE.buffers()]
    torch.manual_seed(0)
    before = torch.get_rng_state()
    auto(Naps("baseline", 0.0), Naps("quick", 0.0)).prepare(program())
    assert torch.equal(torch.get_rng_state(), before)
    assert not MODULE.training
    assert all(torch.equal(now, then) for now, then in zip(MODULE.buffers(), buffers, strict=True))
    assert all(parameter.grad is None for parameter in MODULE.parameters())


def test_a_resumed_run_keeps_the_winner_unmeasured() -> None:
    strategies = Naps("baseline", 0.0), Naps("quick", 0.02)
    kept = auto(*strategies, kept="quick").prepare(program())
    assert kept.name == "quick"
    assert kept.report["step_s"] == {}
    assert kept.report["choices"] == [{"strategy": "quick"}, {"matrix": 0}]
