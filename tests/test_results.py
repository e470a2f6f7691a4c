"""The run folder and the sinks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import compose

from runner import results, tracking
from runner.results import RunFolder, fingerprint, mean_std, plain, read_metrics, read_result, spread, write_atomically


def folder(path: Path, *overrides: str) -> RunFolder:
    return RunFolder(path, compose(*overrides), choices={}, overrides=list(overrides))


def test_a_write_that_fails_leaves_the_file_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "a.json"
    write_atomically(target, b"first")

    def fail(_: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(target, b"second, half of it")
    assert target.read_bytes() == b"first"
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"], "no litter"


def test_json_has_no_nan() -> None:
    assert plain({"a": float("nan"), "b": [float("inf"), 1.5], "c": (1, "x"), "d": Path("x")}) == {
        "a": None,
        "b": [None, 1.5],
        "c": [1, "x"],
        "d": "x",
    }


def test_the_record_says_who_what_and_where(tmp_path: Path) -> None:
    run = folder(tmp_path, "model=gin")
    record = read_result(tmp_path)
    assert record["status"] == "running"
    assert record["schema_version"] == results.SCHEMA_VERSION
    assert record["config"]["model"]["name"] == "gin"
    environment = record["environment"]
    for key in ("python", "platform", "cpu", "num_cpus", "memory_bytes", "git"):
        assert environment[key] is not None
    assert {"torch", "dgl", "numpy", "gearsail"} <= set(environment["packages"])
    assert set(environment["git"]) == {"commit", "dirty"}
    run.finish("finished")
    assert read_result(tmp_path)["status"] == "finished"
    assert "gin" in (tmp_path / "config.yaml").read_text()


def test_a_killed_run_is_recognised(tmp_path: Path) -> None:
    code = (
        "import sys, time; sys.path[:0] = sys.argv[2:]\n"
        "from pathlib import Path; from test_results import folder\n"
        "folder(Path(sys.argv[1])); print('ready', flush=True); time.sleep(60)"
    )
    paths = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path), *paths], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "ready"
    assert read_result(tmp_path)["status"] == "running"
    process.kill()
    process.communicate()
    assert read_result(tmp_path)["status"] == "killed"


def test_a_cut_last_line_of_metrics_is_left_out(tmp_path: Path) -> None:
    run = folder(tmp_path)
    run.metrics({"epoch": 0, "loss": float("nan")})
    with (tmp_path / "metrics.jsonl").open("a") as stream:
        stream.write('{"epoch": 1, "lo')
    assert read_metrics(tmp_path) == [{"epoch": 0, "loss": None}]


def test_the_fingerprint_is_of_what_influences_the_result() -> None:
    base = fingerprint(compose(), "data")
    for same in (["name=other"], ["logger=wandb"], ["train.checkpoint_every=3"], ["kernel.explain=true"]):
        assert fingerprint(compose(*same), "data") == base, same
    for other in (["train.seed=1"], ["model.hidden=17"], ["kernel=density_adaptive"], ["train.lr=0.02"]):
        assert fingerprint(compose(*other), "data") != base, other
    assert fingerprint(compose(), "other data") != base


def test_statistics() -> None:
    assert spread([4.0, 1.0, 3.0, 2.0]) == {"median": 2.5, "q1": 1.75, "q3": 3.25, "n": 4}
    assert spread([])["n"] == 0
    assert mean_std([1.0, 3.0]) == (2.0, pytest.approx(2**0.5))
    assert mean_std([5.0]) == (5.0, 0.0)


class FakeRun:
    """Stands for a W&B run."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments, self.logged, self.summary, self.defined, self.exit_code = arguments, [], {}, {}, None
        FakeRun.last = self

    def log(self, values: dict[str, Any]) -> None:
        self.logged.append(values)

    def define_metric(self, name: str, step_metric: str) -> None:
        self.defined[name] = step_metric

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code

    last: Any = None


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> type[FakeRun]:
    import wandb

    monkeypatch.setattr(wandb, "init", lambda **arguments: FakeRun(**arguments))
    return FakeRun


