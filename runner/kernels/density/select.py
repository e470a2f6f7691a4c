"""Which kernel for which product: predicted, then measured on the graph at hand.

The cost model says for each candidate what it would take; what is predicted to be far from the fastest isn't built. The others are compared
with an fp64 product on sampled rows, then timed, interleaved. The best of each kind (single, owned, intra + inter) meet in a final; another
than the single one is adopted only where it is faster by a margin.

Legend: N rows, E edges, F features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from statistics import median

import numpy as np
import torch
from torch import Tensor

from runner.errors import VerificationError
from runner.kernels.density.candidates import KINDS, Candidates
from runner.kernels.density.cost import CostModel
from runner.kernels.density.owned import tile_density
from runner.kernels.formats import Format, Kernel, Part, SpMM, seconds

_SAMPLED_ROWS = 64
# Of a community, from which its edges may be a dense tile, beside what the cost model tells.
TILE_DENSITIES = (0.5, 0.25)
_BASELINES = ("csr_native", "csr_dgl")  # are measured whatever is predicted
_SLACK = 1.6  # over the fastest prediction, within which a kernel is measured: predictions are within 25 % for most
_CLOSE = 1.1  # times the fastest of its kind, within which a kernel meets it again in the final
_MAX_PARTS = 2  # kernels of either part that are measured
_BRIEF_S = 0.01  # a kernel's timed runs take at least so long together: brief ones are timed more often
_MOST_TRIALS = 31
# Of the sum of absolute products in a row; a matrix unit rounds both factors of a product.
_TOLERANCE = {"fp32": 1e-5, "tf32": 1e-5 + 2.1 * 2**-11, "bf16": 1e-5 + 2.1 * 2**-8}
_UNIT_ROUNDOFF = 2.0**-24  # of fp32: a plain sum of n terms may be off by n times that, and is where many are equal


@dataclass(frozen=True)
class Rule:
    """How it is chosen.

    Attributes:
        selector: ``measured``, what the model leaves is timed; ``analytic``, the model decides and nothing is timed; ``exhaustive``,
            everything is timed, every pair of kernels for the two parts among them.
        num_trials: timed runs of each candidate, at least.
        min_gain: an owned or split kernel must be faster by this share than the best single one.
        between_bytes: other data that a step touches between two products.
    """

    selector: str = "measured"
    num_trials: int = 7
    min_gain: float = 0.03
    between_bytes: int = 0


@dataclass(frozen=True)
class Choice:
    """What was chosen for one width and direction.

    Attributes:
        run: float32 [N, F] -> [N, F].
        kernels: one for the whole matrix, or intra and inter.
        tried: median seconds by candidate.
        predicted: seconds by candidate, as the cost model has them; what isn't in ``tried`` was left out for them.
        reason: why this one.
    """

    run: SpMM
    kernels: tuple[Kernel, ...]
    tried: dict[str, float]
    reason: str
    predicted: dict[str, float] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """The kernels' names."""
        return tuple(kernel.name for kernel in self.kernels)


def choose(candidates: Candidates, num_features: int, rule: Rule, model: CostModel | None = None) -> Choice:
    """Choose by a rule.

    Args:
        candidates: the parts.
        num_features: F.
        rule: how.
        model: of this machine; None (not for the rule ``analytic``): nothing is left out unmeasured.

    Raises:
        VerificationError: where a candidate's product is wrong.
    """
    lists = formats_of(candidates, num_features, model)
    predicted = _predictions(lists, num_features, model)
    if rule.selector == "analytic":
        assert model is not None
        return _by_model(candidates, lists, num_features, rule, model, predicted)
    x = _features(candidates.whole, num_features)
    kept = _worth_measuring(lists, predicted) if rule.selector == "measured" and predicted else lists
    tried, ranked = _rank(candidates, kept, x, rule)
    if kept is not lists:
        late = _left_out_too_soon(lists, kept, predicted, tried)
        if late:
            tried, ranked = _rank(candidates, late, x, rule)
    finalists = _finalists(ranked, tried, is_exhaustive=rule.selector == "exhaustive")
    choice = _final(candidates.whole, finalists, len(_close(ranked["single"], "single", tried)), x, rule, tried)
    candidates.forget_all_but([kernel for kernels in ranked.values() for kernel in kernels[:1]])
    return Choice(choice.run, choice.kernels, choice.tried, choice.reason, predicted)


