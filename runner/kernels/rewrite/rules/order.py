"""Order (T1): whether a linear layer comes before or after the propagations that act from the left of it.

Legend: N nodes, Fi → Fo feature widths.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from runner.kernels.opgraph import Op, Ref
from runner.kernels.rewrite.draft import Draft, reading
from runner.kernels.rewrite.engine import Match, Refusal
from runner.kernels.rewrite.legality import Region, obstacle, region_from, region_into
from runner.kernels.rewrite.made import Propagate
from runner.kernels.rewrite.ops import Binary, Linear, Map, TypedOp

PROPAGATE_FIRST, TRANSFORM_FIRST = "propagate first", "transform first"


@dataclass(frozen=True)
class Site:
    """A linear layer that can be moved.

    Attributes:
        linear: the layer.
        into: what acts from the left on its input.
        out_of: what acts from the left on its output; empty where its bias forbids to pass.
    """

    linear: Linear
    into: Region
    out_of: Region

    @property
    def key(self) -> int:
        """Names the site in plans: the number of the value that all of it makes, which rewrites keep."""
        return self.out_of.result.index

    @property
    def base(self) -> Ref:
        """What goes in."""
        return self.into.base

    def is_ordered(self, order: str) -> bool:
        """Whether the layer already is where ``order`` wants it."""
        moved = self.out_of if order == PROPAGATE_FIRST else self.into
        return not moved.ops


def sites(draft: Draft) -> Iterator[Site]:
    """Yield the linear layers of nodes with propagations on either side that they can pass."""
    for op in draft.ops:
        if (
            isinstance(op, Linear)
            and op.grad
            and draft.value(op.output).space == "node"
            and draft.value(op.x).space == "node"
        ):
            out_of = region_from(draft, op.output) if op.bias is None else Region(op.output, (), op.output)
            site = Site(op, region_into(draft, op.x), out_of)
            if any(isinstance(inner, Propagate) for inner in (*site.into.ops, *site.out_of.ops)):
                yield site


@dataclass(frozen=True)
class Order:
    """R2, R4: moves each linear layer to where the plan wants it; what is no part of the plan stays.

    Attributes:
        plan: the order of each site, by :attr:`Site.key`.
    """

    plan: Mapping[int, str]
    name: str = "T1 order"
    family: str = "order"

    def find(self, draft: Draft) -> Iterator[Match | Refusal]:
        for site in sites(draft):
            order = self.plan.get(site.key)
            if order is not None and not site.is_ordered(order):
                width_in, width_out = draft.value(site.linear.x).shape[1], draft.value(site.linear.output).shape[1]
                what = f"{order}, {width_in} → {width_out} features"
                yield Match(site.linear.where, what, partial(_move, draft, site, order))
        yield from _refusals(draft)


def _refusals(draft: Draft) -> Iterator[Refusal]:
    """What is tempting: a linear layer whose input or output is an aggregation, or is one but for something that lies between."""
    for op in draft.ops:
        if not isinstance(op, Linear) or draft.value(op.output).space != "node":
            continue
        if op.bias is not None and region_from(draft, op.output).propagates:
            yield Refusal(op.where, "linear after the propagation", "its bias would be added once an edge (R2)")
        base = region_into(draft, op.x).base
        maker = draft.producer(base)
        reason = obstacle(maker)
        if reason is not None and _is_below_aggregation(draft, base):
            yield Refusal(op.where, "linear before the aggregation", reason)


def _is_below_aggregation(draft: Draft, ref: Ref) -> bool:
    """Whether a value is an aggregation, or one behind a dropout, a norm or a map."""
    op = draft.producer(ref)
    for _ in range(4):
        if op is None or isinstance(op, Propagate) or (isinstance(op, TypedOp) and op.obstacle):
            break
        first = next(iter(op.reads()), None)
        op = draft.producer(first)
    return isinstance(op, Propagate) or (isinstance(op, TypedOp) and op.obstacle is not None)


def _move(draft: Draft, site: Site, order: str) -> None:
    """All of the region on one side of the layer. A bias stays last: it is added after. What came before the layer is left where others
    read it too."""
    linear, result = site.linear, site.out_of.result
    old: list[Op] = [linear, *site.out_of.ops]
    ops = [*site.into.ops, *_renamed_input(site)]
    if order == PROPAGATE_FIRST:
        width = draft.value(linear.x).shape[1]
        made, end = _cloned(draft, ops, site.base, site.base, width)
        draft.replace(old, [*made, dataclasses.replace(linear, x=end, output=result)])
        return
    product = draft.like(linear.output)
    width = draft.value(linear.output).shape[1]
    first = dataclasses.replace(linear, x=site.base, output=product, bias=None)
    made, end = _cloned(draft, ops, site.base, product, width)
    if linear.bias is not None:
        made.append(Binary(output=result, where=linear.where, operation="add", a=end, b=linear.bias))
    else:
        made[-1] = dataclasses.replace(made[-1], output=result)  # type: ignore[type-var]
    draft.replace(old, [first, *made])


def _renamed_input(site: Site) -> list[Op]:
    """The region behind the layer, reading what comes into the layer."""
    return [reading(op, {site.linear.output.index: site.linear.x}) for op in site.out_of.ops]


def _cloned(draft: Draft, ops: list[Op], base: Ref, new_base: Ref, width: int) -> tuple[list[Op], Ref]:
    """Copy a region onto another base, with values of another width; returns the ops and the last value."""
    names, made, end = {base.index: new_base}, list[Op](), new_base
    for op in ops:
        end = draft.like(op.outputs[0], width)
        copied = reading(op, names)
        assert isinstance(copied, Propagate | Map | Binary)
        made.append(dataclasses.replace(copied, output=end))
        names[op.outputs[0].index] = end
    return made, end
