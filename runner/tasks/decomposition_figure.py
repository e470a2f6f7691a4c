"""A picture of a decomposition: the adjacency before and after renumbering, coloured by what computes it, and how dense communities are."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from torch import Tensor

from runner.kernels.density.portrait import Panel, Portrait
from runner.results import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FILE = "decomposition.png"
_MAX_PANELS = 3
_INK = (0.35, 0.35, 0.35)
# Okabe and Ito's colours, told apart with every kind of colour vision.
_COLOURS = ((0.0, 0.447, 0.698), (0.835, 0.369, 0.0), (0.0, 0.62, 0.451), (0.8, 0.475, 0.655))

Image = npt.NDArray[np.float64]
Colour = tuple[float, float, float]


def draw(portrait: Portrait, title: str, folder: Path) -> Path:
    """Write the picture into a folder and return its path."""
    from matplotlib.figure import Figure  # takes a second to import

    panels = portrait.panels[:_MAX_PANELS]
    figure = Figure(figsize=(4.2 * (len(panels) + 2), 4.6), layout="constrained")
    axes = figure.subplots(1, len(panels) + 2)
    figure.suptitle(title)
    _show(axes[0], _paint([(portrait.before, _INK)]), "adjacency as given", [])
    for axis, panel in zip(axes[1:], panels, strict=False):
        coloured = list(zip(panel.layers.values(), _COLOURS, strict=False))
        _show(axis, _paint(coloured), f"renumbered\n{panel.title}", _labels(panel))
    _histogram(axes[-1], portrait)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=110)
    write_atomically(folder / FILE, content.getvalue())
    return folder / FILE


def _labels(panel: Panel) -> list[tuple[str, Colour]]:
    total = max(sum(int(layer.sum()) for layer in panel.layers.values()), 1)
    return [
        (f"{label}: {int(layer.sum()) / total:.0%} of edges", colour)
        for (label, layer), colour in zip(panel.layers.items(), _COLOURS, strict=False)
    ]


def _paint(layers: list[tuple[Tensor, Colour]]) -> Image:
    """Mix the layers' colours by their share of a cell's edges, on white; darkness follows the logarithm of the count."""
    counts = [layer.double().numpy() for layer, _ in layers]
    total = np.sum(counts, axis=0)
    mixed = np.zeros((*total.shape, 3))
    for count, (_, colour) in zip(counts, layers, strict=True):
        mixed += (count / np.maximum(total, 1))[..., None] * np.array(colour)
    strength = np.log1p(total) / max(np.log1p(total.max()), 1e-9)
    strength = np.where(total > 0, 0.25 + 0.75 * strength, 0)[..., None]  # a single edge is still seen
    return 1 - strength * (1 - mixed)


def _show(axis: Axes, image: Image, title: str, labels: list[tuple[str, Colour]]) -> None:
    from matplotlib.patches import Patch

    axis.imshow(image, interpolation="nearest")
    axis.set_title(title, fontsize=9)
    axis.set_xticks([])
    axis.set_yticks([])
    axis.set_xlabel("source")
    axis.set_ylabel("destination")
    if labels:
        handles = [Patch(color=colour, label=label) for label, colour in labels]
        axis.legend(handles=handles, loc="upper right", fontsize=7, framealpha=0.9)


def _histogram(axis: Axes, portrait: Portrait) -> None:
    counts = portrait.densities.numpy()
    edges = np.linspace(0, 1, counts.size + 1)
    axis.bar(edges[:-1], counts, width=edges[1], align="edge", color=_COLOURS[0])
    axis.set_yscale("symlog", linthresh=1)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("density of a community")
    axis.set_ylabel("communities")
    axis.set_title(f"{int(counts.sum())} communities, {portrait.intra_fraction:.0%} of edges inside", fontsize=9)
