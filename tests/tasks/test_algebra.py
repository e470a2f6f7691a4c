"""Task ``algebra``: its rows, what switching a family off and trying all programs add, what it refuses, how it is taken up again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runner.errors import ConfigError, UserError
from runner.kernels.fused.strategy import Fused
from runner.schema import RULE_FAMILIES
from runner.tasks import algebra

Run = Callable[..., dict[str, Any]]
SMALL = (
    "+exp=algebra", "task.graphs=[planted]", "task.datasets.planted.num_nodes=300", "task.datasets.planted.num_communities=8",
    "task.step_seconds=0", "task.num_steps=3", "task.num_warmup=1", "kernel.trial_seconds=0.02", "kernel.block_size=40",
    "kernel.num_trials=2", "task.peers=[]", "task.models=[gcn:2x8]",
)  # fmt: skip


def test_a_row_has_what_is_promised(run_experiment: Run) -> None:
    record = run_experiment(*SMALL, "task.models=[gcn:2x8,gat:2x4]", "task.peers=[pyg]")
    rows = record["rows"]
    told = [(row["model"], row["mode"]) for row in rows]
    assert told == [("gcn", "train"), ("gcn", "infer"), ("gat", "train"), ("gat", "infer")]
    for row in rows:
        assert set(row["step_ms"]) == {"baseline", "fused", "auto", "pyg"}
        medians = {name: entry["median"] for name, entry in row["step_ms"].items()}
        assert row["best_peer"] == min(("baseline", "pyg"), key=medians.__getitem__)
        assert row["speedup_vs_best_peer"] == pytest.approx(medians[row["best_peer"]] / medians["fused"])
        assert row["speedup_vs_dgl"] == pytest.approx(medians["baseline"] / medians["fused"])
        peaks = row["peak_memory_bytes"]
        assert row["peak_memory_ratio_vs_dgl"] == pytest.approx(peaks["fused"] / max(peaks["baseline"], 1))
        assert row["max_error"] == max(row["max_output_diff"], row["max_grad_diff"]) < 1e-4
        assert row["rules"]
        assert row["slowdown_without"] == {}
        assert row["regret"] is None
    summary = record["summary"]["train/all/speedup_vs_best_peer"]
    ratios = [row["speedup_vs_best_peer"] for row in rows if row["mode"] == "train"]
    assert (summary["worst"], summary["best"], summary["num_rows"]) == (min(ratios), max(ratios), 2)
    assert summary["geomean"] == pytest.approx((ratios[0] * ratios[1]) ** 0.5)


def test_each_family_is_switched_off_and_all_programs_are_timed(run_experiment: Run) -> None:
    record = run_experiment(*SMALL, "task.ablate=true", "task.exhaustive=true")
    for row in record["rows"]:
        assert set(row["slowdown_without"]) == set(RULE_FAMILIES)
        ours = row["step_ms"]["fused"]["median"]
        for family, slowdown in row["slowdown_without"].items():
            assert slowdown == pytest.approx(row["step_ms"][f"without {family}"]["median"] / ours)
        assert row["regret"]["num_programs"] > 1
        assert min(row["regret"]["of_cost_model"], row["regret"]["of_choice"]) >= 0
        assert row["best_peer"] == "baseline", "what is switched off is no peer"


def test_a_run_that_was_stopped_is_taken_up(
    run_experiment: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run_experiment(*SMALL, folder="first")
    monkeypatch.setattr(algebra, "measure_rows_of", lambda *_: pytest.fail("measured again"))
    second = run_experiment(*SMALL, f"task.resume={tmp_path / 'first'}", folder="second")
    assert second["rows"] == first["rows"]
    for other in ("kernel.without=[order]", "task.ablate=true", "model.dropout=0"):
        with pytest.raises(BaseException, match="measured again"):
            run_experiment(*SMALL, f"task.resume={tmp_path / 'first'}", other, folder="third")


def test_a_model_that_cannot_be_rewritten_is_named(run_experiment: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise UserError("gcn.py:7: can't be captured")

    monkeypatch.setattr(Fused, "prepare", refuse)
    with pytest.raises(UserError, match=r"gcn\.py:7: can't be captured"):
        run_experiment(*SMALL)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("kernel.without=[ordre]", "order"),
        ("task.models=[gcm:2x8]", "gcn"),
        ("task.graphs=[plantd]", "planted"),
        ("task.peers=[pygg]", "pyg"),
        ("device=cuda", "cpu"),
    ],
)
def test_mistakes_get_one_line(given: str, words: str, run_experiment: Run) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        run_experiment(*SMALL, given)
    assert "\n" not in str(caught.value)
