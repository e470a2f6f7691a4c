"""The rates of the cost model, measured on this machine on generated graphs with communities, and kept on disk.

Legend: N rows, F features.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor

from runner.kernels.adjacency import Adjacency
from runner.kernels.cache import keep, kept
from runner.kernels.cpu.build import processor
from runner.kernels.cpu.library import core_cache_bytes
from runner.kernels.density.candidates import CPU, KINDS, NOTHING, Allowed, Candidates, cut
from runner.kernels.density.cost import WIDTHS, CostModel, counts_of, key_of
from runner.kernels.formats import Factory, Work, seconds
from runner.kernels.ops.backend import has_kernels

_FORMAT = 2  # of what is kept
_TILE_DENSITY = 0.0  # every community with an edge: cells then vary as entries don't
# nodes, entries a row, share of them inside communities, nodes a community: small and large, sparse and dense, near and far
_GRAPHS = (
    (1000, 6, 0.9, 50), (3000, 20, 0.6, 50), (12_000, 5, 0.5, 60), (12_000, 20, 0.1, 60), (3000, 40, 0.95, 25), (10_000, 24, 0.9, 60),
)  # fmt: skip
_SPARE = 0.5  # of a processor's time that others may take
_known: dict[tuple[Any, ...], CostModel] = {}  # of this process
_RUNS = 2  # of each kernel on each graph and width, after a first one


def cost_model(
    extra: Sequence[Factory],
    device: torch.device = CPU,
    allowed: Allowed = NOTHING,
    on_measuring: Callable[[], None] = lambda: None,
) -> CostModel:
    """Return the model of this machine, these libraries and this number of threads: from disk, else measured and kept.

    Args:
        extra: kernels beside ours.
        device: where products run.
        allowed: what a user has allowed there.
        on_measuring: called where nothing is kept, before kernels are compiled and measured, which takes a while.
    """
    told = tuple(extra), torch.get_num_threads(), str(device), allowed
    if told not in _known:
        _known[told] = _cost_model(*told, on_measuring)
    return _known[told]


def _cost_model(
    extra: tuple[Factory, ...], num_threads: int, where: str, allowed: Allowed, on_measuring: Callable[[], None]
) -> CostModel:
    device = torch.device(where)
    names = [getattr(factory, "__name__", repr(factory)) for factory in extra]
    told = (
        _FORMAT,
        names,
        torch.__version__,
        num_threads,
        processor(),
        device_name(device),
        has_kernels(device),
        allowed,
    )
    name = f"calibration/density-{hashlib.sha256(repr(told).encode()).hexdigest()[:24]}.json"
    rates = _kept_rates(name)
    if rates is None:
        on_measuring()
        fitted = fit(measure(extra, device, allowed), cache_bytes(device))
        if not is_crowded():
            keep(name, lambda file: file.write(json.dumps(fitted).encode()))
        rates = fitted
    return CostModel(rates, cache_bytes(device))


def _kept_rates(name: str) -> dict[str, list[float]] | None:
    path = kept(name)
    if path is None:
        return None
    try:
        stored = {str(key): [float(rate) for rate in rates] for key, rates in json.loads(path.read_text()).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    num_rates = len(counts_of(Work(), WIDTHS[0], 1))
    return stored if all(len(rates) == num_rates for rates in stored.values()) else None


@dataclass(frozen=True)
class Sample:
    """One measurement."""

    name: str
    work: Work
    num_features: int
    seconds: float


def measure(extra: Sequence[Factory], device: torch.device = CPU, allowed: Allowed = NOTHING) -> Iterator[Sample]:
    """Time every kernel on every generated graph and calibrated width."""
    for number, shape in enumerate(_GRAPHS):
        for is_weighted in (False, True):
            candidates = _example(
                *shape, is_weighted, number, partial(cut, extra=extra, allowed=allowed, device=device)
            )
            for width in WIDTHS:
                yield from _measure(candidates, width)


def _measure(candidates: Candidates, width: int) -> Iterator[Sample]:
    device = candidates.whole.device
    x = torch.randn(candidates.whole.adjacency.num_src, width, device=device)
    for kind in KINDS:
        for entry in candidates.formats(kind, [_TILE_DENSITY]):
            run = candidates.kernel(kind, entry).run
            yield Sample(entry.name, entry.work, width, seconds_of(lambda run=run: run(x), device))  # type: ignore[misc]
    y = torch.randn_like(x)
    yield Sample("add", Work(rows=len(x)), width, seconds_of(lambda: y.add_(x), device))


def seconds_of(work: Callable[[], Any], device: torch.device) -> float:
    """Return the least time of some runs, after a first one."""
    between = 4 * core_cache_bytes() * torch.get_num_threads()  # what lies in a core's own cache goes
    return min([seconds(work, device, between) for _ in range(_RUNS + 1)][1:])


def cache_bytes(device: torch.device) -> int:
    """Return the bytes of the cache that X may stay in: a core's own, a GPU's second level."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    return core_cache_bytes()


def is_crowded() -> bool:
    """Whether more threads want to run than there are processors, by the last minute's mean."""
    return hasattr(os, "getloadavg") and os.getloadavg()[0] > _num_processors() + _SPARE


def _num_processors() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def device_name(device: torch.device) -> str:
    """Name the device that a measurement is of; the processor has its own."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def fit(samples: Iterable[Sample], cache_bytes: int) -> dict[str, list[float]]:
    """Fit rates by non-negative least squares to relative errors: a small product counts as much as a large one."""
    by_key: dict[str, list[Sample]] = {}
    for sample in samples:
        by_key.setdefault(key_of(sample.name, sample.work.is_weighted, sample.num_features), []).append(sample)
    rates = {}
    for key, group in by_key.items():
        shares = np.array(
            [counts_of(sample.work, sample.num_features, cache_bytes) / sample.seconds for sample in group]
        )
        largest = shares.max(axis=0)
        scale = np.where(largest > 0, largest, 1)  # counts differ by six orders of magnitude
        found, _ = nnls(shares / scale, np.ones(len(group)))
        rates[key] = (found / scale).tolist()
    return rates


def _example(
    num_nodes: int,
    degree: int,
    inside: float,
    size: int,
    is_weighted: bool,
    seed: int,
    cut: Callable[[Adjacency, Tensor, Tensor], Candidates],
) -> Candidates:
    """A random graph of communities side by side; a share of each row's entries is drawn from its own."""
    generator = torch.Generator().manual_seed(seed)

    def draw(below: int) -> Tensor:
        return torch.randint(0, below, (num_nodes * degree,), generator=generator)

    dst = draw(num_nodes)
    near = (dst // size * size + draw(size)).clamp(max=num_nodes - 1)
    is_near = torch.rand(dst.numel(), generator=generator) < inside
    pairs = torch.unique(dst * num_nodes + torch.where(is_near, near, draw(num_nodes)))
    graph = Adjacency.from_edges(pairs % num_nodes, pairs // num_nodes, num_nodes, num_nodes)
    values = torch.rand(graph.num_edges, generator=generator) if is_weighted else torch.ones(graph.num_edges)
    part_ptr = torch.cat([torch.arange(0, num_nodes, size), torch.tensor([num_nodes])])
    return cut(graph, values, part_ptr)
