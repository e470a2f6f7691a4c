"""Fixtures shared by all tests: one thread, a place for real data, graphs small and weird, and ways to run an experiment."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

for name in ("WANDB_MODE", "WANDB_API_KEY", "GEARSAIL_MODEL_PACKAGES"):
    os.environ.pop(name, None)  # a developer's own setting must not leak into what is tested
ROOT = Path(__file__).parent.parent
DATA = Path(os.environ.get("GEARSAIL_TEST_DATA", ROOT.parent / "shared" / "data"))


def pytest_configure(config: pytest.Config) -> None:
    import torch

    from runner.gnn.dgl_compat import import_dgl

    torch.set_num_threads(1)  # tests run in two processes on two cores
    import_dgl()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if "gpu" in report.keywords]
    if skipped:
        terminalreporter.write_line(f"{len(skipped)} GPU tests skipped: no CUDA device")


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The folder of real graphs; tests that need it are skipped where it is missing."""
    if not DATA.is_dir():
        pytest.skip(f"no real data at {DATA} (set GEARSAIL_TEST_DATA)")
    return DATA


@pytest.fixture(scope="session")
def graphs_root(data_root: Path) -> Path:
    return data_root / "graphs"


def compose(*overrides: str) -> Any:
    """Compose and validate a config in this process, as the command line would."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from omegaconf import OmegaConf

    from runner.composition import config_folder, register_schema, to_config

    register_schema()
    OmegaConf.register_new_resolver("run_id", lambda: "test", replace=True)
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        return to_config(hydra_compose("config", list(overrides)))


@pytest.fixture
def run_experiment(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Run an experiment in this process: ``run_experiment("model=gin", "train.epochs=3", folder="a")`` -> its record."""
    from runner import experiment

    def run(*overrides: str, folder: str = "run", **changes: Any) -> dict[str, Any]:
        config = dataclasses.replace(compose(*overrides), **changes)
        return experiment.run(config, tmp_path / folder, overrides=list(overrides), choices={})

    return run


@pytest.fixture
def cli(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run ``python -m runner`` in a fresh folder."""

    def run(*arguments: str, module: str = "runner", **environment: str) -> subprocess.CompletedProcess[str]:
        variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
        command = [sys.executable, "-m", module, *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=200, check=False
        )

    return run
