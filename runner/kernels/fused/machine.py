"""What the cost model is told: this machine's peaks, measured once and kept, and how full a program's fixed values are."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor

from runner.kernels.adjacency import Adjacency
from runner.kernels.cache import keep, kept
from runner.kernels.cpu.build import processor
from runner.kernels.density.calibration import device_name, is_crowded
from runner.kernels.formats import seconds
from runner.kernels.opgraph import Op, Ref
from runner.kernels.ops.spmm import spmm
from runner.kernels.rewrite.cost import Machine
from runner.kernels.rewrite.draft import Draft
from runner.kernels.rewrite.made import Propagate
from runner.kernels.strategy import Program

_FORMAT = 1  # of what is kept
_ROUNDS = 5
_known: dict[Any, Machine] = {}  # of this process


def calibrated(device: torch.device) -> Machine:
    """Return this machine's peaks: from this process, from disk, else measured (some 0.1 s) and kept."""
    told = (_FORMAT, torch.__version__, torch.get_num_threads(), processor(), device_name(device))
    if told not in _known:
        file = f"machines/{hashlib.sha256(repr(told).encode()).hexdigest()[:32]}.json"
        _known[told] = _recalled(file) or _measured(device, file)
    return _known[told]


def _recalled(file: str) -> Machine | None:
    path = kept(file)
    try:
        rates = {name: float(rate) for name, rate in json.loads(path.read_text()).items()} if path else {}
        found = Machine(**rates) if rates else None
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    valid = found is not None and all(math.isfinite(rate) and rate > 0 for rate in rates.values())
    return found if valid else None


def _measured(device: torch.device, file: str) -> Machine:
    machine = measure(device)
    if not is_crowded():
        keep(file, lambda out: out.write(json.dumps(dataclasses.asdict(machine)).encode()))
    return machine


def measure(device: torch.device) -> Machine:
    """Measure peaks: a product [8000, 512] × [512, 64], a copy of 32 MB, sums over edges at random of rows of 64, a tiny sum."""
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(8000, 512, generator=generator).to(device), torch.randn(512, 64, generator=generator).to(device)
    source = torch.ones(2**23, device=device)
    target = torch.empty_like(source)
    ends = torch.randint(20_000, (2, 300_000), generator=generator)
    graph = Adjacency.from_edges(ends[0], ends[1], 20_000, 20_000).to(device)
    rows = torch.randn(20_000, 64, generator=generator).to(device)
    tiny = torch.ones(4, 4, device=device, requires_grad=True)
    return Machine(
        flops_per_s=2 * x.shape[0] * x.shape[1] * w.shape[1] / _median_s(lambda: x @ w, device),
        bytes_per_s=2 * source.nbytes / _median_s(lambda: target.copy_(source), device),
        gathered_bytes_per_s=300_000 * 260 / _median_s(lambda: spmm(graph, rows), device),
        op_s=max(2e-6, _median_s(lambda: torch.autograd.grad((tiny * tiny).sum(), tiny), device) / 2),
    )


def _median_s(work: Callable[[], Any], device: torch.device) -> float:
    work()
    return median(seconds(work, device) for _ in range(_ROUNDS))


class StoredEntries:
    """How many entries of a fixed value aren't 0: of the features counted, of what is made of them estimated.

    Args:
        program: has the features.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._share = 1.0

    def count(self) -> None:
        """Count those of the features."""
        features: Tensor = self._program.features()
        self._share = float(torch.count_nonzero(features)) / max(features.numel(), 1)

    def __call__(self, draft: Draft, ref: Ref) -> float:
        """Return the entries of a value that aren't 0."""
        shares = {draft.graph.features.index: self._share}
        for op in draft.prologue:
            read = (shares.get(used.index, 1.0) for used in op.reads() if used.index not in draft.constants)
            shares[op.outputs[0].index] = _share_after(draft, op, max(read, default=1.0))
        return shares.get(ref.index, 1.0) * math.prod(draft.value(ref).shape)


def _share_after(draft: Draft, op: Op, share: float) -> float:
    """A sum over neighbours misses only where all of them do; other ops leave what is stored as it is."""
    if not isinstance(op, Propagate):
        return share
    adjacency = draft.graph.adjacency_of(op)
    mean_degree = adjacency.num_edges / max(adjacency.num_dst, 1)
    return 1 - (1 - share) ** max(mean_degree, 1.0)
