"""Task ``benchmark``: kernel strategies side by side on one graph and model, at equal answers.

Same initial weights, same seeds, same dropout masks. Each strategy is verified before it is timed; steps are timed in turns, so that
whatever the machine does meanwhile hits all alike. A slower strategy is shown as slower.
"""

from __future__ import annotations

import gc
import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rich.table import Table

from runner.gnn.batches import FullGraph
from runner.gnn.train import Trainer, make_optimizer, train_step
from runner.kernels.strategy import Prepared, PreparedModule
from runner.kernels.verify import Agreement
from runner.progress import Bar
from runner.results import mean_std, spread
from runner.tasks.context import Context, begin
from runner.tasks.full_graph import FullGraphExperiment, prepare_strategy
from runner.tasks.measure import in_turns, peak_memory
from runner.units import format_bytes

_CURVE_LIMIT = 1e-4
CURVE_EPOCHS = 20  # the loss curves are compared over so many epochs; later, rounding has had time to grow


@dataclass
class Entry:
    """One strategy's measurements."""

    prepared: Prepared
    agreement: Agreement
    source: FullGraph
    step_s: list[float] = field(default_factory=list)
    peak_memory_bytes: int = 0
    test_metrics: list[float] = field(default_factory=list)
    curves: list[list[float]] = field(default_factory=list)
    reference_curves: list[list[float]] = field(default_factory=list)


def run(context: Context) -> dict[str, Any]:
    """Run the task; returns its part of the result record."""
    config = context.config
    data, device = begin(context)
    experiment = FullGraphExperiment(config, data, device)
    names = list(dict.fromkeys(["baseline", *config.task.compare]))
    entries = {name: _prepare(context, experiment, name) for name in names}
    _time_steps(context, experiment, entries)
    _train(context, experiment, entries)
    rows = [_row(name, entry, entries["baseline"]) for name, entry in entries.items()]
    _report(context, rows)
    return {"metric": config.train.metric, "strategies": rows}


def _prepare(context: Context, experiment: FullGraphExperiment, name: str) -> Entry:
    prepared = prepare_strategy(context, experiment, name)
    agreement = experiment.verify(prepared)
    source = experiment.source_for(prepared)
    context.say(
        f"{name}: prepared in {sum(prepared.preprocess_s.values()):.2f} s; largest difference from baseline: output "
        f"{agreement.max_output_diff:.1e}, loss {agreement.max_loss_diff:.1e}, gradient {agreement.max_grad_diff:.1e}"
    )
    return Entry(prepared, agreement, source)


def _time_steps(context: Context, experiment: FullGraphExperiment, entries: dict[str, Entry]) -> None:
    """Time training steps (forward, backward, update) of all strategies in turns, each round in another order."""
    config = context.config
    experiment.reset(config.train.seed)
    experiment.module.train()
    optimizer = make_optimizer(experiment.module, config.train)
    names = list(entries)

    def step(name: str) -> None:
        for batch in entries[name].source.train_batches(0):
            train_step(batch, optimizer)

    for name in names:
        for _ in range(config.task.num_warmup):
            step(name)
        entries[name].peak_memory_bytes = (
            peak_memory(partial(step, name), experiment.device) + entries[name].prepared.resident_bytes
        )
    gc.collect()
    works = {name: partial(step, name) for name in names}
    with Bar(context.console, "timing", config.task.num_steps) as bar:
        times = in_turns(works, config.task.num_steps, experiment.device, on_round=bar.step)
    for name, samples in times.items():
        entries[name].step_s += samples


def _train(context: Context, experiment: FullGraphExperiment, entries: dict[str, Entry]) -> None:
    """Train every strategy with every seed from the same initial weights."""
    train = context.config.train
    for repeat in range(train.repeats):
        for name, entry in entries.items():
            experiment.reset(train.seed + repeat)
            trainer = Trainer(experiment.module, entry.source, train, train.seed + repeat)
            with Bar(context.console, f"{name} seed {train.seed + repeat}", train.epochs) as bar:

                def on_epoch(record: dict[str, float], name: str = name, repeat: int = repeat, bar: Bar = bar) -> None:
                    context.sinks.metrics({"strategy": name, "repeat": repeat} | record)
                    bar.step(f"loss {record['loss']:.4f}")

                fit = trainer.fit(on_epoch)
            entry.test_metrics.append(fit.test_metric)
            entry.curves.append([record["loss"] for record in fit.history])
            reference = _reference_curve(experiment, entry, entries["baseline"], train.seed + repeat)
            entry.reference_curves.append(reference)


