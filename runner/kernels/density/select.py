"""Which kernel for which part, by measurement on the graph at hand.

For a width and direction, every candidate is first compared with an fp64 product on sampled rows, then timed,
interleaved with the others. The split into intra- and inter-community edges is adopted only where it beats the best single kernel
by a margin.

Legend: N rows, E edges, F features.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np
import torch
from torch import Tensor

from runner.errors import VerificationError
from runner.kernels.formats import Factory, Kernel, Part, SpMM, coo_torch, csr_native, csr_torch, dense_blocks

_SAMPLED_ROWS = 64
_TOLERANCE = 1e-5  # of the sum of absolute products in a row
_HUB = 1e5  # entries of a row that double it: a plain fp32 sum of 3·10^5 positive products was off by 1.9e-5 (measured)


@dataclass(frozen=True)
class Choice:
    """What was chosen for one width and direction.

    Attributes:
        run: float32 [N, F] -> [N, F].
        kernels: one for the whole graph, or intra and inter.
        tried: median seconds by candidate.
        reason: why this one.
    """

    run: SpMM
    kernels: tuple[Kernel, ...]
    tried: dict[str, float]
    reason: str

    @property
    def names(self) -> tuple[str, ...]:
        """The kernels' names."""
        return tuple(kernel.name for kernel in self.kernels)


@dataclass(frozen=True)
class Candidates:
    """The parts of one direction of one matrix, their kernels built once for all widths."""

    whole: Part
    intra: Part | None
    inter: Part | None
    kernels: dict[str, list[Kernel]] = field(default_factory=dict)

    def of(self, name: str, extra: Sequence[Factory]) -> list[Kernel]:
        """Return the kernels of a part, built at the first call."""
        if name not in self.kernels:
            part = getattr(self, name)
            factories: list[Factory] = [csr_native, csr_torch, *extra]
            if name == "inter":
                factories.insert(0, coo_torch)
            if name == "intra":
                factories.insert(0, dense_blocks)
            self.kernels[name] = [kernel for factory in factories if (kernel := factory(part)) is not None]
        return self.kernels[name]


def choose(
    candidates: Candidates, num_features: int, num_trials: int, min_gain: float, extra: Sequence[Factory] = ()
) -> Choice:
    """Measure and choose.

    Args:
        candidates: the parts; without intra and inter only single kernels are tried.
        num_features: F.
        num_trials: timed runs of each candidate.
        min_gain: the split must be faster by this share than the best single kernel.
        extra: further kernels for every part, such as the framework's own.

    Raises:
        VerificationError: where a candidate's product is wrong.
    """
    x = torch.randn(candidates.whole.adjacency.num_src, num_features, generator=torch.Generator().manual_seed(0))
    whole = _measure(candidates.whole, candidates.of("whole", extra), x, num_trials)
    best, best_s = _fastest(whole)
    tried = {f"whole: {kernel.name}": seconds for kernel, seconds in whole}
    if candidates.intra is None or candidates.inter is None:
        return Choice(best.run, (best,), tried, f"{best.name}, the fastest of {len(whole)}; the graph is not split")
    chosen = []
    for name in ("intra", "inter"):
        measured = _measure(getattr(candidates, name), candidates.of(name, extra), x, num_trials)
        tried |= {f"{name}: {kernel.name}": seconds for kernel, seconds in measured}
        chosen.append(_fastest(measured)[0])
    intra, inter = chosen
    both = _sum_of(intra, inter)
    split = Kernel(f"{intra.name} + {inter.name}", both, 0)
    (_, best_s), (_, split_s) = _measure(candidates.whole, [best, split], x, 2 * num_trials)
    # the final between the two is timed in turns: its times are what decides
    tried |= {f"whole: {best.name}": best_s, f"split: {split.name}": split_s}
    gain = 1 - split_s / best_s
    if gain >= min_gain:
        return Choice(both, (intra, inter), tried, f"split, {gain:.0%} faster than {best.name} alone")
    reason = f"{best.name} alone; the best split takes {split_s / best_s:.2f}× its time"
    return Choice(best.run, (best,), tried, reason)


def assemble(candidates: Candidates, names: Sequence[str], extra: Sequence[Factory] = ()) -> Choice | None:
    """Return the choice of an earlier run by its kernels' names, unmeasured; None where one of them is not to be had here."""
    parts = ("whole",) if len(names) == 1 else ("intra", "inter")
    if len(names) == 2 and candidates.intra is None:
        return None
    kernels: list[Kernel] = []
    for part, name in zip(parts, names, strict=True):
        found = next((kernel for kernel in candidates.of(part, extra) if kernel.name == name), None)
        if found is None:
            return None
        kernels.append(found)
    run = kernels[0].run if len(kernels) == 1 else _sum_of(*kernels)
    return Choice(run, tuple(kernels), {}, f"{' + '.join(names)}, as in the run that is resumed")


def _sum_of(intra: Kernel, inter: Kernel) -> SpMM:
    return lambda x: intra.run(x).add_(inter.run(x))


def _fastest(measured: list[tuple[Kernel, float]]) -> tuple[Kernel, float]:
    return min(measured, key=lambda pair: pair[1])


def _measure(part: Part, kernels: list[Kernel], x: Tensor, num_trials: int) -> list[tuple[Kernel, float]]:
    """Check each kernel, then time all in turns; returns the median seconds of each."""
    check = _sample(part, x)
    for kernel in kernels:
        check(kernel)
    times: dict[str, list[float]] = {kernel.name: [] for kernel in kernels}
    for _ in range(num_trials):
        for kernel in kernels:
            start = time.perf_counter()
            kernel.run(x)
            times[kernel.name].append(time.perf_counter() - start)
    return [(kernel, median(times[kernel.name])) for kernel in kernels]


def _sample(part: Part, x: Tensor) -> Callable[[Kernel], None]:
    """Return a check of a kernel's product on sampled rows against fp64; the first run also warms the kernel up."""
    degree = part.adjacency.in_degrees.numpy()
    num_rows = part.adjacency.num_dst
    rows = np.arange(num_rows)
    if num_rows > _SAMPLED_ROWS:  # the ends and the hub are where kernels go wrong
        drawn = np.random.default_rng(0).integers(0, num_rows, _SAMPLED_ROWS)
        rows = np.unique(np.concatenate([drawn, [0, num_rows - 1, int(degree.argmax()), int(degree.argmin())]]))
    values, dense = part.values.double(), x.double().numpy()
    expected = part.adjacency.matrix(values)[rows] @ dense
    scale = part.adjacency.matrix(values.abs())[rows] @ np.abs(dense)
    allowed = _TOLERANCE * (1 + degree[rows, None] / _HUB) * scale + 1e-30

    def check(kernel: Kernel) -> None:
        found = kernel.run(x)
        if tuple(found.shape) != (num_rows, x.shape[1]):
            raise VerificationError(
                f"kernel {kernel.name} returned shape {list(found.shape)} for {[num_rows, x.shape[1]]}"
            )
        error = np.abs(found[torch.from_numpy(rows)].double().numpy() - expected)
        if not (error <= allowed).all():
            worst = np.unravel_index(int(np.argmax(error - allowed)), error.shape)
            raise VerificationError(
                f"kernel {kernel.name} is wrong at row {rows[worst[0]]}, column {worst[1]}: off by {error[worst]:.2e}"
            )

    return check
