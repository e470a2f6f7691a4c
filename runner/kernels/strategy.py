"""Kernel strategies: how a captured model's message passing is computed. Each gives the baseline's answer, in its own order of nodes.

Legend: N nodes, F features, K classes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from runner.kernels.adjacency import Adjacency
from runner.kernels.formats import Factory
from runner.kernels.lower import Executable
from runner.kernels.opgraph import OpGraph
from runner.kernels.seeds import seeded_dropouts


@dataclass(frozen=True, kw_only=True)
class Program:
    """What a strategy is given: a model bound to one graph.

    Attributes:
        forward: the module as it is: features [N, F] -> [N, K].
        capture: returns the op graph of the training (True) or evaluation (False) forward.
        adjacency: returns the graph; built at the first call, so that who needs it pays for it.
        module: holds the parameters and buffers.
        features: returns the model's input [N, F].
        verify: holds a preparation to the module's answers; raises VerificationError where they differ.
        library_kernels: the framework's own SpMM, as a candidate beside ours.
    """

    forward: Callable[[Tensor], Tensor]
    capture: Callable[[bool], OpGraph]
    adjacency: Callable[[], Adjacency]
    module: nn.Module
    features: Callable[[], Tensor]
    verify: Callable[[Prepared], Any]
    library_kernels: Sequence[Factory] = ()


class Prepared(Protocol):
    """A program ready to run under a strategy.

    Attributes:
        name: the strategy.
        preprocess_s: seconds by phase of the preparation.
        report: what it decided, for the result file.
        rounding: relative error of the factors of its products where a user allowed less than fp32, else 0.
        draws_by_seed: whether dropout's masks are those of :mod:`runner.kernels.seeds`, not torch's.
    """

    name: str
    preprocess_s: dict[str, float]
    report: dict[str, Any]
    rounding: float
    draws_by_seed: bool

    @property
    def resident_bytes(self) -> int:
        """Memory that the strategy keeps beside the graph and the model."""
        ...

    def __call__(self, features: Tensor, training: bool) -> Tensor:
        """Run the forward on features in this strategy's order of nodes; the result is in that order."""
        ...

    def place(self, rows: Tensor) -> Tensor:
        """Bring rows [N, …] from the graph's own order into this strategy's."""
        ...

    def restore(self, rows: Tensor) -> Tensor:
        """The inverse of :meth:`place`."""
        ...

    def locate(self, nodes: Tensor) -> Tensor:
        """Return where nodes (int64, numbers of the graph's own order) are in this strategy's order."""
        ...

    def mask_rows(self, num_rows: int) -> Tensor | None:
        """Where masks by seed go by other rows than the graph's own: the row of each of a value's ``num_rows``, int64."""
        ...

    def lowered(self) -> tuple[OpGraph, Executable] | None:
        """The op graph of training and what it became; None where the module runs as it is."""
        ...

    def explain(self) -> str:
        """Say what was captured and decided, with the measurements."""
        ...


class Strategy(Protocol):
    """A kernel strategy, configured."""

    @property
    def name(self) -> str:
        """Its name in configs and results."""
        ...

    def prepare(self, program: Program) -> Prepared:
        """Plan for a program; everything that is paid once is paid here.

        Raises:
            UserError: where the strategy can't take the program, naming what it can't.
        """
        ...


@dataclass(frozen=True)
class Baseline:
    """The module as it is."""

    name: str = "baseline"

    def prepare(self, program: Program) -> Prepared:
        """Nothing to plan."""
        return PreparedModule(program)


class OwnOrder:
    """A preparation that leaves the nodes in the graph's own order, rounds as fp32 does, and draws dropout's masks as torch does."""

    rounding = 0.0
    draws_by_seed = False

    def mask_rows(self, num_rows: int) -> Tensor | None:  # noqa: ARG002
        return None

    def place(self, rows: Tensor) -> Tensor:
        return rows

    def restore(self, rows: Tensor) -> Tensor:
        return rows

    def locate(self, nodes: Tensor) -> Tensor:
        return nodes


@dataclass
class PreparedModule(OwnOrder):
    """The DGL module itself, nodes in their own order; with ``draws_by_seed`` its dropouts have the masks of a strategy that draws so."""

    program: Program
    draws_by_seed: bool = False
    seeded_rows: Callable[[int], Tensor | None] = lambda _: None
    name: str = "baseline"
    preprocess_s: dict[str, float] = field(default_factory=dict)
    resident_bytes: int = 0
    report: dict[str, Any] = field(default_factory=dict)

    def __call__(self, features: Tensor, training: bool) -> Tensor:
        with seeded_dropouts(self.seeded_rows) if self.draws_by_seed and training else nullcontext():
            return self.program.forward(features)

    def lowered(self) -> tuple[OpGraph, Executable] | None:
        return None

    def explain(self) -> str:
        return f"baseline runs the DGL module as it is; its op graph in training:\n{self.program.capture(True)}"


Work = Callable[[], Any]


def step_of(
    program: Program, forward: Callable[[Tensor], Tensor], features: Tensor | None = None, training: bool = True
) -> Work:
    """Return forward and, in training, backward of a program under a strategy, from some gradient of the output.

    Args:
        program: has the parameters.
        forward: features -> output.
        features: in the strategy's order of nodes; default: the program's.
        training: whether gradients are computed.
    """
    given = program.features() if features is None else features
    parameters = [parameter for parameter in program.module.parameters() if parameter.requires_grad]

    def step() -> None:
        torch.autograd.grad(forward(given).sum(), parameters, allow_unused=True)

    def infer() -> None:
        with torch.no_grad():
            forward(given)

    return step if training else infer


@contextmanager
def undisturbed(module: nn.Module, training: bool = True) -> Iterator[None]:
    """Let steps run in a mode, that leave the module's own and buffers, and torch's CPU generator, as they were."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    was_training = module.training
    with torch.random.fork_rng(devices=[]):
        module.train(training)
        yield
    module.train(was_training)
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)


class Stopwatch:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def measure(self, phase: str, work: Callable[[], Any]) -> Any:
        """Run ``work`` and add its time to a phase; returns its result."""
        start = time.perf_counter()
        result = work()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start
        return result


def inverse(order: Tensor) -> Tensor:
    """Return the inverse of a permutation, int64 [N]."""
    rank = torch.empty_like(order)
    rank[order] = torch.arange(order.numel(), dtype=order.dtype)
    return rank
