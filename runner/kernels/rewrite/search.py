"""Which of the legal programs: each choice is ranked by the cost model, the best few plans are left to be measured.

Legend: N nodes, E edges, F features.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice, product

from runner.kernels.generate.op import Generate
from runner.kernels.opgraph import OpGraph
from runner.kernels.rewrite import cost
from runner.kernels.rewrite.canonical import canonical
from runner.kernels.rewrite.cost import Machine, Stored
from runner.kernels.rewrite.draft import Draft
from runner.kernels.rewrite.engine import Rule, Step, apply_all
from runner.kernels.rewrite.rules.attention import FuseAttention, ScoresAsProduct
from runner.kernels.rewrite.rules.backward import Backward, pairs
from runner.kernels.rewrite.rules.common import MergeEqual, ShareProduct, StackNarrow
from runner.kernels.rewrite.rules.finish import Epilogue, ViewLast
from runner.kernels.rewrite.rules.fixed import KeepFixed, SparseFirst, sparse_sites
from runner.kernels.rewrite.rules.messages import HoistLinear, MergeGathers, Propagation, ShiftOut, SplitConcat
from runner.kernels.rewrite.rules.order import PROPAGATE_FIRST, TRANSFORM_FIRST, Order, sites
from runner.kernels.rewrite.rules.relations import PairsNotEdges
from runner.kernels.rewrite.rules.scales import FoldScale, MeanAsScale

FAMILIES = ("order", "split", "fuse", "attention", "scale", "keep", "sparse", "common", "epilogue")
_MOST_RANKED = 64  # plans, where a few are wanted: those that differ from the best in one choice, then in two
_MOST_PLANS = 4096  # where all are


@dataclass(frozen=True)
class Plan:
    """What is chosen where the rules leave a choice.

    Attributes:
        order: of each linear layer with propagations beside it, by :attr:`runner.kernels.rewrite.rules.order.Site.key`.
        sparse: by number of a first layer's weight, whether its product is sparse.
        back: by number of a hidden layer's weight, the order of its backward where that isn't the forward's.
        without: families of rules that are switched off.
    """

    order: Mapping[int, str] = field(default_factory=dict)
    sparse: Mapping[int, bool] = field(default_factory=dict)
    back: Mapping[int, str] = field(default_factory=dict)
    without: frozenset[str] = frozenset()

    def __str__(self) -> str:
        parts = [f"%{key}: {order}" for key, order in self.order.items()]
        parts += [f"%{key}: {'sparse' if is_sparse else 'dense'}" for key, is_sparse in self.sparse.items()]
        parts += [f"%{key}: backward {order}" for key, order in self.back.items()]
        return ", ".join(parts) or "nothing to choose"


@dataclass(frozen=True)
class Rewritten:
    """A program that means the same.

    Attributes:
        plan: the choices.
        draft: its ops.
        steps: how it came about.
        predicted_s: of a step.
    """

    plan: Plan
    draft: Draft
    steps: tuple[Step, ...]
    predicted_s: float


def rules_before(plan: Plan) -> list[Rule]:
    """The rules whose result every choice starts from."""
    rules: list[Rule] = [
        Propagation(), MergeGathers(), HoistLinear(), SplitConcat(), HoistLinear(), MergeGathers(), ShiftOut(), PairsNotEdges(),
        FuseAttention(), Generate(), ScoresAsProduct(), MergeEqual(), ShareProduct(),
    ]  # fmt: skip
    return [rule for rule in rules if rule.family not in plan.without]


def rules_after(plan: Plan) -> list[Rule]:
    """The rules that carry out a plan and clean up behind it."""
    rules: list[Rule] = [
        Order(plan.order), MeanAsScale(), FoldScale(), KeepFixed(), SparseFirst(plan.sparse),
        Backward(plan.back), MergeEqual(), StackNarrow(), ViewLast(),
        Epilogue(),
    ]  # fmt: skip
    return [rule for rule in rules if rule.family not in plan.without]


class Search:
    """The plans of one captured graph.

    Args:
        graph: as captured.
        machine: its peaks.
        stored: how many entries of a fixed value aren't 0.
        training: whether steps have a backward.
        without: families of rules that are switched off.
    """

    def __init__(
        self, graph: OpGraph, machine: Machine, stored: Stored, training: bool, without: frozenset[str] = frozenset()
    ) -> None:
        self._machine, self._stored, self._training = machine, stored, training
        self._empty = Plan(without=without)
        self._common = canonical(graph)
        self._steps = apply_all(rules_before(self._empty), self._common)

    def rewrite(self, plan: Plan) -> Rewritten:
        """Carry out a plan."""
        draft = self._common.copy()
        steps = apply_all(rules_after(plan), draft)
        predicted = cost.seconds(draft, self._machine, self._stored, self._training)
        return Rewritten(plan, draft, (*self._steps, *steps), predicted)

    def best(self, num_plans: int) -> list[Rewritten]:
        """Return the plans that the cost model ranks first, best first; equal programs once."""
        everything = num_plans > _MOST_RANKED
        plans = islice(self._all_plans(), _MOST_PLANS) if everything else islice(self._near_plans(), _MOST_RANKED)
        ranked = sorted(map(self.rewrite, plans), key=lambda entry: entry.predicted_s)
        distinct = {str(entry.draft.finish()): entry for entry in reversed(ranked)}
        return sorted(distinct.values(), key=lambda entry: entry.predicted_s)[:num_plans]

    def _all_plans(self) -> Iterator[Plan]:
        """Yield every plan."""
        plan, options = self._independent_best()
        for choices in product(*options.values()):
            chosen = plan
            for at, choice in zip(options, choices, strict=True):
                chosen = _with(chosen, at, choice)
            yield chosen

    def _near_plans(self) -> Iterator[Plan]:
        """Yield plans: the best of every choice by itself first, then what differs from that in one choice, then in two."""
        plan, options = self._independent_best()
        yield plan
        for key, choices in options.items():
            for choice in choices:
                yield _with(plan, key, choice)
        for (one, first), (other, second) in product(options.items(), repeat=2):
            if one < other:
                for a, b in product(first, second):
                    yield _with(_with(plan, one, a), other, b)

    def _independent_best(self) -> tuple[Plan, dict[tuple[str, int], list[str | bool]]]:
        """Decide each choice with the others as they are; orders first, since they say what a first layer reads."""
        plan, options = self._empty, dict[tuple[str, int], list[str | bool]]()
        if "order" not in plan.without:
            for key in dict.fromkeys(site.key for site in sites(self._common)):
                options["order", key] = [PROPAGATE_FIRST, TRANSFORM_FIRST]
        if "sparse" not in plan.without:
            for weight in self._sparse_weights(plan):
                options["sparse", weight] = [True, False]
        if "order" not in plan.without and self._training:
            for weight in self._hidden_weights(plan):
                options["back", weight] = [PROPAGATE_FIRST, TRANSFORM_FIRST]
        for at, choices in [*options.items(), *options.items()]:
            plan = min(
                (_with(plan, at, choice) for choice in choices), key=lambda tried: self.rewrite(tried).predicted_s
            )
        return plan, options

    def _hidden_weights(self, plan: Plan) -> list[int]:
        """Weights of layers whose backward has an order of its own to choose, whatever the forward's."""
        found: dict[int, None] = {}
        for order in (PROPAGATE_FIRST, TRANSFORM_FIRST):
            everywhere = dict.fromkeys((site.key for site in sites(self._common)), order)
            draft = self.rewrite(replace(plan, order=everywhere, without=plan.without | {"epilogue"})).draft
            found |= dict.fromkeys(pair.linear.weight.index for pair in pairs(draft))
        return list(found)

    def _sparse_weights(self, plan: Plan) -> list[int]:
        """Weights of layers that read fixed values, whatever the order."""
        found: dict[int, None] = {}
        for order in (PROPAGATE_FIRST, TRANSFORM_FIRST):
            everywhere = dict.fromkeys((site.key for site in sites(self._common)), order)
            draft = self.rewrite(replace(plan, order=everywhere)).draft
            found |= dict.fromkeys(op.weight.index for op, _, _ in sparse_sites(draft))
        return list(found)


def _with(plan: Plan, key: tuple[str, int], choice: str | bool) -> Plan:
    kind, at = key
    changed = dict(getattr(plan, kind)) | {at: choice}
    match kind:
        case "order":
            return replace(plan, order=changed)
        case "sparse":
            return replace(plan, sparse=changed)
    return replace(plan, back=changed)
