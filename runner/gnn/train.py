"""The training loop: one seed, from given weights to the weights of the selected epoch.

Every epoch draws from its own seed, a function of (seed, epoch) alone. So two strategies see the same dropout masks and the
same batches, and a run that was killed goes on with the same curve without stored generator states.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runner.errors import ConfigError, UserError
from runner.gnn.batches import BatchSource
from runner.gnn.metrics import evaluate
from runner.schema import TrainConfig


@dataclasses.dataclass
class Progress:
    """All that a run needs to go on after an epoch; a checkpoint is this plus the weights and the optimizer.

    Attributes:
        epoch: epochs done.
        history: one record an epoch: epoch, loss, seconds, lr, and where evaluated val_loss, val_metric.
        best_epoch: the selected epoch so far, -1 for none.
        best_state: its weights.
        best_metric, best_loss: the best validation values seen, for early stopping.
        best_seen_at: last epoch in which either got better.
    """

    epoch: int = 0
    history: list[dict[str, float]] = dataclasses.field(default_factory=list)
    best_epoch: int = -1
    best_state: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    best_metric: float = -1.0
    best_loss: float = float("inf")
    best_seen_at: int = 0


@dataclasses.dataclass(frozen=True)
class FitResult:
    """One seed's outcome: the history, the selected epoch, its test metric and loss, seconds of training."""

    history: list[dict[str, float]]
    best_epoch: int
    val_metric: float
    test_metric: float
    test_loss: float
    train_s: float


def seed_epoch(seed: int, epoch: int) -> int:
    """Return the seed of an epoch and give it to torch: distinct for all pairs below 2^31 × 10^6."""
    mixed = (seed * 1_000_003 + epoch + 1) % (2**63)
    torch.manual_seed(mixed)
    return mixed % (2**31)  # DGL's generators take 32 bits


def make_optimizer(module: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """Build the optimizer that ``config`` names over all parameters of a module."""
    parameters = list(module.parameters())
    if not parameters:
        raise ConfigError("the model has no parameters to train")
    # fused: one kernel a parameter, not a dozen ops
    match config.optimizer:
        case "adam":
            return torch.optim.Adam(parameters, lr=config.lr, weight_decay=config.weight_decay, fused=True)
        case "adamw":
            return torch.optim.AdamW(parameters, lr=config.lr, weight_decay=config.weight_decay, fused=True)
    return torch.optim.SGD(
        parameters, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay, fused=True
    )


def make_schedule(optimizer: torch.optim.Optimizer, config: TrainConfig) -> torch.optim.lr_scheduler.LRScheduler:
    """Build the learning-rate schedule; it steps once an epoch."""
    match config.schedule:
        case "step":
            return torch.optim.lr_scheduler.StepLR(optimizer, config.schedule_every, config.schedule_factor)
        case "cosine":
            return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, config.epochs)
    return torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)


def train_step(batch: tuple[Tensor, Tensor], optimizer: torch.optim.Optimizer) -> Tensor:
    """Do one update on a batch (logits float [n, K], labels int64 [n]); returns the mean cross entropy, detached, a scalar."""
    logits, labels = batch
    loss = F.cross_entropy(logits, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


class Trainer:
    """Trains one module with one seed; :meth:`state` and :meth:`restore` make it resumable at any epoch."""

    def __init__(self, module: nn.Module, source: BatchSource, config: TrainConfig, seed: int) -> None:
        self.module, self.source, self.config, self.seed = module, source, config, seed
        self.optimizer = make_optimizer(module, config)
        self.schedule = make_schedule(self.optimizer, config)
        self.progress = Progress()

    def fit(
        self, on_epoch: Callable[[dict[str, float]], None] = lambda _: None, most_epochs: int | None = None
    ) -> FitResult:
        """Train to the end or until patience runs out, then test the selected weights.

        Args:
            on_epoch: called with each epoch's record.
            most_epochs: stop after so many, whatever the config says.
        """
        progress = self.progress
        last = self.config.epochs if most_epochs is None else min(most_epochs, self.config.epochs)
        while progress.epoch < last and not self._out_of_patience():
            record = self._epoch(progress.epoch)
            progress.history.append(record)
            progress.epoch += 1
            on_epoch(record)
        return self._finish()

    def state(self) -> dict[str, Any]:
        """Everything as plain containers and tensors, so that ``torch.load(weights_only=True)`` takes it."""
        return {
            "model": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "progress": dataclasses.asdict(self.progress),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`state` returned."""
        self.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.progress = Progress(**state["progress"])

    def _out_of_patience(self) -> bool:
        return bool(self.config.patience) and self.progress.epoch - self.progress.best_seen_at >= self.config.patience

    def _epoch(self, epoch: int) -> dict[str, float]:
        lr = float(self.optimizer.param_groups[0]["lr"])
        start = time.perf_counter()
        self.module.train()
        draw = seed_epoch(self.seed, epoch)
        total, count = torch.zeros((), dtype=torch.float64), 0
        for batch in self.source.train_batches(draw):
            size = batch[1].numel()
            total += train_step(batch, self.optimizer).cpu().double() * size
            count += size
        self.schedule.step()
        if not math.isfinite(float(total)):
            raise UserError(
                f"training diverged: the loss is {float(total)} in epoch {epoch} with seed {self.seed}; lower train.lr={self.config.lr}, "
                "or normalise the features (dataset.normalize)"
            )
        record = {
            "epoch": epoch,
            "loss": float(total / max(count, 1)),
            "lr": lr,
            "seconds": time.perf_counter() - start,
        }
        if epoch % self.config.eval_every == 0 or epoch == self.config.epochs - 1:
            record |= self._validate(epoch)
        elif self.config.select == "last":
            self._select(epoch)
        return record

    def _validate(self, epoch: int) -> dict[str, float]:
        scores = self._score("val")
        progress, select = self.progress, self.config.select
        if not scores:
            self._select(epoch)
            return {}
        metric, loss = scores["metric"], scores["loss"]
        better_metric, better_loss = metric > progress.best_metric, loss < progress.best_loss
        if better_metric or better_loss:
            progress.best_seen_at = epoch + 1
        if select == "last" or (better_metric if select == "metric" else better_loss):
            self._select(epoch)
        progress.best_metric, progress.best_loss = max(metric, progress.best_metric), min(loss, progress.best_loss)
        return {"val_loss": loss, "val_metric": metric}

    def _select(self, epoch: int) -> None:
        self.progress.best_epoch = epoch
        if self.config.select != "last":  # the last weights are in the module anyway
            self.progress.best_state = copy.deepcopy(self.module.state_dict())

    @torch.no_grad()
    def _score(self, part: str) -> dict[str, float]:
        self.module.eval()
        found = self.source.evaluate((part,)).get(part)
        if found is None or not found[1].numel():
            return {}
        logits, labels = found
        return {"loss": float(F.cross_entropy(logits, labels)), "metric": evaluate(self.config.metric, logits, labels)}

    def _finish(self) -> FitResult:
        progress = self.progress
        if progress.best_state:
            self.module.load_state_dict(progress.best_state)
        test, val = self._score("test"), self._score("val")
        nan = float("nan")
        return FitResult(
            history=progress.history,
            best_epoch=progress.best_epoch,
            val_metric=val.get("metric", nan),
            test_metric=test.get("metric", nan),
            test_loss=test.get("loss", nan),
            train_s=sum(record["seconds"] for record in progress.history),
        )
