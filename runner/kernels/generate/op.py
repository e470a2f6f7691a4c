"""A chain of ops over edges as one op, and the rule that makes it (T6, T7).

Legend: N nodes, E edges, H heads, C channels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from runner.kernels import reference
from runner.kernels.adjacency import Adjacency
from runner.kernels.generate.description import Description, NotACaseError, describe
from runner.kernels.opgraph import Aggregate, EdgeApply, Op, Ref
from runner.kernels.rewrite.draft import Draft
from runner.kernels.rewrite.engine import Match, Refusal
from runner.kernels.rewrite.made import Propagate
from runner.kernels.rewrite.ops import Total, TypedOp
from runner.kernels.seeds import Seeds


@dataclass(frozen=True, eq=False, kw_only=True)
class EdgeReduce(TypedOp):
    """A sum or mean over edges of a formula of both ends, the edge and weights; see :mod:`runner.kernels.generate`.

    Attributes:
        description: the kernel.
        chain: the ops that it takes the place of, in an order that executes.
    """

    description: Description
    chain: tuple[Op, ...]

    @property
    def label(self) -> str:
        return f"generated: {', '.join(op.label for op in self.chain)}"

    def reads(self) -> tuple[Ref, ...]:
        return tuple(dict.fromkeys(slot.ref for slot in self.description.slots))

    def plain(self, adjacency: Adjacency, seeds: Seeds, *tensors: Tensor) -> Tensor:
        known = {ref.index: tensor for ref, tensor in zip(self.reads(), tensors, strict=True)}
        for op in self.chain:
            found = _computed(adjacency, seeds, op, known)
            known[op.outputs[0].index] = found
        return found

    @property
    def obstacle(self) -> str:
        return "its edges have a weight for each head or channel (R2)"

    def key(self) -> None:
        return None


def _computed(adjacency: Adjacency, seeds: Seeds, op: Op, known: Mapping[int, Tensor]) -> Tensor:
    if isinstance(op, TypedOp):
        return op.plain(adjacency, seeds, *(known[ref.index] for ref in op.reads()))
    assert isinstance(op, EdgeApply | Aggregate)
    sides = [reference.gather(adjacency, known[operand.ref.index], operand.target) for operand in op.operands]
    message = reference.edge_apply(op.operation, sides[0], sides[1] if len(sides) > 1 else None)
    return reference.aggregate(adjacency, message, op.reduce) if isinstance(op, Aggregate) else message


@dataclass(frozen=True)
class Generate:
    """A chain of gathers and element-by-element ops that ends in a sum or mean: a kernel that stores nothing of an edge's size."""

    name: str = "T6 generate"
    family: str = "fuse"

    def find(self, draft: Draft) -> Iterator[Match | Refusal]:
        for op in draft.ops:
            if not isinstance(op, Propagate | Aggregate) or not op.grad or not _has_edge_work(draft, op):
                continue
            try:
                made, gone = _reduced(draft, op)
            except NotACaseError as error:
                yield Refusal(op.where, f"{op.label} with what makes its messages in one kernel", str(error))
                continue
            yield Match(
                op.where,
                f"{len(made.chain)} ops in one kernel, forward and backward",
                partial(draft.replace, gone, [made]),
            )


def _has_edge_work(draft: Draft, op: Propagate | Aggregate) -> bool:
    """Whether what it sums is computed edge by edge, or it ends in a sum over heads."""
    edges = [ref for ref in op.reads() if draft.value(ref).space == "edge"]
    return any(draft.producer(ref) is not None for ref in edges) or (bool(edges) and _heads(draft, op) is not None)


def _heads(draft: Draft, op: Op) -> Total | None:
    """The sum over the leading dimension of a reduction's rows, where nothing else reads them."""
    output = op.outputs[0]
    readers = draft.readers(output)
    is_total = len(readers) == 1 and isinstance(readers[0], Total) and output != draft.output
    if not is_total or len(draft.value(output).shape) != 3:
        return None
    (reader,) = readers
    assert isinstance(reader, Total)
    return reader if reader.dims == (1,) and not reader.keeps_dims and not reader.is_mean else None


def _reduced(draft: Draft, root: Propagate | Aggregate) -> tuple[EdgeReduce, list[Op]]:
    heads = _heads(draft, root)
    description, inner = describe(draft, root, heads)
    if not inner and heads is None:
        raise NotACaseError("what makes its messages is also needed elsewhere, or no work for one")
    wanted = {id(op) for op in inner}
    last = root if heads is None else heads
    chain = [*(op for op in draft.ops if id(op) in wanted), root, *([heads] if heads is not None else [])]
    made = EdgeReduce(
        output=last.outputs[0], where=root.where, description=description, chain=tuple(chain), relation=root.relation
    )
    return made, chain
