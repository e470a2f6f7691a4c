"""Task ``train``: train a model, several seeds or folds, and test the selected weights."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from sklearn.model_selection import StratifiedKFold

from runner.errors import ConfigError
from runner.gnn.batches import BatchSource, GraphBatches, SampledNodes
from runner.gnn.data.graph_data import GraphData, Split
from runner.gnn.train import FitResult, Trainer
from runner.progress import Bar
from runner.results import mean_std, spread, write_atomically
from runner.tasks import checkpoint as checkpoints
from runner.tasks.checkpoint import Checkpoint
from runner.tasks.context import Context, begin, fresh_module
from runner.tasks.full_graph import FullGraphExperiment, prepare_strategy


@dataclass(frozen=True)
class Run:
    """One training: a repeat, and in cross-validation a fold of it."""

    repeat: int
    fold: int
    seed: int

    @property
    def title(self) -> str:
        """For the progress bar."""
        return f"seed {self.seed}" + (f" fold {self.fold}" if self.fold >= 0 else "")


MakeTrainer = Callable[[Run], Trainer]
_BLOCKS_DO_NOT_PAY = "each batch draws others, and preparing for one takes longer than the step that it is for"
_BATCHES_DO_NOT_PAY = "each batch is another graph, and preparing for one takes longer than the step that it is for"


def run(context: Context) -> dict[str, Any]:
    """Run the task; returns its part of the result record."""
    config = context.config
    data, device = begin(context)
    runs = [
        Run(repeat, fold, config.train.seed + repeat)
        for repeat in range(config.train.repeats)
        for fold in (range(config.train.folds) if config.train.folds else (-1,))
    ]
    checkpoint = Checkpoint(data.content_hash)
    if config.train.resume:
        checkpoint = checkpoints.load(Path(config.train.resume), config, data.content_hash)
    make_trainer, prepared = _trainers(context, data, device, checkpoint)
    if config.train.resume:
        _replay(context, checkpoint, runs)
    _train_all(context, runs, make_trainer, checkpoint)
    result = prepared | _summary(config.train.metric, config.train.folds, checkpoint.done[: len(runs)])
    _report(context, result)
    return result


def _trainers(
    context: Context, data: GraphData, device: torch.device, checkpoint: Checkpoint
) -> tuple[MakeTrainer, dict[str, Any]]:
    """Return what makes each run's trainer, and what the strategy's preparation has to report."""
    config = context.config
    if config.dataset.task == "node" and config.train.sampling == "full":
        return _full_graph_trainers(context, data, device, checkpoint)
    if config.dataset.task == "node":
        return _sampled_trainers(context, data, device, checkpoint)
    return _graph_trainers(context, data, device)


def _graph_trainers(context: Context, data: GraphData, device: torch.device) -> tuple[MakeTrainer, dict[str, Any]]:
    """Train on batches of whole graphs. Each batch is another graph, and small: no strategy earns back its preparation."""
    config = context.config
    if config.kernel.name != "baseline":
        context.say(f"kernel={config.kernel.name} is skipped, baseline runs in its place: {_BATCHES_DO_NOT_PAY}")
    if config.kernel.explain:
        context.say(
            "baseline runs the DGL module as it is; each batch has a graph of its own, so there is no one op graph to show"
        )
    splits = _folds(data, config.train.folds, config.dataset.split_seed) if config.train.folds else []
    if config.train.metric == "roc_auc" and any(data.labels[fold.test].unique().numel() < 2 for fold in splits):
        raise ConfigError("train.metric=roc_auc: a fold has graphs of one class only; use accuracy, or fewer folds")

    def make(run: Run) -> Trainer:
        module = fresh_module(config, data, device, run.seed)
        split = splits[run.fold] if splits else data.split
        source = GraphBatches(module, data, split, config.train.batch_size, device)
        return Trainer(module, source, config.train, run.seed)

    return make, {"strategy": "baseline", "skipped": _BATCHES_DO_NOT_PAY if config.kernel.name != "baseline" else None}


def _sampled_trainers(
    context: Context, data: GraphData, device: torch.device, checkpoint: Checkpoint
) -> tuple[MakeTrainer, dict[str, Any]]:
    """Train on sampled blocks, which DGL computes; evaluation is on the full graph, and the strategy's."""
    config = context.config
    experiment = FullGraphExperiment(config, data, device)
    prepared = prepare_strategy(context, experiment, config.kernel.name, checkpoint.choices)
    if config.kernel.name != "baseline":
        context.say(f"{prepared.name} evaluates on the full graph; it skips the sampled blocks: {_BLOCKS_DO_NOT_PAY}")
        experiment.verify(prepared)
    checkpoint.choices = prepared.report.get("choices", [])
    full = experiment.source_for(prepared)

    def make(run: Run) -> Trainer:
        experiment.reset(run.seed)
        source = SampledNodes(
            experiment.module, experiment.graph, data, list(config.train.fanouts), config.train.batch_size, full
        )
        return Trainer(experiment.module, source, config.train, run.seed)

    return make, {
        "strategy": "baseline",
        "evaluation_strategy": prepared.name,
        "preprocess_s": prepared.preprocess_s,
        "strategy_report": prepared.report,
    }


