"""The composition root: a validated config becomes a run folder, sinks and a task, and whatever happens is recorded."""

from __future__ import annotations

import io
import logging
import os
import signal
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from runner.errors import UserError
from runner.results import FAILED, FINISHED, INTERRUPTED, RunFolder
from runner.schema import Config
from runner.tasks import adaptgear_table, algebra, benchmark, kernels, train
from runner.tasks.context import Context
from runner.tracking import Sinks, open_sinks
from runner.validation import unused

TASKS: dict[str, Callable[[Context], dict[str, Any]]] = {
    "train": train.run,
    "benchmark": benchmark.run,
    "kernels": kernels.run,
    "adaptgear_table": adaptgear_table.run,
    "algebra": algebra.run,
}
_PLAIN_WIDTH = 170  # columns of a table that goes to a file or a pipe


def run(
    config: Config,
    folder: Path,
    *,
    overrides: list[str],
    choices: dict[str, str],
    sweep: str | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Run one experiment and return its record.

    Args:
        config: validated.
        folder: made if missing; holds everything that the run leaves.
        overrides: what was typed, for the record.
        choices: the chosen file of each config group, for the record.
        sweep: groups the runs of a sweep in W&B.
        console: where it prints; default: standard output.

    Raises:
        UserError: for a user's mistake; recorded as a failed run first. Other exceptions likewise.
    """
    console = console or _console()
    log = _open_log(folder)
    record = RunFolder(folder, config, choices=choices, overrides=overrides)

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
        log.info(line)

    def show(table: Table) -> None:
        console.print(table)
        page = Console(file=io.StringIO(), width=_PLAIN_WIDTH)
        page.print(table)
        log.info("\n" + page.file.getvalue().rstrip())  # type: ignore[attr-defined]

    say(f"run folder: {_short(folder)}")
    for note in unused(config):
        say(f"note: {note}")
    with _recorded(record, log) as sinks, _threads(config.cluster.num_threads), _quiet_libraries(), _stop_on_sigterm():
        record.record["environment"] |= torch_environment()
        sinks.append(open_sinks(config, record, group=sweep, say=say))
        record.update(**TASKS[config.task.name](Context(config, record, sinks[0], console, say, show)))
    say(f"finished; results in {_short(folder)}")
    _close_log(log)
    return record.record


@contextmanager
def _recorded(record: RunFolder, log: logging.Logger) -> Iterator[list[Sinks]]:
    """Put on record how a run ends, in its folder, its log and the sinks that it adds to the list."""
    sinks: list[Sinks] = []
    status, error = FAILED, None
    try:
        yield sinks
        status = FINISHED
    except KeyboardInterrupt:
        status, error = INTERRUPTED, "interrupted"
        raise
    except UserError as mistake:
        error = str(mistake)
        raise
    except Exception as failure:
        error = f"{type(failure).__name__}: {failure}"
        log.error(traceback.format_exc())
        raise
    finally:
        record.finish(status, error)
        for opened in sinks:
            opened.finish(status)
        log.info(f"{status}{f': {error}' if error else ''}")
        if status != FINISHED:
            _close_log(log)


@contextmanager
def _threads(num_threads: int | None) -> Iterator[None]:
    """Run with so many CPU threads; the next job of a sweep has its own."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def torch_environment() -> dict[str, Any]:
    """Describe what torch runs on."""
    gpus = (
        [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        if torch.cuda.is_available()
        else []
    )
    return {
        "num_threads": torch.get_num_threads(),
        "gpus": gpus,
        "cuda": torch.version.cuda,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=_PLAIN_WIDTH)


def _short(folder: Path) -> str:
    return os.path.relpath(folder) if folder.is_relative_to(Path.cwd()) else str(folder)


def _open_log(folder: Path) -> logging.Logger:
    folder.mkdir(parents=True, exist_ok=True)
    log = logging.getLogger(f"runner.{folder}")
    log.propagate = False
    log.setLevel(logging.INFO)
    handler = logging.FileHandler(folder / "run.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    log.addHandler(handler)
    return log


def _close_log(log: logging.Logger) -> None:
    for handler in list(log.handlers):
        handler.close()
        log.removeHandler(handler)


@contextmanager
def _quiet_libraries() -> Iterator[None]:
    """Silence what DGL and torch say about each other's versions on every run; everything else passes."""
    with warnings.catch_warnings():
        for module in ("dgl", "torch", "torchdata"):
            warnings.filterwarnings("ignore", category=DeprecationWarning, module=module)
            warnings.filterwarnings("ignore", category=FutureWarning, module=module)
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
        yield


@contextmanager
def _stop_on_sigterm() -> Iterator[None]:
    """Let a SIGTERM (a scheduler's way to end a job) be recorded like Ctrl-C."""

    def stop(_: int, __: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
