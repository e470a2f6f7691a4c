"""What was chosen, kept on disk: the same matrix, width, machine and libraries get the same kernels again, unmeasured.

Legend: F features.
"""

from __future__ import annotations

import hashlib
import json

import torch

from runner.kernels.cache import keep, kept
from runner.kernels.cpu.build import processor
from runner.kernels.density.calibration import device_name, is_crowded
from runner.kernels.density.candidates import Candidates
from runner.kernels.density.select import Choice, Rule, assemble
from runner.kernels.ops.backend import has_kernels

_FORMAT = 4  # of what is kept, and of the kernels that names stand for


def key_of(candidates: Candidates, num_features: int, rule: Rule) -> str:
    """Name everything that a choice depends on.

    Args:
        candidates: the matrix, its communities and the kernels that compete; the transposed one is another matrix.
        num_features: F.
        rule: how it is chosen.
    """
    whole, digest = candidates.whole, hashlib.sha256()
    digest.update(whole.adjacency.digest.encode())
    digest.update(whole.values.numpy().data)
    digest.update(b"" if whole.part_ptr is None else whole.part_ptr.numpy().data)
    names = [getattr(factory, "__name__", repr(factory)) for factory in candidates.extra]
    told = (
        _FORMAT, num_features, candidates.intra is None, rule, names, torch.__version__, torch.get_num_threads(), processor(),
        device_name(whole.device), has_kernels(whole.device), candidates.allowed,
    )  # fmt: skip
    digest.update(repr(told).encode())
    return digest.hexdigest()[:32]


def recall(key: str, candidates: Candidates) -> Choice | None:
    """Return the choice of an earlier run; None where there is none, or it can't be had here."""
    path = kept(_file(key))
    if path is None:
        return None
    try:
        stored = json.loads(path.read_text())
        names, reason = list(stored["kernels"]), str(stored["reason"])
        tried, predicted = dict(stored["tried_s"]), dict(stored["predicted_s"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    found = assemble(candidates, names) if len(names) in (1, 2) else None
    if found is None:
        return None
    return Choice(found.run, found.kernels, tried, f"{reason} (decided in an earlier run)", predicted)


def remember(key: str, choice: Choice) -> None:
    """Keep a choice that was measured, unless other work had its share of the processors: then all threads wait for the slowest, every
    kernel takes about as long, and what won by chance would be kept for good.
    """
    if is_crowded():
        return
    stored = {
        "kernels": choice.names, "tried_s": choice.tried, "predicted_s": choice.predicted, "reason": choice.reason
    }  # fmt: skip
    keep(_file(key), lambda file: file.write(json.dumps(stored).encode()))


def _file(key: str) -> str:
    return f"choices/{key}.json"
