"""The strategy fused in experiments: curves, what it reports, what it is refused, choices kept on disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import compose

from runner.errors import UserError
from runner.gnn.data.load import load
from runner.kernels.fused import machine, trials
from runner.kernels.fused.strategy import Fused
from runner.kernels.seeds import Seeds, seeded_dropouts
from runner.tasks.full_graph import FullGraphExperiment, make_strategy

Run = Callable[..., dict[str, Any]]
SMALL = ("dataset.num_nodes=300", "dataset.num_communities=8", "dataset.num_features=8", "kernel.trial_seconds=0.05")
MODELS = ("gcn", "sage", "gin", "gat", "gatv2", "sgc", "appnp", "monet", "edgeconv")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_training_curves_equal_baselines(model: str, dropout: float, run_experiment: Run) -> None:
    """With dropout on, baseline is given the strategy's masks. Over fewer epochs then: a ReLU that rounding turns over moves a GIN's loss
    by 3e-3 within 20, and so do features moved by 2e-7 (measured)."""
    epochs = 3 if dropout else 20
    options = [] if model == "sgc" else [f"model.dropout={dropout}"]
    options += [f"model.input_dropout={dropout}"] + ([f"model.attention_dropout={dropout}"] if "gat" in model else [])
    record = run_experiment(
        *SMALL, "+exp=adaptgear", "task.compare=[fused]", f"model={model}", *options, "train.repeats=1", f"train.epochs={epochs}",
        "task.num_steps=3", "task.num_warmup=1",
    )  # fmt: skip
    row = next(row for row in record["strategies"] if row["name"] == "fused")
    assert row["curve_max_loss_diff"] < 1e-4
    assert row["max_grad_diff"] < 1e-4
    assert row["report"]["rules"]


def experiment_of(*overrides: str) -> FullGraphExperiment:
    config = compose(*SMALL, *overrides)
    return FullGraphExperiment(config, load(config.dataset), torch.device("cpu"))


def test_a_choice_is_kept_and_found_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GEARSAIL_CACHE", str(tmp_path))
    monkeypatch.setattr(trials, "is_crowded", lambda: False)
    program = experiment_of("model=gin").program
    first = Fused(trial_seconds=0.05).prepare(program)
    monkeypatch.setattr(trials.Trials, "_time", lambda *_: pytest.fail("measured again"))
    second = Fused(trial_seconds=0.05).prepare(program)
    assert second.report["plan"] == first.report["plan"]
    assert "decided in an earlier run" in second.explain()
    for file in (tmp_path / "programs").iterdir():
        file.write_text("{}")
    with pytest.raises(BaseException, match="measured again"):
        Fused(trial_seconds=0.05).prepare(program)


def test_a_resumed_run_takes_the_programs_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    program = experiment_of("model=gin").program
    first = Fused(trial_seconds=0.05, keep_choices=False).prepare(program)
    monkeypatch.setattr(trials.Trials, "_time", lambda *_: pytest.fail("measured again"))
    second = Fused(keep_choices=False, replay=first.report["choices"]).prepare(program)
    assert second.report["choices"] == first.report["choices"]
    gone = [{"programs": {"training": "no plan", "evaluation": "baseline"}}]
    third = Fused(keep_choices=False, replay=gone).prepare(program)
    assert "by the cost model; no plan is no program" in third.explain()
    assert third.report["evaluation"]["is_baseline"]


def test_without_timing_the_cost_model_decides() -> None:
    prepared = Fused(trial_seconds=0).prepare(experiment_of("model=gcn").program)
    assert prepared.report["tried_s"] == {}
    assert prepared.report["plan"] == next(iter(prepared.report["predicted_s"]))


def test_a_slow_program_gives_way_to_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        trials.Trials, "_time", lambda _self, ranked, _training: {str(ranked[0].plan): 1.0, "baseline": 0.5}
    )
    experiment = experiment_of("model=gcn")
    prepared = Fused(keep_choices=False).prepare(experiment.program)
    assert prepared.report["is_baseline"]
    assert not prepared.draws_by_seed
    assert prepared.lowered() is None
    experiment.verify(prepared)


def test_an_unknown_family_is_named_with_its_neighbour() -> None:
    with pytest.raises(UserError, match="did you mean 'order'"):
        Fused(without=["ordr"]).prepare(experiment_of().program)


def test_explain_tells_before_after_rules_and_times() -> None:
    text = Fused(trial_seconds=0.05, keep_choices=False).prepare(experiment_of("model=gcn").program).explain()
    for words in (
        "captured, in training:",
        "rewritten:",
        "rules that were applied:",
        "T1 order",
        "training: kept",
        "predicted",
        "baseline",
    ):
        assert words in text


def test_auto_has_rewriting_and_density_together() -> None:
    experiment = experiment_of("model=gcn", "kernel.block_size=32", "kernel.num_trials=2")
    auto = make_strategy("auto", experiment.config.kernel)
    both = next(one for one in auto.candidates if one.name == "fused + density_adaptive")  # type: ignore[attr-defined]
    prepared = both.prepare(experiment.program)
    assert experiment.verify(prepared).max_grad_diff < 1e-4
    assert prepared.report["choices"]
    assert "products, by density:" in prepared.explain()
    rows = torch.randn(300, 3)
    assert torch.equal(prepared.restore(prepared.place(rows)), rows)


def test_masks_by_seed_are_those_of_the_module() -> None:
    """The same seed, the same elements; another forward, others."""
    x = torch.ones(50, 20)
    with seeded_dropouts():
        first = torch.nn.functional.dropout(x, 0.3)
        second = torch.nn.functional.dropout(x, 0.3)
    assert not torch.equal(first, second)
    assert 0.5 < float((first != 0).float().mean()) < 0.85
    torch.manual_seed(3)
    with seeded_dropouts():
        again = torch.nn.functional.dropout(x, 0.3)
    torch.manual_seed(3)
    seeds = Seeds()
    seeds.draw()
    from runner.kernels.parameters import kept

    assert torch.equal(again != 0, kept(torch.arange(50), 20, 0.3, seeds(0)))


def test_a_damaged_calibration_is_measured_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GEARSAIL_CACHE", str(tmp_path))
    monkeypatch.setattr(machine, "is_crowded", lambda: False)
    monkeypatch.setattr(machine, "_known", {})
    first = machine.calibrated(torch.device("cpu"))
    (file,) = (tmp_path / "machines").iterdir()
    for content in ("", "[]", json.dumps({"flops_per_s": -1.0}), json.dumps({"nothing": 1})):
        file.write_text(content)
        monkeypatch.setattr(machine, "_known", {})
        found = machine.calibrated(torch.device("cpu"))
        assert min(found.flops_per_s, found.bytes_per_s, found.gathered_bytes_per_s, found.op_s) > 0
    assert first.flops_per_s > 1e9
