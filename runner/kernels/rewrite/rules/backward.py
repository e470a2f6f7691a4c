"""The backward of a propagated linear layer, in an order of its own (T1).

Legend: N nodes, Fi → Fo feature widths.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from runner.kernels.opgraph import Op, Ref
from runner.kernels.rewrite.draft import Draft
from runner.kernels.rewrite.engine import Match, Refusal
from runner.kernels.rewrite.legality import is_scale
from runner.kernels.rewrite.made import GraphLinear, Propagate
from runner.kernels.rewrite.ops import Linear
from runner.kernels.rewrite.rules.order import PROPAGATE_FIRST, TRANSFORM_FIRST


@dataclass(frozen=True)
class Pair:
    """A linear layer and the propagation beside it.

    Attributes:
        first, second: as they run.
        order: of the forward.
    """

    first: Linear | Propagate
    second: Linear | Propagate
    order: str

    @property
    def linear(self) -> Linear:
        """The layer."""
        return self.first if isinstance(self.first, Linear) else self.second  # type: ignore[return-value]

    @property
    def propagate(self) -> Propagate:
        """The propagation."""
        return self.second if isinstance(self.first, Linear) else self.first  # type: ignore[return-value]


def pairs(draft: Draft) -> Iterator[Pair]:
    """Yield linear layers of trained inputs with one propagation before or after them that nothing else reads."""
    for op in draft.ops:
        if isinstance(op, Propagate) and _is_plain(draft, op):
            source = draft.producer(op.x)
            if (
                isinstance(source, Linear)
                and source.bias is None
                and draft.is_read_once(op.x)
                and _is_hidden(draft, source.x)
            ):
                yield Pair(source, op, TRANSFORM_FIRST)
        if isinstance(op, Linear) and op.bias is None and op.grad and draft.value(op.output).space == "node":
            before = draft.producer(op.x)
            is_alone = isinstance(before, Propagate) and _is_plain(draft, before) and draft.is_read_once(op.x)
            if is_alone and isinstance(before, Propagate) and _is_hidden(draft, before.x):
                yield Pair(before, op, PROPAGATE_FIRST)


def _is_plain(draft: Draft, op: Propagate) -> bool:
    is_fixed = op.weight is None or (op.weight.index in draft.constants and is_scale(draft, op.weight))
    return op.is_linear and op.reduce == "sum" and is_fixed and op.grad and len(draft.value(op.output).shape) == 2


def _is_hidden(draft: Draft, x: Ref) -> bool:
    """Whether a gradient flows on to the input, so that there is a choice."""
    return draft.is_trainable(x)


@dataclass(frozen=True)
class Backward:
    """R2: the two run as one op, whose backward has the order that the plan wants, where that is not the forward's.

    Attributes:
        plan: by number of the weight, the order of the backward.
    """

    plan: Mapping[int, str]
    name: str = "T1 backward"
    family: str = "order"

    def find(self, draft: Draft) -> Iterator[Match | Refusal]:
        for pair in pairs(draft):
            back = self.plan.get(pair.linear.weight.index)
            if back is not None and back != pair.order:
                yield Match(
                    pair.linear.where, f"forward {pair.order}, backward {back}", partial(_join, draft, pair, back)
                )


def _join(draft: Draft, pair: Pair, back: str) -> None:
    linear, propagate = pair.linear, pair.propagate
    last: Op = pair.second
    made = GraphLinear(
        output=last.outputs[0], where=linear.where, x=pair.first.x, weight=linear.weight, is_turned=linear.is_turned,
        edge_weight=propagate.weight, row_scale=propagate.row_scale, col_scale=propagate.col_scale, order=pair.order,
        back=back, relation=propagate.relation,
    )  # fmt: skip
    draft.replace([pair.first, pair.second], [made])
