"""The two rows, training and inference, that task ``algebra`` has for a model on a graph."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from runner.errors import UserError
from runner.gnn.data.graph_data import GraphData
from runner.gnn.train import make_optimizer
from runner.kernels.fused.strategy import PreparedFused
from runner.kernels.strategy import Baseline, Prepared
from runner.results import spread
from runner.schema import RULE_FAMILIES, Config
from runner.tasks.full_graph import FullGraphExperiment, make_strategy
from runner.tasks.measure import in_turns, peak_memory, run_for
from runner.tasks.peers import Peer, peers_of
from runner.tasks.steps import step_of

CPU = torch.device("cpu")
BASELINE, FUSED, AUTO = "baseline", "fused", "auto"
MODES = ("train", "infer")
Say = Callable[[str], None]
Row = dict[str, Any]


def measure_rows_of(config: Config, data: GraphData, say: Say) -> list[Row]:
    """Measure a model on a graph: baseline, PyG's modules, fused and auto, training steps and inference.

    Args:
        config: with the rows' dataset and model.
        data: the graph.
        say: told what is left out, and why; and what was chosen, with ``kernel.explain``.

    Raises:
        UserError: where the model can't be rewritten.
        VerificationError: where an answer differs from baseline's.
    """
    experiment = FullGraphExperiment(config, data, CPU)
    kernel = dataclasses.replace(config.kernel, picture=False)
    fused = make_strategy(FUSED, kernel, say=say).prepare(experiment.program)
    agreement = experiment.verify(fused)
    prepared: dict[str, Prepared] = {BASELINE: Baseline().prepare(experiment.program), FUSED: fused}
    try:
        auto = make_strategy(AUTO, kernel, say=say).prepare(experiment.program)
    except UserError as error:
        say(f"{config.dataset.name}, {config.model.name}: {AUTO} is left out: {error}")
    else:
        experiment.verify(auto)
        prepared[AUTO] = auto
    if config.kernel.explain:
        say(f"--- {config.dataset.name}, {config.model.name} ---\n{fused.explain()}")
    peers = peers_of(experiment, config, say)
    ablated = _ablated(experiment, config) if config.task.ablate else {}
    shared = {
        "num_nodes": data.num_nodes,
        "num_edges": data.num_edges,
        "num_features": data.num_features,
        "device": "cpu",
        "precision": "float32",
        "max_output_diff": agreement.max_output_diff,
        "max_loss_diff": agreement.max_loss_diff,
        "max_grad_diff": agreement.max_grad_diff,
        "max_error": max(agreement.max_output_diff, agreement.max_grad_diff),
        "plan": fused.report["plan"],
        "kept": BASELINE if fused.report["is_baseline"] else FUSED,
        "auto_kept": prepared[AUTO].report.get("kept") if AUTO in prepared else None,
        "rules": fused.report["rules"],
        "refused": fused.report["refused"],
        "preprocess_s": sum(fused.preprocess_s.values()),
        "preprocess_by_phase_s": fused.preprocess_s,
        "resident_bytes": fused.resident_bytes,
        "regret": _regret(experiment, config, fused) if config.task.exhaustive else None,
    }
    rows = []
    for mode in MODES:
        found = _measure(experiment, prepared | ablated, peers, mode)
        rows.append(shared | {"mode": mode} | _columns(found, prepared, ablated))
        gc.collect()
    return rows


def _ablated(experiment: FullGraphExperiment, config: Config) -> dict[str, Prepared]:
    """Fused with one family of rules switched off at a time."""
    found: dict[str, Prepared] = {}
    for family in RULE_FAMILIES:
        kernel = dataclasses.replace(config.kernel, without=[*config.kernel.without, family])
        one = make_strategy(FUSED, kernel).prepare(experiment.program)
        experiment.verify(one)
        found[f"without {family}"] = one
    return found


def _regret(experiment: FullGraphExperiment, config: Config, fused: Prepared) -> dict[str, Any]:
    """How much slower than the fastest of all programs, baseline among them, are the one that the cost model ranks first and the one that
    was kept; None where the latter isn't among so many."""
    kernel = dataclasses.replace(config.kernel, num_plans=1000, trial_seconds=1e4, keep_choices=False)
    everything = make_strategy(FUSED, kernel).prepare(experiment.program)
    assert isinstance(everything, PreparedFused)
    assert isinstance(fused, PreparedFused)
    times, first = everything.report["tried_s"], next(iter(everything.report["predicted_s"]))
    best, kept = min(times.values()), everything.seconds_of(fused)
    return {
        "num_programs": len(times) - 1,
        "of_cost_model": times[first] / best - 1,
        "of_choice": None if kept is None else kept / best - 1,
    }


def _measure(
    experiment: FullGraphExperiment, prepared: dict[str, Prepared], peers: dict[str, Peer], mode: str
) -> dict[str, dict[str, Any]]:
    """Time steps in turns; returns the spread in ms and the peak memory of each."""
    task, train = experiment.config.task, experiment.config.train
    experiment.reset(train.seed)
    is_training = mode == "train"
    own = make_optimizer(experiment.module, train)
    works: dict[str, Callable[[], Any]] = {}
    for name, one in prepared.items():
        works[name] = _work(
            experiment, experiment.module, partial(one, training=is_training), one.place, own, is_training
        )
    for name, (module, call) in peers.items():
        works[name] = _work(experiment, module, call, lambda rows: rows, make_optimizer(module, train), is_training)
    peaks = {}
    for name, work in works.items():
        run_for(work, task.num_warmup, task.step_seconds / 4)
        peaks[name] = peak_memory(work, CPU)
    times = in_turns(works, task.num_steps, CPU, task.step_seconds)
    return {
        name: {key: value * 1e3 if key != "n" else value for key, value in spread(samples).items()}
        | {"peak_memory_bytes": peaks[name]}
        for name, samples in times.items()
    }


def _work(
    experiment: FullGraphExperiment,
    module: nn.Module,
    forward: Callable[[Tensor], Tensor],
    place: Callable[[Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    is_training: bool,
) -> Callable[[], Any]:
    if is_training:
        step = step_of(forward, experiment, place, optimizer)

        def train() -> None:
            module.train()
            step()

        return train
    features = place(experiment.features)

    def infer() -> None:
        module.eval()
        with torch.no_grad():
            forward(features)

    return infer


def _columns(found: dict[str, dict[str, Any]], prepared: dict[str, Prepared], ablated: dict[str, Prepared]) -> Row:
    ours = found[FUSED]["median"]
    rivals = {name: entry["median"] for name, entry in found.items() if name not in (FUSED, AUTO, *ablated)}
    best = min(rivals, key=lambda name: rivals[name])
    base = found[BASELINE]["peak_memory_bytes"]
    return {
        "step_ms": {name: {key: entry[key] for key in ("median", "q1", "q3", "n")} for name, entry in found.items()},
        "best_peer": best,
        "speedup_vs_best_peer": rivals[best] / ours,
        "auto_speedup_vs_best_peer": rivals[best] / found[AUTO]["median"] if AUTO in prepared else None,
        "speedup_vs_dgl": rivals[BASELINE] / ours,
        "peak_memory_bytes": {name: entry["peak_memory_bytes"] for name, entry in found.items()},
        "peak_memory_ratio_vs_dgl": found[FUSED]["peak_memory_bytes"] / max(base, 1),
        "slowdown_without": {name.removeprefix("without "): found[name]["median"] / ours for name in ablated},
    }
