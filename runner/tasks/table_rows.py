"""One row of the table of task ``adaptgear_table``: a model on a graph, its products one by one, and its whole training step.

Legend: N nodes, E edges, F features.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from runner.gnn.data.graph_data import GraphData
from runner.gnn.library_kernels import csr_dgl
from runner.gnn.train import make_optimizer
from runner.kernels.density import ablation
from runner.kernels.density.ablation import Use
from runner.kernels.density.plans import Plans
from runner.kernels.density.strategy import DensityAdaptive
from runner.kernels.formats import SpMM, touch
from runner.kernels.native import Native
from runner.kernels.strategy import Baseline
from runner.results import spread
from runner.schema import Config
from runner.tasks.full_graph import FullGraphExperiment, make_strategy
from runner.tasks.measure import in_turns, peak_memory, run_for
from runner.tasks.peers import peers_of
from runner.tasks.steps import step_of

CPU = torch.device("cpu")
_MAX_ROUNDS = 201  # of products, where they are brief
_LEAST_ROUNDS = 9
_NUM_FINALISTS = 4  # of the oracle, timed anew: the least of many noisy times is too low


def measure_row(config: Config, data: GraphData, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure a model on a graph under every strategy and peer.

    Args:
        config: with the row's dataset and model.
        data: the graph.
        say: told what is left out, and why; and what was chosen, with ``kernel.explain``.
    """
    experiment = FullGraphExperiment(config, data, CPU)
    strategy = make_strategy("density_adaptive", dataclasses.replace(config.kernel, picture=False), say=say)
    assert isinstance(strategy, DensityAdaptive)
    prepared, plans, graph = strategy.plan(experiment.program)
    agreement = experiment.verify(prepared)
    if config.kernel.explain:
        say(f"--- {config.dataset.name}, {config.model.name} ---\n{prepared.explain()}")
    uses = ablation.uses_of(plans, graph)
    products = [_measure_use(experiment, plans, use, config.task.case_seconds) for use in uses]
    plans.forget_unchosen()
    gc.collect()
    native = Native().prepare(experiment.program)
    experiment.verify(native)
    forwards: dict[str, Callable[[Tensor], Tensor]] = {
        "baseline": partial(Baseline().prepare(experiment.program), training=True),
        "native": partial(native, training=True),
        "density_adaptive": partial(prepared, training=True),
    }
    steps = _measure_steps(experiment, forwards, prepared.place, peers_of(experiment, config, say))
    degree = experiment.adjacency.in_degrees.double()
    report = prepared.report
    return {
        "num_nodes": data.num_nodes,
        "num_edges": data.num_edges,
        "mean_degree": float(degree.mean()),
        "degree_variation": float(degree.std() / degree.mean()),
        "num_features": data.num_features,
        "device": "cpu",
        "precision": "float32",
        "intra_fraction": report["intra_fraction"],
        "intra_density": report["intra_density"],
        "kernels": [
            f"{choice['num_features']} {choice['direction']}: {' + '.join(choice['kernels'])}"
            for choice in report["choices"]
        ],
        "partition_s": report["partition_s"],
        "build_s": prepared.preprocess_s.get("build", 0.0),
        "tune_s": prepared.preprocess_s.get("select", 0.0),
        "preprocess_by_phase_s": prepared.preprocess_s,
        "max_output_diff": agreement.max_output_diff,
        "max_loss_diff": agreement.max_loss_diff,
        "max_grad_diff": agreement.max_grad_diff,
        "products": products,
        **_aggregation(products),
        **_steps(steps, report["partition_s"], prepared.preprocess_s),
        "resident_bytes": prepared.resident_bytes,
    }


