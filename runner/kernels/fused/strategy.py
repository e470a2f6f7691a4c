"""The strategy ``fused``: the captured model is rewritten by rules (:mod:`runner.kernels.rewrite`) and runs on fused kernels.

The cost model ranks the legal programs; the best few, and baseline, are timed on the real graph, both ways, within a budget. What
is fastest is kept, and the caller holds it to the module's answers (:mod:`runner.kernels.verify`). Dropout goes by seed, so no mask is
stored: see :mod:`runner.kernels.seeds`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from runner.errors import UserError, suggestion
from runner.kernels.fused.invariants import Invariants
from runner.kernels.fused.lower import Layout, executable
from runner.kernels.fused.machine import StoredEntries, calibrated
from runner.kernels.fused.products import FixedMatrix
from runner.kernels.fused.trials import BASELINE, Choice, Trials, mode_name
from runner.kernels.lower import Executable
from runner.kernels.opgraph import OpGraph
from runner.kernels.rewrite.search import FAMILIES, Rewritten, Search
from runner.kernels.strategy import OwnOrder, Program, Stopwatch
from runner.units import format_seconds


@dataclass(frozen=True, kw_only=True)
class Fused:
    """Options of the strategy.

    Attributes:
        num_plans: programs that are timed at most; 1: the cost model decides.
        trial_seconds: of timing, at most, but two rounds at least; 0: the cost model decides.
        min_gain: another than baseline must be faster by this share.
        without: families of rules that are switched off.
        keep_choices: take what an earlier run measured for the same program on the same machine.
        replay: the choices of an earlier run's report: the programs that it names are taken, not measured, so that a resumed run
            rounds as the first one did.
        name: the strategy.
    """

    num_plans: int = 6
    trial_seconds: float = 2.0
    min_gain: float = 0.03
    without: Sequence[str] = ()
    keep_choices: bool = True
    replay: Sequence[dict[str, Any]] = ()
    name: str = "fused"

    def prepare(self, program: Program, layout: Layout = FixedMatrix.of) -> PreparedFused:
        """Capture, rewrite, measure and keep the best.

        Args:
            program: the model on its graph.
            layout: lays out propagations with fixed factors.

        Raises:
            UserError: where the model can't be captured, or a family's name is unknown.
        """
        for family in self.without:
            if family not in FAMILIES:
                raise UserError(f"no family of rules is called '{family}'; {suggestion(family, FAMILIES)}")
        watch = Stopwatch()
        graphs = {training: watch.measure("capture", partial(program.capture, training)) for training in (True, False)}
        machine = watch.measure("calibrate", partial(calibrated, program.features().device))
        stored = StoredEntries(program)
        watch.measure("count", stored.count)

        def search(training: bool) -> list[Rewritten]:
            found = Search(graphs[training], machine, stored, training, frozenset(self.without))
            return found.best(self.num_plans)

        ranked: dict[bool, list[Rewritten]] = {
            training: watch.measure("rewrite", partial(search, training)) for training in (True, False)
        }
        invariants = Invariants()
        earlier: dict[str, str] = next((choice["programs"] for choice in self.replay if "programs" in choice), {})
        trials = Trials(program, invariants, self.trial_seconds / 2, self.min_gain, self.keep_choices, layout, earlier)
        choices: dict[bool, Choice] = {
            training: watch.measure("select", partial(trials.choose, ranked[training], training))
            for training in (True, False)
        }
        return PreparedFused(program, graphs, choices, ranked, invariants, watch.seconds, layout)


class PreparedFused(OwnOrder):
    """A program in fused kernels, nodes in their own order; see :class:`runner.kernels.strategy.Prepared`."""

    name = "fused"
    draws_by_seed = True

    def __init__(
        self,
        program: Program,
        graphs: dict[bool, OpGraph],
        choices: dict[bool, Choice],
        ranked: dict[bool, list[Rewritten]],
        invariants: Invariants,
        preprocess_s: dict[str, float],
        layout: Layout,
    ) -> None:
        self._graphs, self._choices, self._ranked = graphs, choices, ranked
        self._invariants, self.preprocess_s = invariants, preprocess_s
        self._runs = {
            training: executable(choice.kept.draft, invariants, layout) for training, choice in choices.items()
        }
        self._forward = program.forward
        self.draws_by_seed = not choices[True].is_baseline
        self.report: dict[str, Any] = self._describe()

    @property
    def resident_bytes(self) -> int:
        """What is kept of the graph and the features, in bytes."""
        return self._invariants.num_bytes

    def __call__(self, features: Tensor, training: bool) -> Tensor:
        if self._choices[training].is_baseline:
            return self._forward(features)
        self._invariants.follow(features)
        return self._runs[training](features)

    def lowered(self) -> tuple[OpGraph, Executable] | None:
        return None if self._choices[True].is_baseline else (self._graphs[True], self._runs[True])

    def _describe(self) -> dict[str, Any]:
        kept, choice = self._choices[True].kept, self._choices[True]
        return {
            "plan": str(kept.plan),
            "is_baseline": choice.is_baseline,
            "choices": [{"programs": {mode_name(training): one.named for training, one in self._choices.items()}}],
            "rules": [str(step) for step in kept.steps if not step.reason],
            "refused": [str(step) for step in kept.steps if step.reason],
            "ops": [op.label for op in kept.draft.ops],
            "tried_s": choice.tried_s,
            "predicted_s": {str(entry.plan): entry.predicted_s for entry in self._ranked[True]},
            "evaluation": {
                "plan": str(self._choices[False].kept.plan),
                "is_baseline": self._choices[False].is_baseline,
                "tried_s": self._choices[False].tried_s,
            },
        }

    def seconds_of(self, other: PreparedFused) -> float | None:
        """Return what a training step of the program that another kept took when the programs were timed here; None where it wasn't."""
        choice = other._choices[True]
        text = str(choice.kept.draft.finish())
        same = (str(entry.plan) for entry in self._ranked[True] if str(entry.draft.finish()) == text)
        return self._choices[True].tried_s.get(BASELINE if choice.is_baseline else next(same, ""))

    def explain(self) -> str:
        kept = self._choices[True].kept
        lines = ["captured, in training:", str(self._graphs[True]), "", "rewritten:", str(kept.draft.finish()), ""]
        once = ", ".join(op.label for op in kept.draft.prologue)
        lines += [f"computed once: {once}", ""] if once else []
        lines += ["rules that were applied:", *(f"  {step}" for step in kept.steps if not step.reason)]
        refused = [f"  {step}" for step in kept.steps if step.reason]
        lines += ["rules that were refused:", *refused] if refused else []
        for training, mode in ((True, "training"), (False, "evaluation")):
            lines += ["", *self._verdict(training, mode)]
        return "\n".join(lines)

    def _verdict(self, training: bool, mode: str) -> list[str]:
        """What was kept in a mode, and what each program took."""
        choice = self._choices[training]
        lines = [f"{mode}: kept {'baseline' if choice.is_baseline else choice.kept.plan} ({choice.reason})"]
        for entry in self._ranked[training]:
            took = choice.tried_s.get(str(entry.plan))
            measured = "not timed" if took is None else format_seconds(took)
            lines.append(f"    {entry.plan!s:70} {measured:>9}   ({format_seconds(entry.predicted_s)} predicted)")
        if BASELINE in choice.tried_s:
            lines.append(f"    {BASELINE:70} {format_seconds(choice.tried_s[BASELINE]):>9}")
        return lines