def _rank(
    candidates: Candidates, lists: dict[str, list[Format]], x: Tensor, rule: Rule
) -> tuple[dict[str, float], dict[str, list[Kernel]]]:
    """Time what is listed; returns the median seconds of each, and each kind's kernels, the fastest first."""
    tried: dict[str, float] = {}
    ranked: dict[str, list[Kernel]] = {}
    for kind, entries in lists.items():
        kernels = [candidates.kernel(kind, entry) for entry in entries]
        measured = _measure(candidates.part(kind), kernels, x, rule.num_trials, rule)
        tried |= {f"{kind}: {kernel.name}": time_s for kernel, time_s in measured}
        ranked[kind] = [kernel for kernel, _ in sorted(measured, key=lambda pair: pair[1])]
    return tried, ranked


def _left_out_too_soon(
    lists: dict[str, list[Format]],
    kept: dict[str, list[Format]],
    predicted: dict[str, float],
    tried: dict[str, float],
) -> dict[str, list[Format]] | None:
    """Return what is to be timed after all: where the fastest took longer than is predicted of what was left out, the model is off."""
    fastest = min(time_s for name, time_s in tried.items() if name.startswith(("single", "owned")))

    def is_wanted(kind: str, entry: Format) -> bool:
        return entry in kept.get(kind, []) or predicted.get(f"{kind}: {entry.name}", 0.0) < fastest

    wanted = {
        kind: [entry for entry in entries if is_wanted(kind, entry)]
        if kind in ("single", "owned")
        else kept.get(kind, [])
        for kind, entries in lists.items()
    }
    wanted = {kind: entries for kind, entries in wanted.items() if entries}
    return None if wanted == kept else wanted


def formats_of(candidates: Candidates, num_features: int, model: CostModel | None) -> dict[str, list[Format]]:
    """Return what is possible by kind, at least one entry each; with tiles also from the density on that the model says pays here."""
    densities = set(TILE_DENSITIES)
    least = None if model is None else model.least_tile_density(num_features, candidates.whole.is_weighted)
    if least is not None and least <= 1:
        densities.add(least)
    found = {kind: candidates.formats(kind, sorted(densities)) for kind in KINDS}
    return {kind: entries for kind, entries in found.items() if entries}


def _predictions(lists: dict[str, list[Format]], num_features: int, model: CostModel | None) -> dict[str, float]:
    if model is None:
        return {}
    return {
        f"{kind}: {entry.name}": time_s
        for kind, entries in lists.items()
        for entry in entries
        if (time_s := model.seconds(entry.name, entry.work, num_features)) is not None
    }


def _worth_measuring(lists: dict[str, list[Format]], predicted: dict[str, float]) -> dict[str, list[Format]]:
    """Leave out what is predicted to be far behind. Our single kernel and the framework's, the baselines, stay."""

    def time_of(kind: str, entry: Format) -> float:
        return predicted.get(f"{kind}: {entry.name}", 0.0)

    fastest = min(time_s for name, time_s in predicted.items() if name.startswith(("single", "owned")))
    kept: dict[str, list[Format]] = {}
    for kind in ("single", "owned"):
        near = [
            entry
            for entry in lists.get(kind, [])
            if time_of(kind, entry) <= _SLACK * fastest or entry.name in _BASELINES
        ]
        if near:
            kept[kind] = near
    if "intra" in lists:
        parts = {
            kind: sorted(lists[kind], key=lambda entry, kind=kind: time_of(kind, entry))[:_MAX_PARTS]  # type: ignore[misc]
            for kind in ("intra", "inter")
        }
        if sum(time_of(kind, entries[0]) for kind, entries in parts.items()) <= _SLACK * fastest:
            kept |= parts
    return kept


