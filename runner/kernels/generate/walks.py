"""What generated kernels compute while they walk edges: one walk forward, one over each side's edges backward.

Legend: C channels.
"""

from __future__ import annotations

from dataclasses import dataclass

from runner.kernels.generate.description import Description
from runner.kernels.generate.expressions import Formula, gradients, in_order, operand

Term = tuple[int, int, Formula]  # slot, index, formula; slot -1 is the result


@dataclass(frozen=True)
class Walk:
    """What a kernel computes while it walks the edges of each row.

    Attributes:
        name: of the function.
        near: the end whose row is walked: u (on the transposed graph) or v.
        sums: wide formulas that are summed over a row's edges: the result, or the gradient of a wide operand of the near end.
        small_sums: small formulas likewise.
        per_edge: gradients of edge operands.
        totals: gradients of weights, summed over all edges.
    """

    name: str
    near: str
    sums: tuple[Term, ...] = ()
    small_sums: tuple[Term, ...] = ()
    per_edge: tuple[Term, ...] = ()
    totals: tuple[Term, ...] = ()

    @property
    def far(self) -> str:
        """The other end, whose rows are gathered."""
        return "u" if self.near == "v" else "v"

    def formulas(self) -> list[Formula]:
        """All that it computes of an edge."""
        return [entry[2] for group in (self.sums, self.small_sums, self.per_edge, self.totals) for entry in group]

    def num_totals(self, channels: int) -> int:
        """How many numbers the weights' gradients have here."""
        return sum(channels if formula.is_wide else 1 for _, _, formula in self.totals)


def walks(description: Description) -> list[Walk]:
    """Return the forward and, for the operands that need gradients, the walks of the backward. The result's gradient is the operand behind
    the last."""
    message, slots = description.message, description.slots
    forward = Walk("forward", "v", sums=tuple((-1, index, formula) for index, formula in enumerate(message)))
    upstream = [operand(len(slots), index, True) for index in range(len(message))]
    found = gradients(zip(message, upstream, strict=True))
    wide: dict[str, list[Term]] = {"u": [], "v": [], "e": [], "w": []}
    small: dict[str, list[Term]] = {"u": [], "v": [], "e": [], "w": []}
    for formula, gradient in found.items():
        slot, index = told_of(formula)
        if slot < len(slots) and slots[slot].needs_gradient:
            (wide if formula.is_wide else small)[slots[slot].target].append((slot, index, gradient))
    there = Walk(
        "backward_destinations", "v", tuple(wide["v"]), tuple(small["v"]), (*wide["e"], *small["e"]), (*wide["w"], *small["w"])
    )  # fmt: skip
    back = Walk("backward_sources", "u", tuple(wide["u"]), tuple(small["u"]))
    return [forward, *(walk for walk in (there, back) if walk.formulas())]


def told_of(formula: Formula) -> tuple[int, int]:
    """Return (slot, index) of an operand."""
    slot, index = formula.told
    return int(slot), int(index)


class Writer:
    """What a writer of any language knows of a walk.

    Attributes:
        walk, channels: what it writes.
        targets, widths: of the operands and, behind them, of the result's gradient.
        is_mean: whether sums are divided by the number of edges.
        order: all formulas, arguments first.
        names: theirs in the text.
        channel_sums: those of them that are sums over channels.
    """

    def __init__(self, walk: Walk, description: Description) -> None:
        self.walk, self.channels = walk, description.channels
        self.targets = [slot.target for slot in description.slots] + ["v"]
        self.widths = [slot.width for slot in description.slots] + [len(description.message) * description.channels]
        self.is_mean = description.is_mean and walk.name == "forward"
        self.order = list(in_order(walk.formulas()))
        self.names = {formula: f"t{at}" for at, formula in enumerate(self.order)}
        self.channel_sums = [formula for formula in self.order if formula.function == "sum"]


OPERATORS = {"add": "({} + {})", "sub": "({} - {})", "mul": "({} * {})", "div": "({} / {})", "neg": "(-{})"}