def _full_graph_trainers(
    context: Context, data: GraphData, device: torch.device, checkpoint: Checkpoint
) -> tuple[MakeTrainer, dict[str, Any]]:
    experiment = FullGraphExperiment(context.config, data, device)
    prepared = prepare_strategy(context, experiment, context.config.kernel.name, checkpoint.choices)
    checkpoint.choices = prepared.report.get("choices", [])
    agreement = experiment.verify(prepared) if prepared.name != "baseline" else None
    source: BatchSource = experiment.source_for(prepared)

    def make(run: Run) -> Trainer:
        experiment.reset(run.seed)
        return Trainer(experiment.module, source, context.config.train, run.seed)

    return make, {
        "strategy": prepared.name,
        "preprocess_s": prepared.preprocess_s,
        "strategy_report": prepared.report,
        "agreement": agreement,
    }


def _folds(data: GraphData, num_folds: int, seed: int) -> list[Split]:
    """The file's own folds where it has as many, else stratified ones, of the labelled graphs.

    As in GIN's protocol a fold validates and tests on the same part.
    """
    if len(data.folds) == num_folds:
        return [Split(train=fold.train, val=fold.test, test=fold.test) for fold in data.folds]
    labelled = (data.labels >= 0).nonzero().flatten()
    labels = data.labels[labelled].numpy()
    smallest = int(torch.bincount(data.labels[labelled]).min())
    if smallest < num_folds:
        raise ConfigError(
            f"train.folds={num_folds}: the smallest class has {smallest} graphs, a fold needs one of each class"
        )
    splits = []
    for train, test in StratifiedKFold(num_folds, shuffle=True, random_state=seed).split(labels, labels):
        held_out = labelled[torch.from_numpy(test)]
        splits.append(Split(train=labelled[torch.from_numpy(train)], val=held_out, test=held_out))
    return splits


def _replay(context: Context, checkpoint: Checkpoint, runs: list[Run]) -> None:
    """Write the curves up to the checkpoint into this run's own metrics, so that they are whole."""
    current = len(checkpoint.done)
    for record in checkpoint.done[: len(runs)]:
        for entry in record["history"]:
            context.sinks.metrics(entry)
    history = checkpoint.trainer.get("progress", {}).get("history", [])
    for entry in history if current < len(runs) else []:
        context.sinks.metrics(_entry(runs[current], entry))
    context.say(
        f"resumed: {current} of {len(runs)} runs done" + (f", the next one at epoch {len(history)}" if history else "")
    )


def _entry(run: Run, record: dict[str, float]) -> dict[str, float]:
    return {"repeat": run.repeat} | ({"fold": run.fold} if run.fold >= 0 else {}) | record


def _train_all(context: Context, runs: list[Run], make_trainer: MakeTrainer, checkpoint: Checkpoint) -> None:
    config = context.config
    for run in runs[len(checkpoint.done) :]:
        trainer = make_trainer(run)
        if checkpoint.trainer:
            checkpoints.restore(trainer, checkpoint, config.train.resume)
        fit = _train_one(context, run, trainer, checkpoint)
        checkpoint.done.append(_record(run, fit))
        checkpoint.trainer = {}
        best = max(record["val_metric"] for record in checkpoint.done)
        if fit.val_metric == best or not checkpoint.weights:
            checkpoint.weights = {name: value.detach().clone() for name, value in trainer.module.state_dict().items()}
        if config.train.checkpoint_every:
            checkpoints.save(context.path, config, checkpoint)
    _save_weights(context.path / "model.pt", checkpoint.weights)


