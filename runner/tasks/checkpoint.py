"""Checkpoints of a training task: what is done, and the state of the run in progress.

A checkpoint is plain tensors and containers, written atomically, and loaded with ``weights_only=True``: no code in it can run.
"""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from runner.errors import ConfigError
from runner.gnn.train import Trainer
from runner.results import flat_config, plain, write_atomically
from runner.schema import Config

FILE = "checkpoint.pt"
_FORMAT = 1
# May differ between the run that was killed and the one that goes on. None changes what is computed; another strategy, device or
# number of threads rounds differently.
_FREE = (
    "name",
    "logger.",
    "cluster.",
    "task.",
    "train.resume",
    "train.checkpoint_every",
    "train.repeats",
    "kernel.",
    "dataset.root",
    "dataset.path",
    "dataset.download",
    "device",
)


@dataclass
class Checkpoint:
    """Progress of a task of several runs (repeats × folds).

    Attributes:
        done: result and history of each finished run, in order.
        trainer: state of the run in progress; empty between runs.
        weights: of the best finished run by validation metric.
        choices: the strategy's, from its report: which kernel won is measured, and a resumed run must round as the first did.
        data_hash: of the graph.
    """

    data_hash: str
    done: list[dict[str, Any]] = field(default_factory=list)
    trainer: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    choices: list[dict[str, Any]] = field(default_factory=list)


def save(path: Path, config: Config, checkpoint: Checkpoint) -> None:
    """Write ``path/checkpoint.pt``; a kill in the middle leaves the one before."""
    content = io.BytesIO()
    torch.save(
        {
            "format": _FORMAT,
            "options": _options(config),
            "data_hash": checkpoint.data_hash,
            "done": checkpoint.done,
            "trainer": checkpoint.trainer,
            "weights": checkpoint.weights,
            "choices": plain(checkpoint.choices),
        },
        content,
    )
    write_atomically(path / FILE, content.getvalue())


def load(path: Path, config: Config, data_hash: str) -> Checkpoint:
    """Read a run folder's checkpoint.

    Raises:
        ConfigError: where there is none, it can't be read, or it is of another experiment; the line names the first difference.
    """
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"train.resume={path}: no {FILE} there")
    try:
        stored = torch.load(file, weights_only=True, map_location="cpu")  # wherever it was trained
        fmt, options, stored_hash = stored["format"], dict(stored["options"]), str(stored["data_hash"])
        done, trainer, weights = list(stored["done"]), dict(stored["trainer"]), dict(stored["weights"])
        choices = list(stored["choices"])
    except Exception as error:  # torch raises a dozen kinds for a bad file
        raise ConfigError(
            f"train.resume={path}: not a checkpoint ({type(error).__name__}: {' '.join(str(error).split())[:120]})"
        ) from error
    if fmt != _FORMAT:
        raise ConfigError(f"train.resume={path}: checkpoint format {fmt}, this version reads {_FORMAT}")
    for name, value in _options(config).items():
        if options.get(name) != value:
            raise ConfigError(
                f"train.resume={path}: made with {name}={options.get(name)}, now it is {value}; resume with the same options"
            )
    if stored_hash != data_hash:
        raise ConfigError(f"train.resume={path}: made on another graph (content {stored_hash}, now {data_hash})")
    return Checkpoint(data_hash, done, trainer, weights, choices)


def restore(trainer: Trainer, checkpoint: Checkpoint, path: str | None) -> None:
    """Give a trainer the state of the run in progress.

    Raises:
        ConfigError: where it is not of this model.
    """
    try:
        trainer.restore(checkpoint.trainer)
    except Exception as error:  # a damaged or foreign state fails in torch in many ways
        reason = " ".join(str(error).split())[:160]
        raise ConfigError(
            f"train.resume={path}: the checkpoint is not of this model ({type(error).__name__}: {reason})"
        ) from error


def _options(config: Config) -> dict[str, Any]:
    return {name: plain(value) for name, value in flat_config(config).items() if not name.startswith(_FREE)}
