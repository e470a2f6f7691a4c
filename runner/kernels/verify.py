"""A strategy must not change the answer: output, loss and every gradient are compared with the baseline's before anything is timed.

Legend: N nodes, K classes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from runner.errors import VerificationError
from runner.kernels.lower import Executable
from runner.kernels.opgraph import Call, Op, OpGraph

# Of the largest entry of what is compared. Two fp32 programs that sum in another order differ by some 1e-7 an op: the runner's models
# with batch norm by 1e-6 (measured on planted graphs of 4 000 and 20 000 nodes).
OUTPUT_TOLERANCE = 2e-5
GRADIENT_TOLERANCE = 1e-4
# Of the largest gradient. A sum over nodes is rounded in proportion to its terms, not to its result, and before a batch norm the
# terms cancel: there only rounding is left to compare. With this floor such a gradient may differ by 1e-6 of the largest one,
# 8 units in its last place.
_GRADIENT_FLOOR = 1e-2
# More than rounding can do to the baseline itself: past it the fp64 run isn't of the same program.
_OWN_LIMIT = 1e-3
# Runs in fp64 whose features are moved by this share, four units in fp32's last place. On a grid graph, a five-layer GIN's gradient of one
# weight moves by 4.4e-4 of its largest entry in half of such runs, one node's ReLU having turned over (measured).
_NUM_MOVED, _MOVED_BY = 8, 5e-7


@dataclass(frozen=True)
class Agreement:
    """Largest differences from the baseline, as shares of the largest entry of what is compared."""

    max_output_diff: float
    max_loss_diff: float
    max_grad_diff: float
    worst_gradient: str


@dataclass(frozen=True)
class Answer:
    """Output [N, K] in the graph's own order, loss, the gradient of each parameter and each buffer's new value, by name."""

    output: Tensor
    loss: float
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor] = field(default_factory=dict)


def answer(module: nn.Module, forward: Callable[[], Tensor], loss: Callable[[Tensor], Tensor], seed: int) -> Answer:
    """Run forward and backward once in training mode; buffers, gradients and mode are left as they were.

    Args:
        module: holds the parameters.
        forward: returns the output [N, K] in the graph's own order of nodes.
        loss: maps that output to a scalar.
        seed: of the dropout masks.
    """
    buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
    was_training = module.training
    module.train()
    module.zero_grad(set_to_none=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        output = forward()
        value = loss(output)
        value.backward()
    gradients = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach().clone()
        for name, parameter in module.named_parameters()
    }
    after = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
    module.zero_grad(set_to_none=True)
    module.train(was_training)
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            buffer.copy_(buffers[name])
    return Answer(output.detach(), float(value.detach()), gradients, after)


def evaluation(module: nn.Module, forward: Callable[[], Tensor]) -> Tensor:
    """Run forward once in evaluation mode, without gradients, and return its output [N, K]; the mode is left as it was."""
    was_training = module.training
    module.eval()
    try:
        with torch.no_grad():
            return forward()
    finally:
        module.train(was_training)


@contextmanager
def other_weights(module: nn.Module, seed: int) -> Iterator[None]:
    """Move every parameter by a tenth of its spread. A value of the first weights that was baked in shows only on others."""
    generator = torch.Generator().manual_seed(seed)
    saved = [parameter.detach().clone() for parameter in module.parameters()]
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            spread = float(parameter.std()) if parameter.numel() > 1 else 0.0
            parameter.add_(noise, alpha=0.1 * (spread or 1.0))
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, before in zip(module.parameters(), saved, strict=True):
                parameter.copy_(before)


def compare(expected: Answer, found: Answer) -> Agreement:
    """Return the largest differences; a NaN on one side only counts as infinite."""
    largest = max(
        (float(gradient.abs().max()) for gradient in expected.gradients.values() if gradient.numel()), default=0.0
    )
    differences = {
        name: relative_difference(gradient, found.gradients[name], _GRADIENT_FLOOR * largest)
        for name, gradient in expected.gradients.items()
    }
    worst = max(differences, key=lambda name: differences[name], default="")
    loss = relative_difference(
        torch.tensor(expected.loss, dtype=torch.float64), torch.tensor(found.loss, dtype=torch.float64)
    )
    moved = [
        relative_difference(buffer, found.buffers[name])
        for name, buffer in expected.buffers.items()
        if name in found.buffers
    ]
    output = max([relative_difference(expected.output, found.output), *moved])
    return Agreement(output, loss, differences.get(worst, 0.0), worst)


def worse_of(one: Agreement, other: Agreement) -> Agreement:
    """Return the larger of each difference."""
    worst = one if one.max_grad_diff >= other.max_grad_diff else other
    return Agreement(
        max(one.max_output_diff, other.max_output_diff),
        max(one.max_loss_diff, other.max_loss_diff),
        worst.max_grad_diff,
        worst.worst_gradient,
    )


def relative_difference(expected: Tensor, found: Tensor, floor: float = 0.0) -> float:
    """Return max |found - expected| over max |expected| (or ``floor``, whichever is larger) of two tensors of one shape.

    NaN and infinities must be the same on both sides; where they are not, or the shapes differ, the difference is infinite.
    """
    if not expected.numel():
        return 0.0
    if expected.shape != found.shape:
        return float("inf")
    expected, found = expected.double(), found.double()
    finite = torch.isfinite(expected)
    if (
        not torch.equal(torch.nan_to_num(expected[~finite]), torch.nan_to_num(found[~finite]))
        or not torch.isfinite(found[finite]).all()
    ):
        return float("inf")
    if not finite.any():
        return 0.0
    difference = float((found - expected)[finite].abs().max())
    scale = max(float(expected[finite].abs().max()), floor)
    return difference / scale if scale else (0.0 if difference == 0 else float("inf"))


def tolerances(rounding: float) -> tuple[float, float]:
    """Return what outputs and gradients may be off by, as shares of the largest entry."""
    return max(OUTPUT_TOLERANCE, 8 * rounding), max(GRADIENT_TOLERANCE, 40 * rounding)


def require(
    strategy: str,
    expected: Answer,
    found: Answer,
    exact: Callable[[int], Answer],
    culprit: Callable[[], str],
    rounding: float = 0.0,
) -> Agreement:
    """Compare a strategy's answer with the baseline's and raise where it is past tolerance.

    Two right programs can differ by more than rounding: a value that is 0 up to rounding falls on either side of a ReLU, and
    its node's gradient comes or goes. So past the tolerance an fp64 run decides: the strategy may be off by at most twice
    (output, loss) or three times (gradients) as much as the baseline itself is, or as fp64 runs are among each other whose
    features are moved by as much as rounding moves values.

    Args:
        strategy: its name.
        expected, found: of the baseline and of the strategy, same weights, inputs and masks.
        exact: runs the program in fp64, with features as they are (0) or moved (1, 2, …); called only past tolerance.
        culprit: finds the op to blame; called only on failure.
        rounding: of the factors of products, where a user allowed less than fp32: outputs may be off by eight times that, gradients
            by forty.

    Raises:
        VerificationError: naming the op and the differences.
    """
    output, gradient = tolerances(rounding)
    agreement = compare(expected, found)
    if _within(agreement, output, output, gradient):
        return agreement
    reference = exact(0)
    own, strategys = compare(reference, expected), compare(reference, found)
    if not _within(own, _OWN_LIMIT, _OWN_LIMIT, 10 * _OWN_LIMIT):
        raise VerificationError(
            f"{strategy}: the captured op graph is not the module: in fp64 its output is off by {own.max_output_diff:.1e}, "
            f"its loss by {own.max_loss_diff:.1e}, its gradient of {own.worst_gradient} by {own.max_grad_diff:.1e}; forward does something "
            "that wasn't recorded, use kernel=baseline"
        )
    for draw in range(_NUM_MOVED + 1):
        moved = own if draw == 0 else compare(reference, exact(draw))
        if _within(
            strategys,
            max(2 * own.max_output_diff, output),
            max(2 * own.max_loss_diff, output),
            max(3 * moved.max_grad_diff, gradient),
        ):
            return agreement
    raise VerificationError(
        f"{strategy} differs from baseline at {culprit()}: against fp64, its output is off by {strategys.max_output_diff:.1e} "
        f"(baseline {own.max_output_diff:.1e}), its loss by {strategys.max_loss_diff:.1e} ({own.max_loss_diff:.1e}), its gradient of "
        f"{strategys.worst_gradient} by {strategys.max_grad_diff:.1e} ({own.max_grad_diff:.1e}), as shares of the largest entry"
    )


def _within(agreement: Agreement, output: float, loss: float, gradient: float) -> bool:
    return (
        agreement.max_output_diff <= output and agreement.max_loss_diff <= loss and agreement.max_grad_diff <= gradient
    )


def answer_in_fp64(
    graph: OpGraph,
    features: Tensor,
    loss: Callable[[Tensor], Tensor],
    seed: int,
    expected: Answer,
    draw: int = 0,
    masks: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Answer:
    """Run a training op graph forward and backward in fp64, op by op in plain torch, with the dropout masks of ``seed``.

    Args:
        graph: of the training forward.
        features: float [N, F], in the graph's own order.
        loss: of the output.
        seed: of the dropout masks.
        expected: the baseline's answer, for the names and shapes of the gradients.
        draw: above 0, which random numbers move the features.
        masks: the context in which dropout draws as the strategy does.
    """
    features = features.double()
    if draw:
        noise = torch.randn(features.shape, generator=torch.Generator().manual_seed(draw), dtype=torch.float64)
        features = features * (1 + _MOVED_BY * noise.to(features.device))

    def exact(tensor: Tensor) -> Tensor:
        copied = tensor.detach().double() if tensor.is_floating_point() else tensor.detach().clone()
        return copied.requires_grad_(tensor.requires_grad)

    leaves = {index: exact(leaf) for index, leaf in graph.leaves.items()}
    constants = {index: exact(constant) for index, constant in graph.constants.items()}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        with masks():
            output = Executable(dataclasses.replace(graph, leaves=leaves, constants=constants))(features)
        value = loss(output)
        value.backward()
    by_name = {graph.values[index].name: leaf.grad for index, leaf in leaves.items() if leaf.grad is not None}
    gradients = {name: by_name.get(name, torch.zeros_like(gradient)) for name, gradient in expected.gradients.items()}
    return Answer(output.detach(), float(value.detach()), gradients)


def first_difference(
    graph: OpGraph,
    lowered: Executable,
    features: Tensor,
    place: Callable[[Tensor], Tensor],
    restore: Callable[[Tensor], Tensor],
    seed: int,
    rounding: float = 0.0,
    masks: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> str:
    """Name the first op whose value in ``lowered`` differs from plain torch; of a rewritten program, where numbers stayed.

    Args:
        graph: the op graph that was lowered.
        lowered: a strategy's version of it.
        features: float [N, F], in the graph's own order.
        place, restore: to and from the strategy's order of nodes.
        seed: of the dropout masks.
        rounding: as in :func:`require`.
        masks: as in :func:`answer_in_fp64`.
    """
    expected: dict[int, Tensor] = {}
    found: list[tuple[Op, tuple[Tensor, ...]]] = []

    def note(op: Op, outputs: tuple[Tensor, ...]) -> None:
        expected.update({ref.index: output for ref, output in zip(op.outputs, outputs, strict=True)})

    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        with masks():
            Executable(graph)(features, trace=note)
        torch.manual_seed(seed)
        lowered(place(features), trace=lambda op, outputs: found.append((op, outputs)))
    for op, outputs in found:
        for ref, given in zip(op.outputs, outputs, strict=True):
            right = expected.get(ref.index)
            if right is None or right.numel() != given.numel():
                continue  # made by a rewrite
            right = right.reshape(given.shape)
            is_node = graph.values[ref.index].space == "node"
            if relative_difference(right, restore(given) if is_node else given) > tolerances(rounding)[0]:
                positions = (
                    "; a model that goes by nodes' positions needs kernel.partition=none"
                    if isinstance(op, Call)
                    else ""
                )
                return f"'{op.label}' ({op.where}, %{ref.index}{positions})"
    return "the backward of an op (every forward value agrees)"
