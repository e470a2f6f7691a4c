"""How long a product takes, predicted from what it has to do.

Time is a sum of non-negative rates times counts (calls, rows, entries, cells of tiles), a set of rates for each kernel and width. They are
fitted to measurements on this machine (:mod:`runner.kernels.density.calibration`). The model ranks; what is close is measured.

Legend: N rows, F features.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from runner.kernels.formats import Work

Floats = npt.NDArray[np.float64]
WIDTHS = (8, 16, 32, 64, 128)  # that are calibrated; another takes the rates of the nearest


@dataclass(frozen=True)
class CostModel:
    """Seconds of each kernel.

    Attributes:
        rates: by :func:`key_of`, in the order of :func:`counts_of`.
        cache_bytes: of the cache that X may stay in.
    """

    rates: dict[str, list[float]]
    cache_bytes: int

    def seconds(self, name: str, work: Work, num_features: int) -> float | None:
        """Return the prediction; None for a kernel that wasn't calibrated."""
        rates = self.rates.get(key_of(name, work.is_weighted, num_features))
        return None if rates is None else float(counts_of(work, num_features, self.cache_bytes) @ np.array(rates))

    def adding(self, num_rows: int, num_features: int) -> float:
        """Return the seconds of adding one result [N, F] to another."""
        return self.seconds("add", Work(rows=num_rows), num_features) or 0.0

    def least_tile_density(self, num_features: int, is_weighted: bool) -> float | None:
        """Return the density from which a community's edges are faster as a dense tile than one by one; None where they never are."""
        cell = self._rate("owned_tiles", Work(cells=1, is_weighted=is_weighted), num_features)
        entry = self._rate("owned_csr", Work(entries=1, near=1, is_weighted=is_weighted), num_features)
        if cell is None or entry is None or cell >= entry:
            return None
        return max(0.05, round(cell / entry, 2))

    def _rate(self, name: str, work: Work, num_features: int) -> float | None:
        """Seconds of one more of what is counted."""
        with_it, without = (
            self.seconds(name, given, num_features) for given in (work, Work(is_weighted=work.is_weighted))
        )
        return None if with_it is None or without is None else with_it - without


def counts_of(work: Work, num_features: int, cache_bytes: int) -> Floats:
    """Return what time is proportional to: a call, rows, near entries, far ones where X fits in the cache and where not, cells.

    All but the call grow with the width from the calibrated one on.
    """
    is_beyond = 4 * work.rows * num_features > cache_bytes
    far, scale = work.entries - work.near, num_features / nearest_width(num_features)
    counts = [work.rows, work.near, 0 if is_beyond else far, far if is_beyond else 0, work.cells]
    return np.array([1.0, *(count * scale for count in counts)])


def nearest_width(num_features: int) -> int:
    """Return the calibrated width whose rates serve this one."""
    return min(WIDTHS, key=lambda width: abs(np.log(width / num_features)))


def key_of(name: str, is_weighted: bool, num_features: int) -> str:
    """Name a set of rates; tiles from any density on have the same."""
    family = re.sub(r"(owned_tiles)_[\d.]+", r"\1", name)
    return f"{family}/{'weighted' if is_weighted else 'plain'}/{nearest_width(num_features)}"
