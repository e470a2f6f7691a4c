"""The matrix as a picture shows it: how many edges fall into each cell of a coarse grid, before and after renumbering, by kernel.

Legend: N nodes, E edges, P communities, G cells a side.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runner.kernels.adjacency import Adjacency
from runner.kernels.density.owned import tile_density
from runner.kernels.formats import Part

_CELLS = 240  # a side, at most
_BINS = 40


@dataclass(frozen=True)
class Panel:
    """The renumbered matrix under one choice of kernels.

    Attributes:
        title: width and direction.
        layers: int64 [G, G], edges a cell, by what computes them.
    """

    title: str
    layers: dict[str, Tensor]


@dataclass(frozen=True)
class Portrait:
    """What a picture of a decomposition shows.

    Attributes:
        before: int64 [G, G], edges a cell in the graph's own order of nodes.
        panels: one for each set of kernels that was chosen.
        densities: int64 [40], communities by density from 0 to 1.
        intra_fraction: share of the edges inside communities.
    """

    before: Tensor
    panels: tuple[Panel, ...]
    densities: Tensor
    intra_fraction: float


def portray(
    own_order: Adjacency, whole: Part, densities: Tensor, chosen: Iterable[tuple[str, Sequence[str]]]
) -> Portrait:
    """Count edges a cell.

    Args:
        own_order: the graph before it was renumbered.
        whole: after it, with communities.
        densities: float64 [P].
        chosen: a title and the kernels' names of each product.
    """
    panels: dict[tuple[str, ...], Panel] = {}
    for title, names in chosen:
        known = panels.get(tuple(names))
        if known is None:
            layers = {label: _count(whole.adjacency, mask) for label, mask in _layers(whole, densities, names).items()}
            panels[tuple(names)] = Panel(title, layers)
        else:
            panels[tuple(names)] = Panel(f"{known.title}, {title}", known.layers)
    return Portrait(
        _count(own_order, None),
        tuple(panels.values()),
        torch.histc(densities.clamp(max=1), bins=_BINS, min=0, max=1).long(),
        float(whole.inside.double().mean()) if whole.inside.numel() else 0.0,
    )


def _layers(whole: Part, densities: Tensor, names: Sequence[str]) -> dict[str, Tensor | None]:
    """Which entries each kernel, or each format of one, computes."""
    inside = whole.inside
    if len(names) == 2:
        return {f"{names[0]} (inside)": inside, f"{names[1]} (between)": ~inside}
    (name,) = names
    if not name.startswith("owned"):
        return {name: None}
    density = tile_density(name)
    if density is not None:
        tiled = inside & (densities >= density)[whole.community[whole.adjacency.rows]]
        return {"dense tiles": tiled, "CSR (inside)": inside & ~tiled, "CSR (between)": ~inside}
    kind = {"owned_csr": "CSR", "owned_local": "short ids", "owned_bits": "bits"}[name]
    return {f"{kind} (inside)": inside, "CSR (between)": ~inside}


def _count(adjacency: Adjacency, mask: Tensor | None) -> Tensor:
    """int64 [G, G]: edges a cell."""
    num_nodes = max(adjacency.num_dst, 1)
    side = min(_CELLS, num_nodes)
    rows, columns = adjacency.rows.long(), adjacency.indices.long()
    if mask is not None:
        rows, columns = rows[mask], columns[mask]
    cell = rows * side // num_nodes * side + columns * side // num_nodes
    return torch.bincount(cell, minlength=side * side).view(side, side)
