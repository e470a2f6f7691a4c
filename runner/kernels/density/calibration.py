"""The rates of the cost model, measured on this machine on generated graphs with communities, and kept on disk.

Legend: N rows, F features.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls

from runner.kernels.adjacency import Adjacency
from runner.kernels.cache import keep, kept
from runner.kernels.cpu.build import processor
from runner.kernels.density.candidates import KINDS, Candidates, cut
from runner.kernels.density.cost import WIDTHS, CostModel, counts_of, key_of
from runner.kernels.formats import Factory, Work

_FORMAT = 1  # of what is kept
_TILE_DENSITY = 0.0  # every community with an edge: cells then vary as entries don't
# nodes, entries a row, share of them inside communities, nodes a community: small and large, sparse and dense, near and far
_GRAPHS = (
    (1000, 6, 0.9, 50), (3000, 20, 0.6, 50), (12_000, 5, 0.5, 60), (12_000, 20, 0.1, 60), (3000, 40, 0.95, 25), (10_000, 24, 0.9, 60),
)  # fmt: skip
_RUNS = 2  # of each kernel on each graph and width, after a first one


def cost_model(extra: Sequence[Factory]) -> CostModel:
    """Return the model of this machine, these libraries and this number of threads: from disk, else measured and kept."""
    return _cost_model(tuple(extra), torch.get_num_threads())


@cache
def _cost_model(extra: tuple[Factory, ...], num_threads: int) -> CostModel:
    names = [getattr(factory, "__name__", repr(factory)) for factory in extra]
    told = (_FORMAT, names, torch.__version__, num_threads, processor())
    name = f"calibration/density-{hashlib.sha256(repr(told).encode()).hexdigest()[:24]}.json"
    rates = _kept_rates(name)
    if rates is None:
        fitted = fit(measure(extra))
        keep(name, lambda file: file.write(json.dumps(fitted).encode()))
        rates = fitted
    return CostModel(rates)


def _kept_rates(name: str) -> dict[str, list[float]] | None:
    path = kept(name)
    if path is None:
        return None
    try:
        stored = {str(key): [float(rate) for rate in rates] for key, rates in json.loads(path.read_text()).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    num_rates = len(counts_of(Work(), WIDTHS[0]))
    return stored if all(len(rates) == num_rates for rates in stored.values()) else None


@dataclass(frozen=True)
class Sample:
    """One measurement."""

    name: str
    work: Work
    num_features: int
    seconds: float


def measure(extra: Sequence[Factory]) -> Iterator[Sample]:
    """Time every kernel on every generated graph and calibrated width."""
    for number, shape in enumerate(_GRAPHS):
        for is_weighted in (False, True):
            candidates = _example(*shape, is_weighted, number, extra)
            for width in WIDTHS:
                yield from _measure(candidates, width)


def _measure(candidates: Candidates, width: int) -> Iterator[Sample]:
    x = torch.randn(candidates.whole.adjacency.num_src, width)
    for kind in KINDS:
        for entry in candidates.formats(kind, [_TILE_DENSITY]):
            run = candidates.kernel(kind, entry).run
            yield Sample(entry.name, entry.work, width, _seconds(lambda run=run: run(x)))  # type: ignore[misc]
    y = torch.randn(x.shape)
    yield Sample("add", Work(rows=len(x)), width, _seconds(lambda: y.add_(x)))


def _seconds(work: Callable[[], Any]) -> float:
    times = []
    for _ in range(_RUNS + 1):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def fit(samples: Iterable[Sample]) -> dict[str, list[float]]:
    """Fit rates by non-negative least squares to relative errors: a small product counts as much as a large one."""
    by_key: dict[str, list[Sample]] = {}
    for sample in samples:
        by_key.setdefault(key_of(sample.name, sample.work.is_weighted, sample.num_features), []).append(sample)
    rates = {}
    for key, group in by_key.items():
        shares = np.array([counts_of(sample.work, sample.num_features) / sample.seconds for sample in group])
        largest = shares.max(axis=0)
        scale = np.where(largest > 0, largest, 1)  # counts differ by six orders of magnitude
        found, _ = nnls(shares / scale, np.ones(len(group)))
        rates[key] = (found / scale).tolist()
    return rates


def _example(
    num_nodes: int, degree: int, inside: float, size: int, is_weighted: bool, seed: int, extra: Sequence[Factory]
) -> Candidates:
    """A random graph of communities side by side; a share of each row's entries is drawn from its own."""
    generator = torch.Generator().manual_seed(seed)

    def draw(below: int) -> torch.Tensor:
        return torch.randint(0, below, (num_nodes * degree,), generator=generator)

    dst = draw(num_nodes)
    near = (dst // size * size + draw(size)).clamp(max=num_nodes - 1)
    is_near = torch.rand(dst.numel(), generator=generator) < inside
    pairs = torch.unique(dst * num_nodes + torch.where(is_near, near, draw(num_nodes)))
    graph = Adjacency.from_edges(pairs % num_nodes, pairs // num_nodes, num_nodes, num_nodes)
    values = torch.rand(graph.num_edges, generator=generator) if is_weighted else torch.ones(graph.num_edges)
    part_ptr = torch.cat([torch.arange(0, num_nodes, size), torch.tensor([num_nodes])])
    return cut(graph, values, part_ptr, extra)