def _train_one(context: Context, run: Run, trainer: Trainer, checkpoint: Checkpoint) -> FitResult:
    every, config = context.config.train.checkpoint_every, context.config
    with Bar(context.console, run.title, config.train.epochs, trainer.progress.epoch) as bar:

        def on_epoch(record: dict[str, float]) -> None:
            context.sinks.metrics(_entry(run, record))
            bar.step(
                f"loss {record['loss']:.4f}" + (f"  val {record['val_metric']:.4f}" if "val_metric" in record else "")
            )
            if every and trainer.progress.epoch % every == 0:
                checkpoint.trainer = trainer.state()
                checkpoints.save(context.path, config, checkpoint)

        return trainer.fit(on_epoch)


def _record(run: Run, fit: FitResult) -> dict[str, Any]:
    return {
        "repeat": run.repeat,
        "fold": run.fold,
        "seed": run.seed,
        "best_epoch": fit.best_epoch,
        "epochs": len(fit.history),
        "val_metric": fit.val_metric,
        "test_metric": fit.test_metric,
        "test_loss": fit.test_loss,
        "train_s": fit.train_s,
        "history": [_entry(run, record) for record in fit.history],
    }


def _save_weights(path: Path, weights: dict[str, torch.Tensor]) -> None:
    content = io.BytesIO()
    torch.save(weights, content)
    write_atomically(path, content.getvalue())


def _summary(metric: str, folds: int, done: list[dict[str, Any]]) -> dict[str, Any]:
    epoch_s = [entry["seconds"] for record in done for entry in record["history"][1:] or record["history"]]
    result: dict[str, Any] = {
        "metric": metric,
        "runs": [{key: value for key, value in record.items() if key != "history"} for record in done],
        "epoch_ms": {key: value * 1e3 if key != "n" else value for key, value in spread(epoch_s).items()},
    }
    if folds:
        result |= _cross_validation(done, folds)
        at_epoch = [(found["epoch"], score) for found in result["cross_validation"] for score in found["folds"]]
        for record, (epoch, score) in zip(result["runs"], at_epoch, strict=False):
            record |= {"best_epoch": epoch, "test_metric": score}  # not the epoch that is best on the fold itself
    else:
        result["test_metric_mean"], result["test_metric_std"] = mean_std([record["test_metric"] for record in done])
    return result


def _cross_validation(done: list[dict[str, Any]], folds: int) -> dict[str, Any]:
    """GIN's protocol: the one epoch with the best mean over the folds; mean and std over the folds at that epoch, averaged over repeats."""
    repeats: list[dict[str, Any]] = []
    for first in range(0, len(done) - folds + 1, folds):
        curves = [[entry["val_metric"] for entry in record["history"]] for record in done[first : first + folds]]
        by_epoch = [mean_std(list(scores)) for scores in zip(*curves, strict=True)]
        epoch = max(range(len(by_epoch)), key=lambda index: by_epoch[index][0])
        repeats.append(
            {
                "epoch": epoch,
                "mean": by_epoch[epoch][0],
                "std": by_epoch[epoch][1],
                "folds": [curve[epoch] for curve in curves],
                "last_epoch_mean": by_epoch[-1][0],
            }
        )
    return {
        "cross_validation": repeats,
        "test_metric_mean": mean_std([entry["mean"] for entry in repeats])[0],
        "test_metric_std": mean_std([entry["std"] for entry in repeats])[0],
    }


def _report(context: Context, result: dict[str, Any]) -> None:
    columns = ["seed", "fold", "epochs", "selected", f"val {result['metric']}", f"test {result['metric']}", "train s"]
    rows = [
        [
            record["seed"],
            record["fold"] if record["fold"] >= 0 else "-",
            record["epochs"],
            record["best_epoch"],
            f"{record['val_metric']:.4f}",
            f"{record['test_metric']:.4f}",
            f"{record['train_s']:.2f}",
        ]
        for record in result["runs"]
    ]
    table = Table(*columns, title=f"{context.config.dataset.name} · {context.config.model.name} · {result['strategy']}")
    for row in rows:
        table.add_row(*[str(value) for value in row])
    context.show(table)
    mean, std = result["test_metric_mean"], result["test_metric_std"]
    what, spread_over = "test", f"{len(result['runs'])} seed(s)"
    if "cross_validation" in result:
        what, spread_over = (
            "cross-validated",
            f"{context.config.train.folds} folds, {len(result['cross_validation'])} repeat(s)",
        )
    context.say(
        f"{what} {result['metric']}: {mean:.4f} ± {std:.4f} (over {spread_over}), "
        f"epoch {result['epoch_ms']['median']:.2f} ms (median)"
    )
    context.sinks.table("runs", columns, rows)
    context.sinks.summary({"test_metric_mean": mean, "test_metric_std": std, "epoch_ms": result["epoch_ms"]["median"]})