def open_sink(tmp_path: Path, *overrides: str) -> tuple[tracking.Sinks, list[str]]:
    said: list[str] = []
    run = folder(tmp_path, "logger=wandb", *overrides)
    return tracking.open_sinks(compose("logger=wandb", *overrides), run, group="sweep-1", say=said.append), said


def test_wandb_gets_flat_config_groups_tags_and_headlines(tmp_path: Path, wandb: type[FakeRun]) -> None:
    sinks, _ = open_sink(tmp_path, "logger.project=p", "logger.tags=[a,b]", "model=gin")
    run = wandb.last
    assert run.arguments["mode"] == "offline"
    assert (run.arguments["project"], run.arguments["group"], run.arguments["job_type"], run.arguments["tags"]) == (
        "p",
        "sweep-1",
        "train",
        ["a", "b"],
    )
    assert run.arguments["config"]["model.name"] == "gin"
    assert not any(isinstance(value, dict) for value in run.arguments["config"].values())
    sinks.metrics({"strategy": "baseline", "repeat": 0, "epoch": 1, "loss": 0.5})
    sinks.metrics({"strategy": "baseline", "repeat": 2, "epoch": 1, "loss": 0.5})
    assert run.logged[0] == {"baseline/epoch": 1, "baseline/loss": 0.5}
    assert run.logged[1] == {"baseline/repeat2/epoch": 1, "baseline/repeat2/loss": 0.5}
    assert run.defined["baseline/loss"] == "baseline/epoch"
    sinks.metrics({"repeat": 0, "fold": 3, "epoch": 0, "loss": 1.0})
    assert run.logged.pop() == {"fold3/epoch": 0, "fold3/loss": 1.0}
    sinks.summary({"speedup": 2.0, "bad": float("nan")})
    sinks.table("strategies", ["a", "b"], [[1, "x"]])
    sinks.finish("finished")
    assert run.summary == {"speedup": 2.0, "bad": None, "status": "finished"}
    assert type(run.logged[2]["strategies"]).__name__ == "Table"
    assert run.exit_code == 0


def test_a_failed_job_is_shown_as_failed(tmp_path: Path, wandb: type[FakeRun]) -> None:
    sinks, _ = open_sink(tmp_path)
    sinks.finish("failed")
    assert wandb.last.exit_code == 1
    assert wandb.last.summary["status"] == "failed"


def test_online_without_a_login_goes_offline_and_says_so(
    tmp_path: Path, wandb: type[FakeRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    _, said = open_sink(tmp_path, "logger.mode=online")
    assert wandb.last.arguments["mode"] == "offline"
    assert any("no login found" in line for line in said)


def test_a_server_that_does_not_answer_costs_a_bounded_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    def init(**arguments: Any) -> FakeRun:
        if arguments["mode"] == "online":
            time.sleep(30)
        return FakeRun(**arguments)

    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setattr(wandb, "init", init)
    start = time.monotonic()
    _, said = open_sink(tmp_path, "logger.mode=online", "logger.timeout_s=1")
    assert time.monotonic() - start < 10
    assert FakeRun.last.arguments["mode"] == "offline"
    assert any("kept offline" in line for line in said)


def test_a_sink_that_fails_does_not_take_the_run_with_it(
    tmp_path: Path, wandb: type[FakeRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    sinks, said = open_sink(tmp_path)

    def fail(*_: Any) -> None:
        raise ConnectionError("gone")

    monkeypatch.setattr(wandb.last, "log", fail)
    sinks.metrics({"epoch": 0, "loss": 1.0})
    sinks.metrics({"epoch": 1, "loss": 1.0})
    assert sum("gone" in line for line in said) == 1
    assert len(read_metrics(tmp_path)) == 2


@pytest.mark.filterwarnings("ignore")
def test_a_real_offline_run_asks_nothing_and_leaves_a_file(tmp_path: Path) -> None:
    sinks, _ = open_sink(tmp_path)
    sinks.metrics({"epoch": 0, "loss": 1.0})
    sinks.finish("finished")
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


def test_result_json_is_strict_json(tmp_path: Path) -> None:
    run = folder(tmp_path)
    run.update(values=[float("nan"), float("-inf")])

    def refuse(word: str) -> None:
        raise AssertionError(word)

    assert json.loads((tmp_path / "result.json").read_text(), parse_constant=refuse)["values"] == [None, None]
