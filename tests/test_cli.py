"""The command line as a user meets it: folders, sweeps, kills, resume, the wheel, the doctor, the floors."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from conftest import ROOT

from runner.results import read_metrics, read_result

Cli = Callable[..., CompletedProcess[str]]
FILES = {"result.json", "metrics.jsonl", "config.yaml", "run.log", "model.pt", "checkpoint.pt"}
SMALL = ("dataset.num_nodes=200", "dataset.num_communities=5", "dataset.num_features=8", "train.epochs=3")


def runs(path: Path) -> list[Path]:
    return sorted(found.parent for found in path.rglob("result.json"))


def start(tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-m", "runner", *arguments], cwd=tmp_path, env=variables, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)


def test_one_run_leaves_one_whole_folder(cli: Cli, tmp_path: Path) -> None:
    done = cli(*SMALL, "model=gin")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    (folder,) = runs(tmp_path)
    assert folder.relative_to(tmp_path).parts[:2] == ("outputs", "train")
    assert {path.name for path in folder.iterdir()} == {
        "result.json",
        "metrics.jsonl",
        "config.yaml",
        "run.log",
        "model.pt",
    } | ({"checkpoint.pt"})
    assert len(folder.name) < 30
    record = read_result(folder)
    assert (record["status"], record["overrides"][-1], record["choices"]["model"]) == ("finished", "model=gin", "gin")
    assert "\x1b" not in done.stdout, "plain lines when not a terminal"
    assert re.search(r"seed 0: 3/3 .*/s", done.stdout)


def test_runs_that_start_together_have_folders_of_their_own(tmp_path: Path) -> None:
    processes = [start(tmp_path, *SMALL, "train.epochs=1") for _ in range(3)]
    assert [process.wait(120) for process in processes] == [0, 0, 0]
    for process in processes:
        assert process.stdout is not None
        process.stdout.close()
    assert len(runs(tmp_path)) == 3


def test_a_sweep_runs_all_and_goes_on_after_a_failure(cli: Cli, tmp_path: Path) -> None:
    done = cli("-m", *SMALL, "model=gcn,gin", "train.resume=null,/nowhere", "logger=wandb")
    assert done.returncode == 2
    told = [line for line in done.stderr.splitlines() if "no checkpoint.pt there" in line]
    assert len(told) == 2, "each failure, as it happens"
    assert "model=gin" in told[1]
    assert "Traceback" not in done.stderr
    found = [read_result(folder)["status"] for folder in runs(tmp_path)]
    assert sorted(found) == ["failed", "failed", "finished", "finished"]
    assert len(list(tmp_path.rglob("offline-run-*/*.wandb"))) == 4, "one W&B run a job"
    assert len({folder.parent for folder in runs(tmp_path)}) == 1


def test_kill_and_resume_gives_the_same_curve(cli: Cli, tmp_path: Path) -> None:
    options = (
        "dataset.num_nodes=400",
        "train.epochs=4000",
        "train.checkpoint_every=10",
        "train.schedule=cosine",
        "train.repeats=1",
    )
    process = start(tmp_path, *options)
    wait_for(lambda: bool(list(tmp_path.rglob("checkpoint.pt"))))
    process.kill()
    process.communicate()
    (killed,) = runs(tmp_path)
    assert read_result(killed)["status"] == "killed"
    reached = len(read_metrics(killed))
    assert 10 <= reached < 4000
    # Going on to the end would take long: a shorter schedule is another experiment, and refused.
    refused = cli(*options, "train.epochs=30", f"train.resume={killed}")
    assert refused.returncode == 2
    assert "made with train.epochs=4000, now it is 30" in refused.stderr
    resumed = start(tmp_path, *options, f"train.resume={killed}")
    wait_for(lambda: any(folder != killed and len(read_metrics(folder)) > reached + 20 for folder in runs(tmp_path)))
    resumed.send_signal(signal.SIGTERM)
    resumed.communicate()
    (second,) = [folder for folder in runs(tmp_path) if folder != killed and read_result(folder)["status"] != "failed"]
    assert read_result(second)["status"] == "interrupted"
    whole = start(tmp_path, *options, "name=whole")
    wait_for(
        lambda: (
            bool(runs(tmp_path / "outputs" / "whole"))
            and len(read_metrics(runs(tmp_path / "outputs" / "whole")[0])) > reached + 20
        )
    )
    whole.kill()
    whole.communicate()
    straight = read_metrics(runs(tmp_path / "outputs" / "whole")[0])
    curve = read_metrics(second)
    for mine, other in zip(curve[: reached + 20], straight, strict=False):
        for key in ("epoch", "loss", "lr", "val_loss", "val_metric"):
            assert mine[key] == other[key]


def test_wheel_has_conf_inside_and_runs_anywhere(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    built = subprocess.run(
        [sys.executable, "-c", f"import os, hatchling.build as b; os.chdir({str(ROOT)!r}); print(b.build_wheel({str(tmp_path)!r}))"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    wheel = tmp_path / built.stdout.strip().splitlines()[-1]
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        assert "runner/conf/config.yaml" in names
        assert "runner/conf/exp/adaptgear.yaml" in names
        assert not [name for name in names if name.startswith(("conf/", "tests/"))]
        assert (
            "gearsail = runner.__main__:main"
            in archive.read(next(name for name in names if name.endswith("entry_points.txt"))).decode()
        )
        archive.extractall(tmp_path / "site")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    variables = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "OMP_NUM_THREADS": "1"}
    code = "import runner.__main__ as m; assert 'site' in m.__file__, m.__file__; m.main()"
    command = [sys.executable, "-P", "-c", code, "+exp=adaptgear", *SMALL, "train.repeats=1", "task.num_steps=3"]
    done = subprocess.run(command, cwd=elsewhere, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert runs(elsewhere / "outputs" / "adaptgear")


def test_doctor_says_what_is_there_and_what_is_missing(cli: Cli) -> None:
    done = cli(module="runner.doctor")
    assert done.returncode == 0, done.stdout
    for word in ("Python", "torch", "DGL", "C++ compiler", "CPU", "GPU", "CuPy", "W&B", "OpenMP"):
        assert word in done.stdout
    for line in done.stdout.splitlines():
        cells = [cell.strip() for cell in line.strip("│").split("│")]
        if len(cells) == 4 and cells[1] == "missing":
            assert cells[3], f"{cells[0]}: missing, and no word on how to get it"


def test_the_floors_hold() -> None:
    linter = Path(sys.executable).parent / "lint-imports"
    if not linter.exists():
        pytest.skip("import-linter is not installed")
    done = subprocess.run([str(linter)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_nothing_heavy_is_imported_for_help() -> None:
    code = "import sys, runner.__main__; print([name for name in ('torch', 'dgl', 'wandb', 'pandas') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_exp_and_group_file_says_what_it_is() -> None:
    for path in (ROOT / "conf" / "exp").glob("*.yaml"):
        lines = path.read_text().splitlines()
        assert lines[0] == "# @package _global_", path
        assert lines[1].startswith("# "), path


def test_results_are_strict_json(cli: Cli, tmp_path: Path) -> None:
    assert cli(*SMALL, "train.select=last", "dataset.val_fraction=0").returncode == 0

    def refuse(word: str) -> None:
        raise AssertionError(word)

    (folder,) = runs(tmp_path)
    json.loads((folder / "result.json").read_text(), parse_constant=refuse)
