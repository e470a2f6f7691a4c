"""The strategy ``auto``: several strategies prepared for one program, what measured fastest kept.

Each is held to the module's answers before it is timed. Baseline is always among them, and another is kept only where a training step
(forward and backward) is faster by a margin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

from torch import Tensor

from runner.errors import UserError
from runner.kernels.formats import seconds
from runner.kernels.lower import Executable
from runner.kernels.opgraph import OpGraph
from runner.kernels.strategy import Prepared, Program, Stopwatch, Strategy, step_of, undisturbed
from runner.units import format_seconds


@dataclass(frozen=True, kw_only=True)
class Auto:
    """Options of the strategy.

    Attributes:
        candidates: baseline first.
        num_trials: timed steps of each, in turns.
        min_gain: another than baseline must be faster by this share.
        kept: the winner of an earlier run, which is prepared alone.
    """

    candidates: Sequence[Strategy]
    num_trials: int = 7
    min_gain: float = 0.03
    kept: str | None = None
    name: str = "auto"

    def prepare(self, program: Program) -> Prepared:
        """Prepare all that can take the program, verify and time them, keep the fastest."""
        watch = Stopwatch()
        wanted = [strategy for strategy in self.candidates if self.kept in (None, strategy.name)]
        prepared: dict[str, Prepared] = {}
        refused: dict[str, str] = {}
        for strategy in wanted or self.candidates:
            try:
                prepared[strategy.name] = watch.measure(f"prepare {strategy.name}", partial(strategy.prepare, program))
            except UserError as error:
                refused[strategy.name] = str(error)
        if len(prepared) == 1:
            (only,) = prepared.values()
            reason = "as in an earlier run" if self.kept == only.name else "nothing else can take the model"
            return PreparedAuto(only, watch.seconds, {}, refused, f"{only.name}, {reason}")
        steps: dict[str, float] = watch.measure("time steps", lambda: self._time(program, prepared))
        baseline = self.candidates[0].name
        fastest = min(steps, key=lambda name: steps[name])
        if steps[fastest] > (1 - self.min_gain) * steps[baseline]:
            fastest = baseline
        reason = (
            f"{fastest}, a step takes {format_seconds(steps[fastest])}, {baseline}'s {format_seconds(steps[baseline])}"
        )
        return PreparedAuto(prepared[fastest], watch.seconds, steps, refused, reason)

    def _time(self, program: Program, prepared: dict[str, Prepared]) -> dict[str, float]:
        """Return the median seconds of a step of each, in turns; torch's CPU generator and buffers are left as they were."""
        for one in prepared.values():
            program.verify(one)
        steps = {
            name: step_of(program, partial(one, training=True), one.place(program.features()))
            for name, one in prepared.items()
        }
        device = program.features().device
        times: dict[str, list[float]] = {name: [] for name in steps}
        with undisturbed(program.module):
            for number in range(self.num_trials + 1):
                for name, step in steps.items():
                    took = seconds(step, device)
                    if number:  # the first warms up
                        times[name].append(took)
        return {name: median(samples) for name, samples in times.items()}


class PreparedAuto:
    """What ``auto`` kept; see :class:`runner.kernels.strategy.Prepared`. It goes by the winner's name."""

    def __init__(
        self,
        winner: Prepared,
        preprocess_s: dict[str, float],
        steps: dict[str, float],
        refused: dict[str, str],
        reason: str,
    ) -> None:
        self._winner, self._steps, self._refused, self._reason = winner, steps, refused, reason
        self.name, self.preprocess_s, self.resident_bytes = winner.name, preprocess_s, winner.resident_bytes
        self.rounding, self.draws_by_seed = winner.rounding, winner.draws_by_seed
        choices = [{"strategy": winner.name}, *winner.report.get("choices", [])]
        self.report = {
            **winner.report, "choices": choices, "kept": winner.name, "reason": reason, "step_s": steps, "refused": refused,
        }  # fmt: skip

    @property
    def winner(self) -> Prepared:
        """The strategy that was kept."""
        return self._winner

    def __call__(self, features: Tensor, training: bool) -> Tensor:
        return self._winner(features, training)

    def place(self, rows: Tensor) -> Tensor:
        return self._winner.place(rows)

    def restore(self, rows: Tensor) -> Tensor:
        return self._winner.restore(rows)

    def locate(self, nodes: Tensor) -> Tensor:
        return self._winner.locate(nodes)

    def mask_rows(self, num_rows: int) -> Tensor | None:
        return self._winner.mask_rows(num_rows)

    def lowered(self) -> tuple[OpGraph, Executable] | None:
        return self._winner.lowered()

    def verdict(self) -> str:
        """Say what was kept, what each took, and what can't take the model."""
        lines = [f"auto keeps {self._reason}"]
        ranked = sorted(self._steps.items(), key=lambda pair: pair[1])
        lines += [f"    {name:32} {format_seconds(time_s)} a step" for name, time_s in ranked]
        lines += [f"    {name:32} can't: {why}" for name, why in self._refused.items()]
        return "\n".join(lines)

    def explain(self) -> str:
        return f"{self.verdict()}\n\n{self._winner.explain()}"