def _close(ranked: list[Kernel], kind: str, tried: dict[str, float]) -> list[Kernel]:
    """Return the fastest of a kind and those near it: which of them is first may be chance."""
    limit = _CLOSE * tried[f"{kind}: {ranked[0].name}"]
    return [kernel for kernel in ranked if tried[f"{kind}: {kernel.name}"] <= limit]


def _finalists(
    ranked: dict[str, list[Kernel]], tried: dict[str, float], is_exhaustive: bool
) -> dict[str, tuple[Kernel, ...]]:
    """The best of each kind, single ones first; of two parts every pair where that is asked for."""
    found: dict[str, tuple[Kernel, ...]] = {
        kernel.name: (kernel,)
        for kind in ("single", "owned")
        if kind in ranked
        for kernel in _close(ranked[kind], kind, tried)
    }
    if "intra" in ranked:
        pairs: Iterable[tuple[Kernel, ...]] = product(ranked["intra"], ranked["inter"])
        for pair in pairs if is_exhaustive else [(ranked["intra"][0], ranked["inter"][0])]:
            found[" + ".join(kernel.name for kernel in pair)] = pair
    return found


def _final(
    whole: Part,
    finalists: dict[str, tuple[Kernel, ...]],
    num_singles: int,
    x: Tensor,
    rule: Rule,
    tried: dict[str, float],
) -> Choice:
    """Time the best of each kind in turns, the first ``num_singles`` of them single kernels: these times are what decides."""
    first = next(iter(finalists))
    if len(finalists) == 1:
        reason = f"{first}, the fastest single kernel; nothing else comes near or is possible"
        return Choice(run_of(finalists[first]), finalists[first], tried, reason)
    runs = [as_one(kernels) for kernels in finalists.values()]
    times = {kernel.name: time_s for kernel, time_s in _measure(whole, runs, x, 2 * rule.num_trials, rule)}
    tried |= {f"final: {name}": time_s for name, time_s in times.items()}
    single = min(list(finalists)[:num_singles], key=lambda name: times[name])
    name, reason = _decide(times, single, rule.min_gain)
    return Choice(run_of(finalists[name]), finalists[name], tried, reason)


def _decide(times: dict[str, float], single: str, min_gain: float) -> tuple[str, str]:
    """Return the name that wins against the single kernel's, and why."""
    fastest = min(times, key=lambda name: times[name])
    gain = 1 - times[fastest] / times[single]
    if fastest != single and gain >= min_gain:
        return fastest, f"{fastest}, {gain:.0%} faster than {single}"
    second = min((name for name in times if name != single), key=lambda name: times[name], default=None)
    if second is None:
        return single, f"{single}: nothing else is possible"
    return single, f"{single} alone; {second} takes {times[second] / times[single]:.2f}× its time"


def _by_model(
    candidates: Candidates,
    lists: dict[str, list[Format]],
    num_features: int,
    rule: Rule,
    model: CostModel,
    predicted: dict[str, float],
) -> Choice:
    """Take the fastest prediction; its product is checked, nothing is timed."""

    def time_of(kind: str, entry: Format) -> float:
        return predicted.get(f"{kind}: {entry.name}", float("inf"))

    best = {kind: min(entries, key=lambda entry, kind=kind: time_of(kind, entry)) for kind, entries in lists.items()}  # type: ignore[misc]
    options: dict[str, tuple[tuple[str, Format], ...]] = {
        entry.name: ((kind, entry),) for kind, entry in best.items() if kind in ("single", "owned")
    }
    times = {entry.name: time_of(kind, entry) for kind, entry in best.items() if kind in ("single", "owned")}
    if "intra" in best:
        name = f"{best['intra'].name} + {best['inter'].name}"
        options[name] = (("intra", best["intra"]), ("inter", best["inter"]))
        times[name] = sum(time_of(*part) for part in options[name])
        times[name] += model.adding(candidates.whole.adjacency.num_dst, num_features)
    name, reason = _decide(times, best["single"].name, rule.min_gain)
    kernels = tuple(candidates.kernel(kind, entry) for kind, entry in options[name])
    x = _features(candidates.whole, num_features)
    _sample(candidates.whole, x)(as_one(kernels))
    return Choice(run_of(kernels), kernels, {}, f"{reason}, by the cost model", predicted)


