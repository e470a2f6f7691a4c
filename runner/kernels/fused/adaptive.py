"""Rewriting and density together: the rewritten program on renumbered nodes, its fixed products on kernels chosen by density.

Legend: N nodes, F features.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from runner.errors import UserError
from runner.kernels.adjacency import Adjacency
from runner.kernels.density.partition import Partition, partition
from runner.kernels.density.plans import Matrix, Plans
from runner.kernels.density.strategy import DensityAdaptive
from runner.kernels.fused.products import FixedMatrix
from runner.kernels.fused.strategy import Fused, PreparedFused
from runner.kernels.lower import Executable
from runner.kernels.opgraph import OpGraph
from runner.kernels.ops.registry import launcher
from runner.kernels.parameters import Epilogue
from runner.kernels.strategy import Prepared, Program, Stopwatch, step_of, undisturbed


@dataclass(frozen=True)
class AdaptiveSide:
    """A fixed matrix in one direction, each width on the kernel that measured fastest; see :class:`~.products.Side`."""

    plans: Plans
    matrix: Matrix
    direction: str

    def times(self, x: Tensor, epilogue: Epilogue = Epilogue(), values: Tensor | None = None) -> Tensor:  # noqa: B008
        """Return the epilogue of the product with x [N, F]."""
        assert values is None, "its values are fixed"
        y = self.plans.chosen(self.matrix, x.shape[1], self.direction).run(x.detach().contiguous())
        is_bare = epilogue.is_linear and epilogue.bias is None and epilogue.addend is None
        finished: Tensor = y if is_bare else launcher(y).finish(y, epilogue)
        return finished

    @property
    def num_bytes(self) -> int:
        """Counted with the plans."""
        return 0


def adaptive_layout(plans: Plans, adjacency: Adjacency, *factors: Any) -> FixedMatrix:
    """Lay out a propagation by density; arguments as :meth:`~.products.FixedMatrix.of` has them."""
    weight, row_scale, col_scale, dtype = factors
    if dtype != torch.float32 or adjacency is not plans.adjacency:
        return FixedMatrix.of(adjacency, *factors)
    src, dst = adjacency.src_dst
    values = torch.ones(adjacency.num_edges, dtype=torch.float64)
    for factor, at in ((weight, None), (row_scale, dst), (col_scale, src)):
        if factor is not None:
            values *= factor.double() if at is None else factor.double()[at]
    has_weight = any(factor is not None for factor in factors[:3])
    matrix = plans.matrix(values.float() if has_weight else None)
    return FixedMatrix(AdaptiveSide(plans, matrix, "forward"), AdaptiveSide(plans, matrix, "backward"))


@dataclass(frozen=True, kw_only=True)
class FusedAdaptive:
    """The two strategies that are put together."""

    fused: Fused
    density: DensityAdaptive
    name: str = "fused + density_adaptive"

    def prepare(self, program: Program) -> Prepared:
        """Partition, renumber, then as :meth:`Fused.prepare`.

        Raises:
            UserError: where the model can't be captured, or nothing of it is a product that density could choose for.
        """
        watch = Stopwatch()
        adjacency: Adjacency = watch.measure("build", program.adjacency)
        if adjacency.device.type != "cpu":
            raise UserError("renumbered programs are for the CPU")
        if adjacency.num_edges == adjacency.num_dst:
            raise UserError("with as many edges as nodes a dropout of edges can't be told from one of nodes")
        density = self.density
        parts: Partition = watch.measure(
            "partition", lambda: partition(adjacency, density.partition, density.block_size, density.on_progress)
        )
        plans = Plans(density, program.library_kernels, adjacency, parts, watch)
        features: Tensor = watch.measure("build", lambda: program.features()[plans.order])
        renumbered = dataclasses.replace(
            program,
            forward=lambda rows: program.forward(rows[plans.rank])[plans.order],
            capture=lambda training: program.capture(training).renumbered(plans.adjacency, plans.order),
            adjacency=lambda: plans.adjacency,
            features=lambda: features,
        )
        inner = self.fused.prepare(renumbered, lambda *given: adaptive_layout(plans, *given))
        for training in (True, False):  # each product's kernels are chosen when it is first computed
            with undisturbed(program.module, training):
                watch.measure("select", step_of(renumbered, partial(inner, training=training), training=training))
        if not plans.report()["choices"]:
            raise UserError("no product of the model has fixed factors, so that density has nothing to choose")
        return PreparedFusedAdaptive(self.name, inner, plans, watch.seconds)


class PreparedFusedAdaptive:
    """A rewritten program on renumbered nodes; see :class:`runner.kernels.strategy.Prepared`."""

    rounding = 0.0

    def __init__(self, name: str, inner: PreparedFused, plans: Plans, preprocess_s: dict[str, float]) -> None:
        self.name, self._inner, self._plans = name, inner, plans
        plans.forget_unchosen()
        self.preprocess_s = preprocess_s | {f"fused: {phase}": took for phase, took in inner.preprocess_s.items()}
        self.draws_by_seed = inner.draws_by_seed
        found = plans.report()
        choices = [*inner.report["choices"], *found["choices"]]
        self.report: dict[str, Any] = {**inner.report, **found, "choices": choices}

    @property
    def resident_bytes(self) -> int:
        """What is kept of the graph and the features, in bytes."""
        return self._inner.resident_bytes + self._plans.resident_bytes()

    def __call__(self, features: Tensor, training: bool) -> Tensor:
        return self._inner(features, training)

    def place(self, rows: Tensor) -> Tensor:
        return rows[self._plans.order]

    def restore(self, rows: Tensor) -> Tensor:
        return rows[self._plans.rank]

    def locate(self, nodes: Tensor) -> Tensor:
        return self._plans.rank[nodes]

    def mask_rows(self, num_rows: int) -> Tensor | None:
        return self._plans.rank if num_rows == self._plans.rank.numel() else None

    def lowered(self) -> tuple[OpGraph, Executable] | None:
        return None

    def explain(self) -> str:
        choices = self._plans.report()["choices"]
        lines = [f"width {choice['num_features']}, {choice['direction']}: {choice['reason']}" for choice in choices]
        return "\n".join([self._inner.explain(), "", "products, by density:", *lines])
