"""``python -m runner`` and ``gearsail``: compose a config with Hydra, run it, exit with 0, 1 (failed) or 2 (a user's mistake)."""

from __future__ import annotations

import os
import secrets
import sys
import traceback
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from runner.composition import COMPOSE_ERRORS, config_folder, explain, register_schema, to_config
from runner.errors import UserError
from runner.schema import Config
from runner.validation import check_name


def main() -> None:
    """Run one experiment, or with ``-m`` one for each combination of the swept values."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra hands its errors on, so that they can be told in one line
    # torch's profiler, which measures memory, else prints its start and stop, and remarks on memory that it didn't see allocated
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    register_schema()
    OmegaConf.register_new_resolver("folder_name", check_name, replace=True)
    OmegaConf.register_new_resolver("run_id", lambda: secrets.token_hex(3), use_cache=True, replace=True)
    jobs = _Jobs()
    entry = hydra.main(version_base="1.3", config_path=str(config_folder()), config_name="config")(jobs.run)
    try:
        entry()
    except UserError as error:
        _exit(error, 2)
    except COMPOSE_ERRORS as error:
        _exit(explain(error), 2)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if jobs.num_started:
            raise
        _exit(explain(error), 2)  # Hydra has more ways to refuse an override than error types
    if jobs.exit_code:
        sys.exit(jobs.exit_code)


class _Jobs:
    """The jobs of one call. Each failure is told as it happens; the others of a sweep go on."""

    def __init__(self) -> None:
        top = Path.cwd() / "outputs"
        self.before = {top, *top.glob("*")} if top.exists() else set()
        self.num_started = 0
        self.exit_code = 0

    def run(self, composed: DictConfig) -> None:
        self.num_started += 1
        hydra_config = HydraConfig.get()
        is_sweep = hydra_config.mode == RunMode.MULTIRUN
        if is_sweep and not hydra_config.launcher._target_.endswith("BasicLauncher"):
            _job(composed, self.before)  # in a process of its own, where only an exception reaches the launcher
            return
        where = f" (job {hydra_config.job.num}: {hydra_config.job.override_dirname})" if is_sweep else ""
        try:
            _job(composed, self.before)
        except UserError as error:
            print(f"error: {error}{where}", file=sys.stderr)
            self.exit_code = max(self.exit_code, 2)
        except Exception:
            if not is_sweep:
                raise
            traceback.print_exc()
            print(f"error: the job failed{where}", file=sys.stderr)
            self.exit_code = max(self.exit_code, 1)


def _job(composed: DictConfig, before: set[Path]) -> None:
    hydra_config = HydraConfig.get()
    folder = Path(hydra_config.runtime.output_dir)
    sweep = Path(hydra_config.sweep.dir).name if hydra_config.mode == RunMode.MULTIRUN else None
    overrides = list(hydra_config.overrides.task)
    choices = {
        str(group): str(choice) for group, choice in hydra_config.runtime.choices.items() if "hydra" not in str(group)
    }
    try:
        config = to_config(composed)
    except UserError as error:
        if sweep is None:
            _remove_empty(folder, before)
        else:
            _record_refused(composed, folder, error, overrides=overrides, choices=choices, sweep=sweep)
        raise
    from runner import experiment  # not at the top: torch and DGL take seconds, `--cfg job` and `--help` need neither

    experiment.run(config, folder, overrides=overrides, choices=choices, sweep=sweep)


def _record_refused(
    composed: DictConfig, folder: Path, error: UserError, *, overrides: list[str], choices: dict[str, str], sweep: str
) -> None:
    """Leave a failed run for a job of a sweep whose config was refused, so that the sweep's folder and W&B tell of all its jobs."""
    from runner.results import FAILED, RunFolder
    from runner.tracking import open_sinks

    try:
        config = OmegaConf.to_object(composed)
    except COMPOSE_ERRORS:
        config = Config()  # not even the types fit: the record has what was typed, and why it was refused
    if not isinstance(config, Config) or config.logger.mode not in ("offline", "online", "disabled"):
        config = Config()
    record = RunFolder(folder, config, choices=choices, overrides=overrides)
    record.finish(FAILED, str(error))
    open_sinks(config, record, group=sweep, say=print).finish(FAILED)


def _remove_empty(folder: Path, before: set[Path]) -> None:
    """Take back the folders below ``outputs/`` that Hydra made before the config could be checked, and nothing else."""
    top = Path.cwd() / "outputs"
    for path in (folder, *folder.parents):
        if not path.is_relative_to(top) or path in before or path.is_symlink():
            return
        try:
            path.rmdir()
        except OSError:
            return  # not empty


def _exit(error: UserError, code: int) -> None:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