def _reference_curve(experiment: FullGraphExperiment, entry: Entry, baseline: Entry, seed: int) -> list[float]:
    """Baseline's losses with a strategy's masks: its own run's, or, where masks are drawn by seed, those of a short run with these."""
    if not entry.prepared.draws_by_seed:
        return baseline.curves[-1]
    module = PreparedModule(experiment.program, draws_by_seed=True, seeded_rows=entry.prepared.mask_rows)
    experiment.reset(seed)
    trainer = Trainer(experiment.module, experiment.source_for(module), experiment.config.train, seed)
    return [record["loss"] for record in trainer.fit(most_epochs=CURVE_EPOCHS).history]


def _row(name: str, entry: Entry, baseline: Entry) -> dict[str, Any]:
    step_ms = {key: value * 1e3 if key != "n" else value for key, value in spread(entry.step_s).items()}
    base_ms = spread(baseline.step_s)["median"] * 1e3
    preprocess_s = sum(entry.prepared.preprocess_s.values())
    saved_s = (base_ms - step_ms["median"]) / 1e3
    mean, std = mean_std(entry.test_metrics)
    return {
        "name": name,
        "ran_as": entry.prepared.name,
        "step_ms": step_ms,
        "speedup": base_ms / step_ms["median"],
        "preprocess_s": preprocess_s,
        "preprocess_by_phase_s": entry.prepared.preprocess_s,
        "break_even_epochs": (preprocess_s / saved_s if preprocess_s else 0.0)
        if saved_s > 0 or not preprocess_s
        else None,
        "peak_memory_bytes": entry.peak_memory_bytes,
        "test_metric_mean": mean,
        "test_metric_std": std,
        "test_metrics": entry.test_metrics,
        "max_output_diff": entry.agreement.max_output_diff,
        "max_loss_diff": entry.agreement.max_loss_diff,
        "max_grad_diff": entry.agreement.max_grad_diff,
        "curve_max_loss_diff": _curve_difference(entry),
        "report": entry.prepared.report,
    }


def _curve_difference(entry: Entry) -> float:
    """Largest relative difference of the training losses from baseline's in the first epochs, over all seeds."""
    pairs = [
        (loss, wanted)
        for curve, other in zip(entry.curves, entry.reference_curves, strict=True)
        for loss, wanted in list(zip(curve, other, strict=False))[:CURVE_EPOCHS]
    ]
    differences = [abs(loss - wanted) / abs(wanted) if wanted else abs(loss) for loss, wanted in pairs]
    return max((math.inf if math.isnan(difference) else difference for difference in differences), default=0.0)


def _report(context: Context, rows: list[dict[str, Any]]) -> None:
    config = context.config
    columns = [
        "strategy",
        "step ms",
        "quartiles",
        "speed-up",
        "preprocess s",
        "break-even epochs",
        "peak memory",
        f"test {config.train.metric}",
        "Δ loss",
        "Δ gradient",
        f"Δ curve ({CURVE_EPOCHS})",
    ]
    cells = [
        [
            row["name"] if row["name"] == row["ran_as"] else f"{row['name']} (as {row['ran_as']})",
            f"{row['step_ms']['median']:.3f}",
            f"{row['step_ms']['q1']:.3f} – {row['step_ms']['q3']:.3f}",
            f"{row['speedup']:.2f}×",
            f"{row['preprocess_s']:.2f}",
            "never" if row["break_even_epochs"] is None else f"{row['break_even_epochs']:.0f}",
            format_bytes(row["peak_memory_bytes"]),
            f"{row['test_metric_mean']:.4f} ± {row['test_metric_std']:.4f}",
            f"{row['max_loss_diff']:.1e}",
            f"{row['max_grad_diff']:.1e}",
            f"{row['curve_max_loss_diff']:.1e}",
        ]
        for row in rows
    ]
    table = Table(
        *columns,
        title=f"{config.dataset.name} · {config.model.name} · {config.train.repeats} seed(s) · n = {config.task.num_steps} steps",
    )
    for cell in cells:
        table.add_row(*cell)
    context.show(table)
    for row in rows:
        if row["curve_max_loss_diff"] > _CURVE_LIMIT:
            context.say(
                f"note: the training loss of {row['name']} leaves baseline's by {row['curve_max_loss_diff']:.1e} within {CURVE_EPOCHS} "
                "epochs; its answers were equal when it was verified; rounding that turns a ReLU over can do this"
            )
    context.sinks.table("strategies", columns, cells)
    context.sinks.summary(
        {
            f"{row['name']}/{key}": row[key]
            for row in rows
            for key in ("speedup", "preprocess_s", "peak_memory_bytes", "test_metric_mean", "test_metric_std")
        }
        | {f"{row['name']}/step_ms": row["step_ms"]["median"] for row in rows}
    )
