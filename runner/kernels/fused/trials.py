"""Measurement of the programs that the cost model leaves: they are timed in turns, with baseline, within a budget."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor

from runner.kernels.cache import keep, kept
from runner.kernels.cpu.build import processor
from runner.kernels.density.calibration import device_name, is_crowded
from runner.kernels.formats import seconds
from runner.kernels.fused.invariants import Invariants
from runner.kernels.fused.lower import Layout, executable
from runner.kernels.fused.products import FixedMatrix
from runner.kernels.rewrite.search import Rewritten
from runner.kernels.strategy import Program, Work, step_of, undisturbed
from runner.units import format_seconds

_FORMAT = 1  # of what is kept
_MOST_ROUNDS = 15
_OUT = 1.5  # times the fastest: what takes longer isn't timed again
BASELINE = "baseline"


@dataclass(frozen=True)
class Choice:
    """What was kept.

    Attributes:
        kept: the program.
        reason: why, for people.
        is_baseline: whether the module as it is was faster than all of them.
        tried_s: median seconds of a step by plan.
    """

    kept: Rewritten
    reason: str
    is_baseline: bool = False
    tried_s: dict[str, float] = field(default_factory=dict)

    @property
    def named(self) -> str:
        """Its plan, or baseline."""
        return BASELINE if self.is_baseline else str(self.kept.plan)


def mode_name(training: bool) -> str:
    """Return what reports call a mode."""
    return "training" if training else "evaluation"


@dataclass
class Trials:
    """How programs are compared.

    Attributes:
        program: what they compute.
        invariants: owns what they keep; what the losers kept is forgotten.
        budget_s: of timing, but two rounds at least; 0: none, the first is taken.
        min_gain: a program must be faster than baseline by this share.
        keeps: whether choices are kept on disk.
        layout: of propagations with fixed factors.
        earlier: what an earlier run kept, by mode: a plan, or baseline.
    """

    program: Program
    invariants: Invariants
    budget_s: float
    min_gain: float
    keeps: bool
    layout: Layout = FixedMatrix.of
    earlier: Mapping[str, str] = field(default_factory=dict)

    def choose(self, ranked: list[Rewritten], training: bool) -> Choice:
        """Return the fastest of the programs in a mode, or baseline; or what an earlier run kept."""
        wanted = self.earlier.get(mode_name(training))
        if wanted is not None:
            known = next((entry for entry in ranked if str(entry.plan) == wanted), None)
            reason = (
                "as in an earlier run" if known or wanted == BASELINE else f"by the cost model; {wanted} is no program"
            )
            return Choice(known or ranked[0], reason, wanted == BASELINE)
        if not self.budget_s:
            return Choice(ranked[0], "by the cost model")
        file = f"programs/{self._key(ranked, training)}.json"
        recalled = _recall(file, ranked) if self.keeps else None
        if recalled is not None:
            return recalled
        times = self._time(ranked, training)
        self.invariants.clear()
        fastest = min(times, key=lambda name: times[name])
        base = times[BASELINE]
        is_baseline = times[fastest] > (1 - self.min_gain) * base
        chosen = next(
            entry
            for entry in ranked
            if str(entry.plan) == min((name for name in times if name != BASELINE), key=times.__getitem__)
        )
        reason = f"a step takes {format_seconds(times[str(chosen.plan)])}, baseline's {format_seconds(base)}"
        choice = Choice(chosen, reason, is_baseline, times)
        if self.keeps and not is_crowded():
            stored = {"plan": str(chosen.plan), "reason": reason, "is_baseline": is_baseline, "tried_s": times}
            keep(file, lambda out: out.write(json.dumps(stored).encode()))
        return choice

    def _time(self, ranked: list[Rewritten], training: bool) -> dict[str, float]:
        """Return the median seconds of a step of each program; baseline's first two calls are all it gets where it is far behind."""
        program, device = self.program, self.program.features().device
        steps: dict[str, Callable[[], Any]] = {str(entry.plan): self._step(entry, training) for entry in ranked}
        times: dict[str, list[float]] = {name: [] for name in steps}
        with undisturbed(program.module, training):
            for step in steps.values():
                step()  # builds kernels, lays out matrices
            began = time.perf_counter()
            base = step_of(program, program.forward, training=training)
            times[BASELINE] = [seconds(base, device)]
            for number in range(_MOST_ROUNDS):
                for name, step in steps.items():
                    times[name].append(seconds(step, device))
                best = min(median(times[name]) for name in steps)
                if median(times[BASELINE]) < 2 * best:
                    times[BASELINE].append(seconds(base, device))
                if number:
                    steps = {name: step for name, step in steps.items() if median(times[name]) <= _OUT * best}
                    if time.perf_counter() - began > self.budget_s:
                        break
        return {name: median(samples) for name, samples in times.items()}

    def _step(self, entry: Rewritten, training: bool) -> Work:
        run, invariants = executable(entry.draft, self.invariants, self.layout), self.invariants

        def forward(features: Tensor) -> Tensor:
            invariants.follow(features)
            return run(features)

        return step_of(self.program, forward, training=training)

    def _key(self, ranked: list[Rewritten], training: bool) -> str:
        """Name everything that a choice depends on: the programs, the graph, how full the features are, the machine."""
        features = self.program.features()
        told = (
            _FORMAT, training, self.layout is FixedMatrix.of, [str(entry.draft.finish()) for entry in ranked],
            self.program.adjacency().digest, tuple(features.shape), int(torch.count_nonzero(features)), torch.__version__,
            torch.get_num_threads(), processor(), device_name(features.device),
        )  # fmt: skip
        return hashlib.sha256(repr(told).encode()).hexdigest()[:32]


def _recall(file: str, ranked: list[Rewritten]) -> Choice | None:
    """Return the choice of an earlier run; None where there is none, or it can't be had here."""
    path = kept(file)
    if path is None:
        return None
    try:
        stored = json.loads(path.read_text())
        plan, reason, is_baseline = str(stored["plan"]), str(stored["reason"]), bool(stored["is_baseline"])
        tried = {str(name): float(took) for name, took in stored["tried_s"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    found = next((entry for entry in ranked if str(entry.plan) == plan), None)
    return None if found is None else Choice(found, f"{reason} (decided in an earlier run)", is_baseline, tried)
