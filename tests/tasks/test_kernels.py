"""The experiment kernels, and training on a device that DGL can't use, in the CPU's place."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import compose

from runner.errors import ConfigError, DataError, VerificationError
from runner.gnn.data.load import load
from runner.gnn.train import Trainer
from runner.schema import KERNEL_OPS
from runner.tasks import kernel_cases
from runner.tasks.full_graph import FullGraphExperiment, make_strategy
from runner.tasks.measure import in_turns

Run = Callable[..., dict[str, Any]]
TINY = ("task.num_features=[16]", "task.graphs=[planted_small]", "task.case_seconds=0", "task.num_rounds=3")
PROMISED = {
    "op",
    "graph",
    "num_features",
    "dtype",
    "backend",
    "best_peer",
    "median_s",
    "ratio_vs_best_peer",
    "roofline_share",
}


def test_every_op_leaves_the_promised_record(run_experiment: Run, tmp_path: Path) -> None:
    run_experiment("+exp=kernels", *TINY)
    record = json.loads((tmp_path / "run" / "result.json").read_text())
    assert [case["op"] for case in record["cases"]] == list(KERNEL_OPS)
    for case in record["cases"]:
        assert set(case) >= PROMISED
        assert case["backend"] == "cpu"
        assert case["median_s"] > 0
        assert case["roofline_share"] > 0
        assert case["ratio_vs_best_peer"] == pytest.approx(
            case["peers"][case["best_peer"]]["median_s"] / case["median_s"]
        )
        assert case["best_peer"] == min(case["peers"], key=lambda peer: case["peers"][peer]["median_s"])
    assert {"dgl", "torch", "scipy"} <= set(record["cases"][0]["peers"])
    assert 0 < record["alternating_calls"]["median_s"] <= record["alternating_calls"]["p99_s"]
    row = record["summary"][0]
    assert row["geomean_vs_best_peer"] == pytest.approx(record["cases"][0]["ratio_vs_best_peer"])
    assert "ours against the best peer" in (tmp_path / "run" / "run.log").read_text()


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_other_dtypes(run_experiment: Run, dtype: str) -> None:
    ops = "task.ops=[spmm_sum,spmm_max,edge_softmax,attention_gatv2,sparse_linear]"
    record = run_experiment("+exp=kernels", *TINY, ops, f"task.dtypes=[{dtype}]")
    assert {case["dtype"] for case in record["cases"]} == {dtype}


def test_real_graphs_by_name(run_experiment: Run, graphs_root: Path) -> None:
    record = run_experiment(
        "+exp=kernels",
        *TINY,
        f"dataset.root={graphs_root}",
        "task.graphs=[cora,p2p-Gnutella31]",
        "task.ops=[spmm_sum,sparse_linear]",
    )
    assert [(case["graph"], case["op"]) for case in record["cases"]] == [
        (graph, op) for graph in ("cora", "p2p-Gnutella31") for op in ("spmm_sum", "sparse_linear")
    ]


def test_bad_requests_are_told(run_experiment: Run, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"task.graphs=planted_smal: did you mean 'planted_small'"):
        run_experiment("+exp=kernels", "task.graphs=[planted_smal]")
    with pytest.raises(ConfigError, match=r"task.ops=spmm: did you mean"):
        compose("+exp=kernels", "task.ops=[spmm]")
    with pytest.raises(ConfigError, match=r"task.num_features=12: ops with heads have 8 of them"):
        compose("+exp=kernels", "task.num_features=[16,12]")
    with pytest.raises(DataError, match="no such folder"):
        run_experiment("+exp=kernels", f"dataset.root={tmp_path / 'nowhere'}")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="device=cuda: torch"):
            run_experiment("+exp=kernels", "device=cuda")


def test_a_wrong_kernel_is_not_timed(run_experiment: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    right = kernel_cases.spmm
    monkeypatch.setattr(kernel_cases, "spmm", lambda *given, **options: right(*given, **options) * 1.001)
    with pytest.raises(
        VerificationError, match=r"spmm_sum on planted_small, width 16, float32: ours and dgl's differ by 1.0e-03"
    ):
        run_experiment("+exp=kernels", *TINY, "task.ops=[spmm_sum]")


def test_turns_are_taken_in_changing_order() -> None:
    order: list[str] = []
    times = in_turns({name: lambda name=name: order.append(name) for name in "abc"}, 6, torch.device("cpu"))  # type: ignore[misc]
    assert {name: len(samples) for name, samples in times.items()} == {"a": 6, "b": 6, "c": 6}
    assert len({tuple(order[at : at + 3]) for at in range(0, 18, 3)}) > 1
    assert len(in_turns({"a": lambda: None}, 100, torch.device("cpu"), budget_s=0)["a"]) == 3


SMALL = ("dataset.num_nodes=300", "dataset.num_communities=8", "train.epochs=4")


@pytest.mark.parametrize("model", ["gcn", "sage", "gin", "gat", "gatv2", "sgc", "appnp"])
@pytest.mark.parametrize("strategy", ["baseline", "native"])
def test_training_without_dgl_equals_training_with_it(model: str, strategy: str) -> None:
    norm = () if model in ("sgc", "appnp") else ("model.norm=batch",)
    config = compose(*SMALL, f"model={model}", *norm)
    data, losses = load(config.dataset), []
    for name, without_dgl in (("baseline", False), (strategy, True)):
        experiment = FullGraphExperiment(config, data, torch.device("cpu"), without_dgl)
        prepared = make_strategy(name, config.kernel).prepare(experiment.program)
        experiment.verify(prepared)
        experiment.reset(0)
        fit = Trainer(experiment.module, experiment.source_for(prepared), config.train, 0).fit(lambda _: None)
        losses.append([record["loss"] for record in fit.history])
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)


def test_an_op_graph_that_is_not_what_dgl_computes_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    config = compose(*SMALL)
    experiment = FullGraphExperiment(config, load(config.dataset), torch.device("cpu"), without_dgl=True)
    right = experiment._run_op_graph
    monkeypatch.setattr(experiment, "_run_op_graph", lambda features: right(features) * 1.01)
    with pytest.raises(VerificationError, match="baseline differs from baseline in evaluation mode"):
        experiment.verify(make_strategy("baseline", config.kernel).prepare(experiment.program))


def test_the_benchmark_compares_native(run_experiment: Run) -> None:
    record = run_experiment(
        "+exp=adaptgear", *SMALL, "task.compare=[native]", "task.num_steps=3", "train.repeats=1", "model=gatv2"
    )
    rows = {row["name"]: row for row in record["strategies"]}
    assert rows["native"]["max_grad_diff"] < 1e-4
    assert not math.isnan(rows["native"]["test_metric_mean"])
    assert any("edge_softmax" in line for line in rows["native"]["report"]["kernels"])
