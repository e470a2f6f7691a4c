"""Time and memory of a piece of work, and of several in turns."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from runner.kernels.formats import seconds

Work = Callable[[], Any]


def in_turns(
    works: Mapping[str, Work],
    num_rounds: int,
    device: torch.device,
    budget_s: float = float("inf"),
    on_round: Callable[[], None] = lambda: None,
    least_rounds: int = 3,
    before: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """Time each work once a round, each round in another order, so that what runs before it and whatever the machine does hit all alike.

    Args:
        works: by name; they have run before.
        num_rounds: at most so many rounds.
        device: where they run.
        budget_s: no new round after so many seconds, but ``least_rounds`` at least.
        on_round: called after each round.
        least_rounds: whatever the budget.
        before: called before each work, untimed.
    """
    order, samples = list(works), {name: list[float]() for name in works}
    shuffle = random.Random(0).shuffle
    began = time.perf_counter()
    for number in range(num_rounds):
        shuffle(order)
        for name in order:
            before()
            samples[name].append(seconds(works[name], device))
        on_round()
        if number + 1 >= least_rounds and time.perf_counter() - began > budget_s:
            break
    return samples


def run_for(work: Work, num_times: int, budget_s: float) -> None:
    """Run ``work`` so often, but no longer than the budget, once at least."""
    began = time.perf_counter()
    for _ in range(max(1, num_times)):
        work()
        if time.perf_counter() - began > budget_s:
            break


def peak_memory(work: Work, device: torch.device) -> int:
    """Return the most memory, in bytes, that torch's allocator of a device held at once during ``work`` beyond what they held before."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    assert profile.profiler is not None
    recorded = profile.profiler.kineto_results
    assert recorded is not None
    changes = sorted((event.start_ns(), event.nbytes()) for event in recorded.events() if event.name() == "[memory]")
    held = highest = 0
    for _, change in changes:
        held += change
        highest = max(highest, held)
    return highest


def copy_bandwidth(device: torch.device, num_bytes: int = 2**28) -> float:
    """Return bytes read and written a second by a copy of ``num_bytes``, the best of several: what memory gives."""
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    times = [seconds(lambda: target.copy_(source), device) for _ in range(9)]
    return 2 * source.nbytes / min(times[1:])
