"""What may compute a product: the matrix whole and cut into parts, and for each every format that is possible.

There are three kinds: one kernel for the whole matrix (single); one whose communities own their rows, with a format of its own for edges
inside (owned); one for the edges inside communities (intra) and one for the rest (inter), added up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from runner.errors import VerificationError
from runner.kernels.adjacency import Adjacency
from runner.kernels.density.owned import Owned
from runner.kernels.formats import (
    Factory,
    Format,
    Kernel,
    Part,
    coo_atomic,
    coo_torch,
    csr_binned,
    csr_native,
    csr_torch,
    dense_blocks,
)

CPU = torch.device("cpu")
_LEAST_EDGES_A_ROW = 0.5  # inside a community, on average
KINDS = ("single", "owned", "intra", "inter")
_FACTORIES: dict[str, tuple[Factory, ...]] = {
    "single": (csr_native, csr_binned, csr_torch),
    "intra": (csr_native, dense_blocks, csr_torch),
    "inter": (csr_native, csr_binned, coo_torch, csr_torch),
}


@dataclass(frozen=True)
class Allowed:
    """What changes results beyond the order of sums, on a GPU.

    Attributes:
        unit: ``fp32``; ``tf32`` or ``bf16`` let matrix units round factors inside communities.
        atomics: sums in an order that changes from run to run.
    """

    unit: str = "fp32"
    atomics: bool = False


NOTHING = Allowed()


@dataclass(frozen=True, eq=False)
class Candidates:
    """One direction of one matrix. Without intra and inter nothing is split.

    Attributes:
        whole: the matrix.
        intra, inter: its entries inside communities and the others; together the whole.
        extra: further kernels for every part, such as the framework's own.
        allowed: what a user has to allow.
    """

    whole: Part
    intra: Part | None
    inter: Part | None
    extra: Sequence[Factory] = ()
    allowed: Allowed = NOTHING
    _built: dict[tuple[str, str], Kernel] = field(default_factory=dict)

    def part(self, kind: str) -> Part:
        """Return what the kernels of a kind multiply."""
        found = {"intra": self.intra, "inter": self.inter}.get(kind, self.whole)
        assert found is not None
        return found

    def formats(self, kind: str, tile_densities: Sequence[float]) -> list[Format]:
        """Return what is possible; none for a kind that the matrix isn't cut for.

        Args:
            kind: single, owned, intra or inter.
            tile_densities: of communities, from which their edges may be dense tiles.
        """
        if kind == "owned":
            return [] if self._owned is None else self._owned.formats(tile_densities, self.allowed.unit)
        if kind != "single" and self.intra is None:
            return []
        factories = [*_FACTORIES[kind], *self.extra]
        if kind == "inter" and self.whole.device.type == "cuda":
            factories.append(coo_atomic)
            if not self.allowed.atomics:  # torch's sum by index adds atomically there too
                factories = [factory for factory in factories if factory not in (coo_torch, coo_atomic)]
        found = (factory(self.part(kind)) for factory in factories)
        return [entry for entry in found if entry is not None]

    def kernel(self, kind: str, entry: Format) -> Kernel:
        """Return a format's kernel, built at the first call and kept."""
        key = (kind, entry.name)
        if key not in self._built:
            self._built[key] = entry.build()
        return self._built[key]

    def forget_all_but(self, kernels: Sequence[Kernel]) -> None:
        """Free what was built and isn't among these."""
        kept = {id(kernel) for kernel in kernels}
        for key in [key for key, kernel in self._built.items() if id(kernel) not in kept]:
            del self._built[key]

    @cached_property
    def _owned(self) -> Owned | None:
        return Owned(self.whole) if self.whole.part_ptr is not None and self.whole.adjacency.num_edges else None


def cut(
    graph: Adjacency,
    values: Tensor,
    part_ptr: Tensor,
    extra: Sequence[Factory] = (),
    allowed: Allowed = NOTHING,
    device: torch.device = CPU,
) -> Candidates:
    """Cut a matrix at the boundaries of communities. Edges of a community that has hardly any stay with those between communities.

    Args:
        graph: renumbered.
        values: float32 [E], in the order of the entries.
        part_ptr: int64 [P + 1].
        extra: further kernels.
        allowed: what a user has to allow.
        device: where products run.

    Raises:
        VerificationError: where the two parts don't have the graph's edges.
    """
    whole = Part(graph, values, part_ptr, device)
    inside = whole.inside & _is_worthy(whole)[whole.community[graph.rows]]
    intra, inter = graph.select(inside), graph.select(~inside)
    if not torch.equal(intra.in_degrees + inter.in_degrees, graph.in_degrees):
        raise VerificationError("the edges inside communities and those between them are not the graph's edges")
    return Candidates(
        whole,
        Part(intra, values[inside], part_ptr, device),
        Part(inter, values[~inside], device=device),
        extra,
        allowed,
    )


def _is_worthy(whole: Part) -> Tensor:
    """bool [P]: whether a community has edges enough inside for a pass of its own over its rows."""
    assert whole.part_ptr is not None
    sizes = whole.part_ptr.diff()
    edges = torch.bincount(whole.community[whole.adjacency.rows][whole.inside], minlength=sizes.numel())
    return edges >= _LEAST_EDGES_A_ROW * sizes