def _measure_use(experiment: FullGraphExperiment, plans: Plans, use: Use, budget_s: float) -> dict[str, Any]:
    """Time every variant and every kernel of a product in turns, then the fastest and those that are compared once more."""
    x = torch.randn(experiment.adjacency.num_src, use.num_features, generator=torch.Generator().manual_seed(1))
    steps = ablation.variants(plans, use, experiment.adjacency, csr_dgl)

    between = partial(touch, plans.between_bytes)  # as in a step, for DGL's kernels as for ours

    def seconds_of(runs: dict[str, SpMM], budget: float = budget_s / 2) -> dict[str, float]:
        works = {name: partial(run, x) for name, run in runs.items()}
        for work in works.values():
            work()
        times = in_turns(works, _MAX_ROUNDS, CPU, budget, least_rounds=_LEAST_ROUNDS, before=between)
        return {name: median(samples) for name, samples in times.items()}

    candidates = ablation.all_candidates(plans, use, seconds_of)
    chosen = " + ".join(plans.chosen(use.matrix, use.num_features, use.direction).names)
    if chosen in candidates:
        candidates[chosen] = steps.pop("adaptive")  # one kernel, timed once
    first = seconds_of({f"oracle: {name}": run for name, run in candidates.items()})
    ranked = sorted(candidates, key=lambda name: first[f"oracle: {name}"])
    best_single = min(ablation.single_names(plans, use), key=lambda name: first[f"oracle: {name}"])
    finalists = list(dict.fromkeys([*ranked[:_NUM_FINALISTS], best_single, *({chosen} & set(candidates))]))
    again = seconds_of(steps | {f"oracle: {name}": candidates[name] for name in finalists}, budget_s)
    again.setdefault("adaptive", again.get(f"oracle: {chosen}", 0.0))
    oracle = min(finalists, key=lambda name: again[f"oracle: {name}"])
    oracle_s = min(again[f"oracle: {oracle}"], again["adaptive"])
    return {
        "num_features": use.num_features,
        "direction": use.direction,
        "count": use.count,
        "weighted": use.matrix.weight is not None,
        "chosen": chosen,
        "oracle": oracle,
        "best_single": best_single,
        "seconds": {name: again[name] for name in (*steps, "adaptive")}
        | {"oracle": oracle_s, "best_single": again[f"oracle: {best_single}"]},
        "candidates_s": {name: first[f"oracle: {name}"] for name in candidates},
    }


def _aggregation(products: list[dict[str, Any]]) -> dict[str, Any]:
    """Add up the products of a step. A variant that can't be built for one of them counts as the step of the method before it."""
    order = ("framework", *ablation.STEPS)
    totals: dict[str, float] = dict.fromkeys((*order, "oracle", "best_single"), 0.0)
    for entry in products:
        seconds = entry["seconds"]
        for name in totals:
            known = (
                [before for before in order[: order.index(name) + 1] if before in seconds] if name in order else [name]
            )
            totals[name] += entry["count"] * seconds[known[-1]]
    return {
        "aggregation_ms": {name: total * 1e3 for name, total in totals.items()},
        "aggregation_speedup_vs_dgl": totals["framework"] / totals["adaptive"],
        "aggregation_speedups": {name: totals["framework"] / totals[name] for name in (*ablation.STEPS, "oracle")},
        "speedup_vs_best_single": totals["best_single"] / totals["adaptive"],
        "ratio_to_oracle": totals["oracle"] / totals["adaptive"],
    }


def _measure_steps(
    experiment: FullGraphExperiment,
    forwards: dict[str, Callable[[Tensor], Tensor]],
    place: Callable[[Tensor], Tensor],
    peers: dict[str, tuple[nn.Module, Callable[[Tensor], Tensor]]],
) -> dict[str, dict[str, Any]]:
    """Time training steps (forward, backward, update) in turns; returns the spread in ms and the peak memory of each."""
    task, train = experiment.config.task, experiment.config.train
    experiment.reset(train.seed)
    experiment.module.train()
    own = make_optimizer(experiment.module, train)
    works: dict[str, Callable[[], Any]] = {}
    for name, forward in forwards.items():
        moved = place if name == "density_adaptive" else lambda rows: rows
        works[name] = step_of(forward, experiment, moved, own)
    for name, (module, call) in peers.items():
        works[name] = step_of(call, experiment, lambda rows: rows, make_optimizer(module.train(), train))
    peaks = {}
    for name, work in works.items():
        run_for(work, task.num_warmup, task.step_seconds / 4)
        peaks[name] = peak_memory(work, CPU)
    gc.collect()
    times = in_turns(works, task.num_steps, CPU, task.step_seconds)
    return {
        name: {key: value * 1e3 if key != "n" else value for key, value in spread(samples).items()}
        | {"peak_memory_bytes": peaks[name]}
        for name, samples in times.items()
    }


def _steps(steps: dict[str, dict[str, Any]], partition_s: float, preprocess_s: dict[str, float]) -> dict[str, Any]:
    """The whole step's columns. Preparation counts the partition's own seconds, also where an earlier run found it."""
    base, ours = steps["baseline"]["median"], steps["density_adaptive"]["median"]
    paid_s = sum(seconds for phase, seconds in preprocess_s.items() if phase != "partition") + max(
        partition_s, preprocess_s.get("partition", 0.0)
    )
    saved_s = (base - ours) / 1e3
    return {
        "step_ms": {name: {key: entry[key] for key in ("median", "q1", "q3", "n")} for name, entry in steps.items()},
        "step_speedup_vs_dgl": base / ours,
        "step_speedups": {name: base / entry["median"] for name, entry in steps.items()},
        "peak_memory_bytes": {name: entry["peak_memory_bytes"] for name, entry in steps.items()},
        "preprocess_s": paid_s,
        "break_even_epochs": paid_s / saved_s if saved_s > 0 else None,
    }
