"""What each step of the strategy gives: the products of one training step, by variant.

Legend: N nodes, E edges, F features.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

from runner.kernels.adjacency import Adjacency
from runner.kernels.density.candidates import Candidates
from runner.kernels.density.plans import Matrix, Plans
from runner.kernels.density.select import formats_of, run_of
from runner.kernels.formats import Factory, Format, Kernel, Part, SpMM, csr_native, dense_blocks
from runner.kernels.opgraph import OpGraph

# Steps of the method, each with what the one before has.
STEPS = ("native", "reorder", "split", "fixed", "adaptive")
_NUM_PAIRS = 3  # of either part's kernels, of which every pair is an oracle's candidate


@dataclass(frozen=True)
class Use:
    """A product that a training step does ``count`` times.

    Attributes:
        matrix: which weighting of the graph.
        num_features: F.
        direction: forward, or backward for the transposed graph.
        count: times a step.
    """

    matrix: Matrix
    num_features: int
    direction: str
    count: int

    @property
    def candidates(self) -> Candidates:
        """What it may run on."""
        return self.matrix.forward if self.direction == "forward" else self.matrix.backward


def uses_of(plans: Plans, graph: OpGraph) -> list[Use]:
    """Return the products of one training step of an op graph."""
    counted: Counter[tuple[int, int, str]] = Counter()
    matrices: dict[int, Matrix] = {}
    for matrix, width, directions in plans.products(graph):
        matrices[matrix.number] = matrix
        for direction in directions:
            counted[matrix.number, width, direction] += 1
    return [Use(matrices[number], width, direction, count) for (number, width, direction), count in counted.items()]


def variants(plans: Plans, use: Use, own_order: Adjacency, framework: Factory) -> dict[str, SpMM]:
    """Return the runs of a use, by step of the method; one that can't be built here is left out.

    Args:
        plans: after the strategy has chosen.
        use: of these plans.
        own_order: the graph before it was renumbered.
        framework: the library whose product the whole is compared with: variant ``framework``.
    """
    adjacency = own_order if use.direction == "forward" else own_order.transposed
    before, candidates = Part(adjacency, adjacency.values(use.matrix.weight)), use.candidates
    found: dict[str, SpMM | None] = {
        "framework": _built(framework(before)),
        "native": _built(csr_native(before)),
        "reorder": _built(csr_native(candidates.whole)),
    }
    if candidates.intra is not None and candidates.inter is not None:
        inter = csr_native(candidates.inter)
        found["split"] = _pair(csr_native(candidates.intra), inter)
        found["fixed"] = _pair(dense_blocks(candidates.intra), inter)
    found["adaptive"] = plans.chosen(use.matrix, use.num_features, use.direction).run
    return {name: run for name, run in found.items() if run is not None}


def _built(entry: Format | None) -> SpMM | None:
    return None if entry is None else entry.build().run


def _pair(intra: Format | None, inter: Format | None) -> SpMM | None:
    return None if intra is None or inter is None else run_of((intra.build(), inter.build()))


def single_names(plans: Plans, use: Use) -> list[str]:
    """Return the names of the kernels for the whole renumbered matrix that don't know communities."""
    return [entry.name for entry in formats_of(use.candidates, use.num_features, plans.cost_model)["single"]]


def all_candidates(
    plans: Plans, use: Use, seconds_of: Callable[[dict[str, SpMM]], dict[str, float]]
) -> dict[str, SpMM]:
    """Return everything the oracle may take: every single and owned kernel, and pairs of the fastest for either part.

    Args:
        plans, use: as in :func:`variants`.
        seconds_of: times some runs; says which kernels for a part are fast.
    """
    candidates, found = use.candidates, dict[str, SpMM]()
    lists = formats_of(candidates, use.num_features, plans.cost_model)
    for kind in ("single", "owned"):
        found |= {entry.name: candidates.kernel(kind, entry).run for entry in lists.get(kind, [])}
    parts: dict[str, list[Kernel]] = {}
    for kind in ("intra", "inter"):
        kernels = {entry.name: candidates.kernel(kind, entry) for entry in lists.get(kind, [])}
        seconds = seconds_of({name: kernel.run for name, kernel in kernels.items()})
        parts[kind] = [kernels[name] for name in sorted(seconds, key=lambda name: seconds[name])[:_NUM_PAIRS]]
    for pair in product(parts["intra"], parts["inter"]):
        found[" + ".join(kernel.name for kernel in pair)] = run_of(pair)
    return found
