"""Rewritten ops → kernels.

Legend: N nodes, E edges, F features, H heads, C channels a head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from runner.kernels import native
from runner.kernels.fused.invariants import Expressions, Invariants
from runner.kernels.fused.products import FixedMatrix, SparseMatrix, finished, graph_linear, sparse_product
from runner.kernels.fused.relations import Pairs, relational
from runner.kernels.generate.op import EdgeReduce
from runner.kernels.generate.run import EdgeKernel, generated
from runner.kernels.lower import Executable, Kernel, Resolve, plain
from runner.kernels.opgraph import Op, OpGraph, Ref
from runner.kernels.ops import dot_attention, gat_attention, gatv2_attention, spmm
from runner.kernels.ops.backend import has_kernels
from runner.kernels.ops.checks import DTYPES
from runner.kernels.parameters import Epilogue
from runner.kernels.rewrite.draft import Draft
from runner.kernels.rewrite.legality import is_scale
from runner.kernels.rewrite.made import Attend, Finish, GraphLinear, Propagate, Relational, SparseProduct
from runner.kernels.rewrite.ops import Dropout, TypedOp
from runner.kernels.seeds import Seeds

Layout = Callable[..., FixedMatrix]


@dataclass(frozen=True, eq=False, kw_only=True)
class Kept(TypedOp):
    """A value of the prologue, as its owner keeps it."""

    @property
    def label(self) -> str:
        return "kept"

    def reads(self) -> tuple[Ref, ...]:
        return ()


def executable(draft: Draft, invariants: Invariants, layout: Layout = FixedMatrix.of) -> Executable:
    """Return a rewritten program on kernels: what depends on features and graph only is fetched from its owner; ``layout`` lays out
    propagations with fixed factors."""
    seeds = Seeds()
    lowering = Lowering(draft, invariants, seeds, layout)
    return Executable(lowering.graph, lambda _, op: lowering.kernel(op), seeds=seeds)


class Lowering:
    """The kernels of one rewritten program."""

    def __init__(self, draft: Draft, invariants: Invariants, seeds: Seeds, layout: Layout = FixedMatrix.of) -> None:
        self._draft, self._invariants, self._seeds, self._layout = draft, invariants, seeds, layout
        self._name = Expressions(draft, invariants)
        self.graph = self._without_prologue()
        self._has_kernels = has_kernels(draft.graph.adjacency.device)

    def _without_prologue(self) -> OpGraph:
        """The op graph with a fetch in the place of what is kept; sparse products have what they read from the owner themselves."""
        draft = self._draft
        dense = {
            ref.index for op in draft.ops for ref in op.reads() if not (isinstance(op, SparseProduct) and ref == op.x)
        }
        made = {output.index: op for op in draft.prologue for output in op.outputs}
        kept: list[Op] = [
            Kept(output=Ref(index), where=op.where)
            for index, op in made.items()
            if index in dense or Ref(index) == draft.output
        ]
        return dataclasses.replace(draft.finish(), ops=[*kept, *draft.ops])

    def kernel(self, op: Op) -> Kernel | None:
        """Return an op's kernel; None for what runs in plain torch."""
        match op:
            case Kept():
                return lambda resolve: self._fixed(op.output, resolve)
            case SparseProduct():
                return self._sparse(op)
            case _ if not self._has_kernels or self._draft.value(op.outputs[0]).dtype not in DTYPES:
                return None
            case Propagate():
                return self._propagate(op)
            case GraphLinear():
                return self._graph_linear(op)
            case Finish() | Dropout() if len(self._draft.value(op.output).shape) > 1:
                return self._finish(op)
            case Attend():
                return self._attend(op)
            case Relational():
                return self._relational(op)
            case EdgeReduce():
                return self._generated(op)
            case TypedOp():
                return None
        return native.lower(self.graph, op)

    def _fixed(self, ref: Ref, resolve: Resolve) -> Tensor:
        """A fixed value: the features, a constant, or what the prologue makes of them."""
        draft = self._draft
        if ref == draft.graph.features:
            return resolve(ref)
        if ref.index in draft.constants:
            return draft.constants[ref.index]
        return self._invariants.value(self._name(ref), lambda: self._made(ref, resolve))

    def _passing(self, ref: Ref, resolve: Resolve) -> Tensor:
        """A fixed value that need not be kept, since what is made of it is."""
        is_made = ref != self._draft.graph.features and ref.index not in self._draft.constants
        is_missing = is_made and not self._invariants.has(self._name(ref))
        return self._made(ref, resolve) if is_missing else self._fixed(ref, resolve)

    def _made(self, ref: Ref, resolve: Resolve) -> Tensor:
        """Run what a value of the prologue is made by; values between are kept only where they are asked for themselves."""
        made: dict[int, Tensor] = {}

        def read(ref: Ref) -> Tensor:
            return made[ref.index] if ref.index in made else self._fixed(ref, resolve)

        for op in self._missing(ref):
            run = self.kernel(op) or plain(self.graph, op, self._seeds)
            made[op.outputs[0].index] = run(read)
        return made[ref.index]

    def _missing(self, ref: Ref) -> list[Op]:
        """The ops of the prologue that a value needs, but those whose results are kept already."""
        needed, ops = {ref.index}, list[Op]()
        for op in reversed(self._draft.prologue):
            (output,) = op.outputs
            if output.index in needed and not self._invariants.has(self._name(output)):
                ops.append(op)
                needed.update(read.index for read in op.reads())
        return ops[::-1]

    def _sparse(self, op: SparseProduct) -> Kernel:
        draft, key = self._draft, ("sparse", self._name(op.x))
        drop = op.input_drop
        if not self._has_kernels:
            return lambda resolve: op.plain(
                draft.graph.adjacency, self._seeds, self._fixed(op.x, resolve), *map(resolve, op.reads()[1:])
            )

        def run(resolve: Resolve) -> Tensor:
            x = self._invariants.value(key, lambda: SparseMatrix.of(self._passing(op.x, resolve)))
            input_drop = None if drop is None else (drop.probability, self._seeds(drop.number))
            weight = resolve(op.weight)
            tensors = (weight, weight, *map(resolve, op.reads()[2:]))  # x isn't read densely
            return sparse_product(x, weight, op.is_turned, input_drop, op.epilogue(tensors, self._seeds))

        return run

    def _matrix(
        self, op: Propagate | GraphLinear, factors: tuple[Ref | None, ...], is_mean: bool = False
    ) -> Callable[[], FixedMatrix]:
        """The layout of a propagation with fixed factors (weight, row scale, column scale), made when it is first asked for."""
        draft, adjacency = self._draft, self._draft.graph.adjacency_of(op)
        weight, row_scale, col_scale = (
            None if ref is None else draft.constants[ref.index].reshape(-1) for ref in factors
        )
        dtype = draft.value(op.output).dtype
        if is_mean:
            mean = adjacency.mean_scale(dtype)
            row_scale = mean if row_scale is None else mean * row_scale
        key: Hashable = (
            "matrix",
            op.relation,
            is_mean,
            dtype,
            *(None if ref is None else self._name(ref) for ref in factors),
        )
        return lambda: self._invariants.layout(
            key, lambda: self._layout(adjacency, weight, row_scale, col_scale, dtype)
        )

    def _propagate(self, op: Propagate) -> Kernel:
        is_fixed = op.weight is None or (op.weight.index in self._draft.constants and is_scale(self._draft, op.weight))
        if op.reduce not in ("sum", "mean") or not is_fixed:
            return self._propagate_by_op(op)
        matrix = self._matrix(op, op.operands()[1:], op.reduce == "mean")

        def run(resolve: Resolve) -> Tensor:
            tensors = [*map(resolve, op.reads())]
            return finished(tensors[0], op.epilogue(tensors, self._seeds), matrix())

        return run

    def _graph_linear(self, op: GraphLinear) -> Kernel:
        matrix = self._matrix(op, op.operands()[2:])

        def run(resolve: Resolve) -> Tensor:
            tensors = [*map(resolve, op.reads())]
            x, weight = tensors[:2]
            return graph_linear(x, weight, op.is_turned, matrix(), op.order, op.back, op.epilogue(tensors, self._seeds))

        return run

    def _propagate_by_op(self, op: Propagate) -> Kernel:
        """With weights that change, or a maximum: our op, and an addend behind it."""
        adjacency = self._draft.graph.adjacency_of(op)

        def run(resolve: Resolve) -> Tensor:
            tensors = [*map(resolve, op.reads())]
            x, weight, row_scale, col_scale = op.fill(tensors)[0]
            assert x is not None
            told = op.epilogue(tensors, self._seeds)
            rows_by, columns_by = (None if scale is None else scale.reshape(-1) for scale in (row_scale, col_scale))
            rows = x.unsqueeze(1) if x.dim() == 1 else x
            if told.addend is not None:
                y = spmm(adjacency, rows, weight, reduce=op.reduce, row_scale=rows_by, col_scale=columns_by)
                return finished(y, told).reshape(-1, *x.shape[1:])
            bias = None if told.bias is None else told.bias.reshape(rows.shape[1:])
            return spmm(
                adjacency, rows, weight, reduce=op.reduce, row_scale=rows_by, col_scale=columns_by,
                bias=bias, activation=told.activation, slope=told.slope,
                dropout=told.dropout, seed=told.seed,
            ).reshape(-1, *x.shape[1:])  # fmt: skip

        return run

    def _finish(self, op: Finish | Dropout) -> Kernel:
        def run(resolve: Resolve) -> Tensor:
            tensors = [*map(resolve, op.reads())]
            if isinstance(op, Dropout):
                told = Epilogue(dropout=op.drop.probability, seed=self._seeds(op.drop.number))
            else:
                told = op.epilogue(tensors, self._seeds)
            return finished(tensors[0], told)

        return run

    def _relational(self, op: Relational) -> Kernel:
        draft, adjacency = self._draft, self._draft.graph.adjacency_of(op)
        types = draft.constants[op.types.index].reshape(-1)
        scale = None if op.scale is None else draft.constants[op.scale.index].reshape(-1)
        dtype = draft.value(op.output).dtype
        key = ("pairs", op.relation, op.order, op.is_mean, dtype, *(self._name(ref) for ref in op.reads()[2:]))
        first = op.order == "transform first"

        def run(resolve: Resolve) -> Tensor:
            pairs = self._invariants.layout(key, lambda: Pairs.of(adjacency, types, scale, op.is_mean, first, dtype))
            return relational(resolve(op.x), resolve(op.weight), pairs)

        return run

    def _generated(self, op: EdgeReduce) -> Kernel:
        kernel = EdgeKernel(op.description, self._draft.graph.adjacency_of(op))
        refs, shape = [slot.ref for slot in op.description.slots], self._draft.value(op.output).shape[1:]
        return lambda resolve: generated(kernel, [*map(resolve, refs)], shape)

    def _attend(self, op: Attend) -> Kernel:
        adjacency = self._draft.graph.adjacency_of(op)

        def run(resolve: Resolve) -> Tensor:
            value, key, query, vector = op.operands([*map(resolve, op.reads())])
            told = op.scoring(self._seeds)
            options: dict[str, Any] = {"dropout": told.dropout, "seed": told.seed}
            match op.score:
                case "gat":
                    assert key is not None
                    return gat_attention(adjacency, value, key, query, negative_slope=told.slope, **options)
                case "gatv2":
                    assert vector is not None
                    return gatv2_attention(adjacency, value, query, vector, negative_slope=told.slope, **options)
            assert key is not None
            return dot_attention(adjacency, value, key, query, scale=told.scale, **options)

        return run
