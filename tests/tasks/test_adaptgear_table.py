"""The table of density-adaptive kernels: its columns, what it refuses, and how it is taken up again."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import compose

from runner.errors import ConfigError, UserError
from runner.gnn.data.load import load
from runner.gnn.models import build_model
from runner.gnn.pyg_peers import PygNet
from runner.kernels.adjacency import Adjacency
from runner.kernels.density.ablation import STEPS
from runner.results import read_result
from runner.tasks import adaptgear_table

Run = Callable[..., dict[str, Any]]
SMALL = (
    "+exp=adaptgear_table", "task.graphs=[planted]", "task.datasets.planted.num_nodes=400", "task.datasets.planted.num_communities=8",
    "task.case_seconds=0", "task.step_seconds=0", "task.num_steps=3", "task.num_warmup=1", "kernel.block_size=40", "kernel.num_trials=2",
)  # fmt: skip
QUICK = (*SMALL, "task.peers=[]", "task.models=[gcn:2x16]")


def test_a_row_has_what_is_promised(run_experiment: Run) -> None:
    record = run_experiment(*SMALL, "task.models=[gcn:2x16,gin:2x8]", "task.peers=[pyg]")
    rows = record["rows"]
    assert [(row["dataset"], row["model"], row["hidden"]) for row in rows] == [
        ("planted", "gcn", 16),
        ("planted", "gin", 8),
    ]
    for row in rows:
        for ratio in ("aggregation_speedup_vs_dgl", "step_speedup_vs_dgl", "ratio_to_oracle", "speedup_vs_best_single"):
            assert math.isfinite(row[ratio])
            assert row[ratio] > 0
        assert row["ratio_to_oracle"] <= 1, "an oracle has the chosen kernel too"
        assert set(row["aggregation_speedups"]) == {*STEPS, "oracle"}
        assert set(row["step_ms"]) == {"baseline", "native", "density_adaptive", "pyg"}
        assert row["max_grad_diff"] < 1e-4
        assert row["num_edges"] > row["num_nodes"] == 400
        total = sum(product["count"] * product["seconds"]["adaptive"] for product in row["products"])
        assert row["aggregation_ms"]["adaptive"] == pytest.approx(1e3 * total)
    counts = [sum(product["count"] for product in row["products"]) for row in rows]
    assert counts == [4, 3], "GCN: two layers, both directions; GIN: nothing flows back to the features"
    assert record["summary"]["step_speedup_vs_dgl"]["num_rows"] == 2


def test_a_run_that_was_stopped_is_taken_up(
    run_experiment: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run_experiment(*QUICK, folder="first")

    def never(*_: Any) -> Any:
        raise AssertionError("measured again")

    monkeypatch.setattr(adaptgear_table, "measure_row", never)
    second = run_experiment(*QUICK, f"task.resume={tmp_path / 'first'}", folder="second")
    assert second["rows"] == read_result(tmp_path / "first")["rows"] == first["rows"]
    for other in ("kernel.block_size=20", "task.num_steps=4", "model.dropout=0", "task.datasets.planted.seed=1"):
        with pytest.raises(AssertionError, match="measured again"):
            run_experiment(*QUICK, f"task.resume={tmp_path / 'first'}", other, folder="third")


def test_rows_are_kept_as_they_are_measured(
    run_experiment: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = adaptgear_table.measure_row

    def stops_at_the_second(config: Any, *given: Any) -> Any:
        if config.model.name == "gin":
            raise KeyboardInterrupt
        return right(config, *given)

    monkeypatch.setattr(adaptgear_table, "measure_row", stops_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        run_experiment(*SMALL, "task.peers=[]", "task.models=[gcn:2x16,gin:2x8]")
    record = read_result(tmp_path / "run")
    assert record["status"] == "interrupted"
    assert [row["model"] for row in record["rows"]] == ["gcn"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("task.resume=/nowhere",), "task.resume=/nowhere: no run folder"),
        (("task.graphs=[plantd]",), "did you mean 'planted'"),
        (("device=cuda",), "the table compares kernels of the CPU"),
        (("task.graphs=[cora]", "dataset.root=/nowhere"), "/nowhere"),
    ],
    ids=str,
)
def test_mistakes_are_told_in_one_line(run_experiment: Run, options: tuple[str, ...], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        run_experiment(*QUICK, *options)
    assert "\n" not in str(caught.value)


def test_another_tasks_run_is_not_taken_up(run_experiment: Run, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "result.json").write_text(json.dumps({"task": "train", "status": "finished"}))
    with pytest.raises(ConfigError, match="a run of task=train, not adaptgear_table"):
        run_experiment(*QUICK, f"task.resume={tmp_path / 'other'}")


def test_graphs_without_a_file_are_left_out_and_named(run_experiment: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run_experiment(*QUICK, "task.graphs=[]")
    said = capsys.readouterr().out
    assert "left out, no file at hand: cora, citeseer" in said


@pytest.mark.parametrize("name", ["gcn", "gin", "sage", "gat", "gatv2", "appnp", "monet", "edgeconv"])
@pytest.mark.parametrize("is_sparse", [False, True])
def test_pygs_models_compute_what_dgls_do(name: str, is_sparse: bool) -> None:
    """On a directed graph, where the two ends have degrees of their own."""
    pytest.importorskip("torch_geometric")
    config = compose("dataset.num_nodes=100", "dataset.num_communities=5", f"model={name}", "model.num_layers=3")
    data = load(config.dataset)
    keep = torch.arange(data.num_edges) % 3 > 0
    src, dst = data.src[keep], data.dst[keep]
    graph = Adjacency.from_edges(src, dst, data.num_nodes, data.num_nodes)
    import dgl

    module = build_model(config.model, data.num_features, data.num_classes, "node").eval()
    expected = module(dgl.graph((src, dst), num_nodes=data.num_nodes), data.dense_features())
    found = PygNet(module, config.model, graph, is_sparse).eval()(data.dense_features())
    assert torch.allclose(expected, found, atol=1e-5)
