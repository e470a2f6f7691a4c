"""Which kernel for which part, by measurement on the graph at hand.

For a width and direction, every candidate is first compared with an fp64 product on sampled rows, then timed, interleaved with the others.
There are three kinds: one kernel for the whole matrix (single); one whose communities own their rows, with a format of its own for edges
inside (owned); one for the edges inside communities and one for the rest, added up (split). The best of each meet in a final; another than
the single one is adopted only where it is faster by a margin.

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
from runner.kernels.density.owned import Owned
from runner.kernels.formats import Factory, Kernel, Part, SpMM, coo_torch, csr_native, csr_torch, dense_blocks

_SAMPLED_ROWS = 64
# Of a community, from which its edges are a dense tile.
_TILE_DENSITIES = (0.5, 0.25)
_TOLERANCE = 1e-5  # of the sum of absolute products in a row
_HUB = 1e5  # entries of a row that double it: a plain fp32 sum of 3·10^5 positive products was off by 1.9e-5 (measured)


@dataclass(frozen=True)
class Choice:
    """What was chosen for one width and direction.

    Attributes:
        run: float32 [N, F] -> [N, F].
        kernels: one for the whole matrix, or intra and inter.
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
    """The parts of one direction of one matrix, their kernels built once for all widths. Without intra and inter nothing is split."""

    whole: Part
    intra: Part | None
    inter: Part | None
    kernels: dict[str, list[Kernel]] = field(default_factory=dict)

    def of(self, kind: str, extra: Sequence[Factory]) -> list[Kernel]:
        """Return the kernels of a kind (single, owned, intra, inter), built at the first call."""
        if kind not in self.kernels:
            self.kernels[kind] = self._owned() if kind == "owned" else self._of_part(kind, extra)
        return self.kernels[kind]

    def part(self, kind: str) -> Part:
        """Return what the kernels of a kind multiply."""
        found = {"intra": self.intra, "inter": self.inter}.get(kind, self.whole)
        assert found is not None
        return found

    def _of_part(self, kind: str, extra: Sequence[Factory]) -> list[Kernel]:
        factories: list[Factory] = [csr_native, csr_torch, *extra]
        if kind == "inter":
            factories.insert(0, coo_torch)
        if kind == "intra":
            factories.insert(0, dense_blocks)
        return [kernel for factory in factories if (kernel := factory(self.part(kind))) is not None]

    def _owned(self) -> list[Kernel]:
        if self.whole.part_ptr is None or not self.whole.adjacency.num_edges:
            return []
        owned = Owned(self.whole)
        made = [owned.rest(), owned.local(), owned.bits(), *(owned.tiles(density) for density in _TILE_DENSITIES)]
        return [kernel for kernel in made if kernel is not None]


def choose(
    candidates: Candidates, num_features: int, num_trials: int, min_gain: float, extra: Sequence[Factory] = ()
) -> Choice:
    """Measure and choose.

    Args:
        candidates: the parts.
        num_features: F.
        num_trials: timed runs of each candidate.
        min_gain: an owned or split kernel must be faster by this share than the best single one.
        extra: further kernels for every part, such as the framework's own.

    Raises:
        VerificationError: where a candidate's product is wrong.
    """
    x = torch.randn(candidates.whole.adjacency.num_src, num_features, generator=torch.Generator().manual_seed(0))
    tried: dict[str, float] = {}

    def best_of(kind: str) -> Kernel | None:
        measured = _measure(candidates.part(kind), candidates.of(kind, extra), x, num_trials)
        tried.update({f"{kind}: {kernel.name}": seconds for kernel, seconds in measured})
        return min(measured, key=lambda pair: pair[1])[0] if measured else None

    single, owned = best_of("single"), best_of("owned")
    assert single is not None
    finalists: dict[str, tuple[Kernel, ...]] = {kernel.name: (kernel,) for kernel in (single, owned) if kernel}
    if candidates.intra is not None and candidates.inter is not None:
        intra, inter = best_of("intra"), best_of("inter")
        assert intra is not None
        assert inter is not None
        finalists[f"{intra.name} + {inter.name}"] = (intra, inter)
    if len(finalists) == 1:
        return Choice(
            single.run, (single,), tried, f"{single.name}, the fastest single kernel; there are no communities"
        )
    return _final(candidates.whole, finalists, x, 2 * num_trials, min_gain, tried)


def _final(
    whole: Part,
    finalists: dict[str, tuple[Kernel, ...]],
    x: Tensor,
    num_trials: int,
    min_gain: float,
    tried: dict[str, float],
) -> Choice:
    """Time the best of each kind, the first the single one, in turns: these times are what decides."""
    runs = [Kernel(name, _run_of(kernels), 0) for name, kernels in finalists.items()]
    seconds = {kernel.name: time_s for kernel, time_s in _measure(whole, runs, x, num_trials)}
    tried |= {f"final: {name}": time_s for name, time_s in seconds.items()}
    single, fastest = next(iter(finalists)), min(seconds, key=lambda name: seconds[name])
    gain = 1 - seconds[fastest] / seconds[single]
    if fastest != single and gain >= min_gain:
        reason = f"{fastest}, {gain:.0%} faster than {single}"
    else:
        second = min((name for name in finalists if name != single), key=lambda name: seconds[name])
        fastest, reason = single, f"{single} alone; {second} takes {seconds[second] / seconds[single]:.2f}× its time"
    return Choice(_run_of(finalists[fastest]), finalists[fastest], tried, reason)


def assemble(candidates: Candidates, names: Sequence[str], extra: Sequence[Factory] = ()) -> Choice | None:
    """Return the choice of an earlier run by its kernels' names, unmeasured; None where one of them is not to be had here."""
    if len(names) == 2 and candidates.intra is None:
        return None
    kinds = [("single", "owned")] if len(names) == 1 else [("intra",), ("inter",)]
    kernels: list[Kernel] = []
    for name, possible in zip(names, kinds, strict=True):
        known = (kernel for kind in possible for kernel in candidates.of(kind, extra))
        found = next((kernel for kernel in known if kernel.name == name), None)
        if found is None:
            return None
        kernels.append(found)
    return Choice(_run_of(kernels), tuple(kernels), {}, f"{' + '.join(names)}, as in an earlier run")


def _run_of(kernels: Sequence[Kernel]) -> SpMM:
    if len(kernels) == 1:
        return kernels[0].run
    intra, inter = kernels
    return lambda x: intra.run(x).add_(inter.run(x))


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