def _features(part: Part, num_features: int) -> Tensor:
    x = torch.randn(part.adjacency.num_src, num_features, generator=torch.Generator().manual_seed(0))
    return x.to(part.device)


def assemble(candidates: Candidates, names: Sequence[str]) -> Choice | None:
    """Return the choice of an earlier run by its kernels' names, unmeasured; None where one of them is not to be had here."""
    if len(names) == 2 and candidates.intra is None:
        return None
    kinds = [("single", "owned")] if len(names) == 1 else [("intra",), ("inter",)]
    kernels: list[Kernel] = []
    for name, possible in zip(names, kinds, strict=True):
        density = tile_density(name)
        densities = [] if density is None else [density]
        known = ((kind, entry) for kind in possible for entry in candidates.formats(kind, densities))
        found = next(((kind, entry) for kind, entry in known if entry.name == name), None)
        if found is None:
            return None
        kernels.append(candidates.kernel(*found))
    return Choice(run_of(kernels), tuple(kernels), {}, f"{' + '.join(names)}, as in an earlier run")


def as_one(kernels: Sequence[Kernel]) -> Kernel:
    """Return one kernel that does what these do together."""
    unit = next((kernel.unit for kernel in kernels if kernel.unit != "fp32"), "fp32")
    return Kernel(" + ".join(kernel.name for kernel in kernels), run_of(kernels), 0, unit)


def run_of(kernels: Sequence[Kernel]) -> SpMM:
    """Return the product of one kernel, or the sum of the two parts'."""
    if len(kernels) == 1:
        return kernels[0].run
    intra, inter = kernels
    return lambda x: intra.run(x).add_(inter.run(x))


def _measure(part: Part, kernels: list[Kernel], x: Tensor, num_trials: int, rule: Rule) -> list[tuple[Kernel, float]]:
    """Check each kernel, then time all in turns; returns the median seconds of each."""
    check = _sample(part, x)
    for kernel in kernels:
        check(kernel)
    times: dict[str, list[float]] = {kernel.name: [] for kernel in kernels}
    for number in range(_MOST_TRIALS):
        if number >= num_trials and sum(map(sum, times.values())) >= _BRIEF_S * len(kernels):
            break
        for kernel in kernels:
            times[kernel.name].append(seconds(partial(kernel.run, x), x.device, rule.between_bytes))
    return [(kernel, median(times[kernel.name])) for kernel in kernels]


def _sample(part: Part, x: Tensor) -> Callable[[Kernel], None]:
    """Return a check of a kernel's product on sampled rows against fp64; the first run also warms the kernel up."""
    degree = part.adjacency.in_degrees.numpy()
    num_rows = part.adjacency.num_dst
    rows = np.arange(num_rows)
    if num_rows > _SAMPLED_ROWS:  # the ends and the hub are where kernels go wrong
        drawn = np.random.default_rng(0).integers(0, num_rows, _SAMPLED_ROWS)
        rows = np.unique(np.concatenate([drawn, [0, num_rows - 1, int(degree.argmax()), int(degree.argmin())]]))
    values, dense = part.values.double(), x.double().cpu().numpy()
    expected = part.adjacency.matrix(values)[rows] @ dense
    scale = part.adjacency.matrix(values.abs())[rows] @ np.abs(dense)

    def check(kernel: Kernel) -> None:
        found = kernel.run(x)
        if tuple(found.shape) != (num_rows, x.shape[1]):
            raise VerificationError(
                f"kernel {kernel.name} returned shape {list(found.shape)} for {[num_rows, x.shape[1]]}"
            )
        error = np.abs(found[torch.from_numpy(rows).to(x.device)].double().cpu().numpy() - expected)
        allowed = (_TOLERANCE[kernel.unit] + _UNIT_ROUNDOFF * degree[rows, None]) * scale + 1e-30
        if not (error <= allowed).all():
            worst = np.unravel_index(int(np.argmax(error - allowed)), error.shape)
            raise VerificationError(
                f"kernel {kernel.name} is wrong at row {rows[worst[0]]}, column {worst[1]}: off by {error[worst]:.2e}"
            )

    return check
