"""Sinks: where a run's metrics, tables and summary go. The only module that imports wandb."""

from __future__ import annotations

import netrc
import os
import threading
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Protocol

from runner.results import FINISHED, RunFolder, flat_config, plain
from runner.schema import Config

Say = Callable[[str], None]


class Sink(Protocol):
    """A place for results."""

    def metrics(self, entry: dict[str, Any]) -> None:
        """Take one record of a curve."""
        ...

    def table(self, name: str, columns: list[str], rows: list[list[Any]]) -> None:
        """Take a table."""
        ...

    def image(self, name: str, path: Path) -> None:
        """Take a picture that lies in the run folder."""
        ...

    def summary(self, entries: dict[str, Any]) -> None:
        """Take the headline numbers."""
        ...

    def finish(self, status: str) -> None:
        """Close; ``status`` is one of ``runner.results``."""
        ...


class FileSink:
    """The run folder. Tables, summaries and pictures are there already, so only curves are written here."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder

    def metrics(self, entry: dict[str, Any]) -> None:
        self._folder.metrics(entry)

    def table(self, name: str, columns: list[str], rows: list[list[Any]]) -> None:
        pass

    def image(self, name: str, path: Path) -> None:
        pass

    def summary(self, entries: dict[str, Any]) -> None:
        pass

    def finish(self, status: str) -> None:
        pass


class WandbSink:
    """One W&B run. It never asks for a login and never costs more than a bounded wait: past that, it goes offline or lets go."""

    def __init__(self, config: Config, folder: Path, *, group: str | None, say: Say) -> None:
        self._say, self._timeout_s = say, config.logger.timeout_s
        self._keys: set[str] = set()
        self._run = self._start(config, folder, group)

    def _start(self, config: Config, folder: Path, group: str | None) -> Any:
        logger = config.logger
        mode = logger.mode
        if mode == "online" and not has_login():
            self._say("wandb: no login found (WANDB_API_KEY or `wandb login`); the run is kept offline")
            mode = "offline"
        arguments = {
            "project": logger.project,
            "entity": logger.entity,
            "group": logger.group or group or config.name,
            "job_type": logger.job_type or config.task.name,
            "tags": logger.tags,
            "name": f"{group}-{folder.name}" if group else folder.name,
            "dir": str(folder),
            "config": plain(flat_config(config)),
        }
        if mode == "online":
            run = self._within(
                lambda: self._init(arguments, "online"), "could not be reached, so the run is kept offline"
            )
            if run is not None:
                return run
        return self._init(arguments, "disabled" if mode == "disabled" else "offline")

    def _init(self, arguments: dict[str, Any], mode: Literal["online", "offline", "disabled"]) -> Any:
        wandb = _import_wandb()
        settings = wandb.Settings(
            silent=True,
            console="off",
            init_timeout=self._timeout_s,
            login_timeout=self._timeout_s,
            disable_git=True,
            save_code=False,
        )
        return wandb.init(mode=mode, settings=settings, reinit="create_new", **arguments)

    def _within(self, work: Callable[[], Any], failure: str) -> Any:
        """Run something that may wait for the server; None where it fails or takes longer than the timeout."""
        done: list[Any] = []
        errors: list[BaseException] = []

        def guarded() -> None:
            try:
                done.append(work())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=guarded, daemon=True)
        thread.start()
        thread.join(self._timeout_s + 2)
        if done:
            return done[0]
        reason = " ".join(str(errors[0]).split())[:120] if errors else f"no answer in {self._timeout_s:g} s"
        self._say(f"wandb: the server {failure} ({reason})")
        return None

    def metrics(self, entry: dict[str, Any]) -> None:
        """Log a record under ``STRATEGY/METRIC``, or ``METRIC``; each curve has its own epochs as x-axis."""
        prefix = f"{entry['strategy']}/" if "strategy" in entry else ""
        prefix += f"repeat{entry['repeat']}/" if entry.get("repeat") else ""
        prefix += f"fold{entry['fold']}/" if "fold" in entry else ""
        values = {
            f"{prefix}{key}": value
            for key, value in entry.items()
            if isinstance(value, int | float) and key not in ("repeat", "fold")
        }
        if f"{prefix}epoch" in values and f"{prefix}epoch" not in self._keys:
            self._keys.add(f"{prefix}epoch")
            for key in values:
                if not key.endswith("/epoch") and key != "epoch":
                    self._run.define_metric(key, step_metric=f"{prefix}epoch")
        self._run.log(values)

    def table(self, name: str, columns: list[str], rows: list[list[Any]]) -> None:
        wandb = _import_wandb()
        self._run.log({name: wandb.Table(columns=list(columns), data=plain(rows))})

    def image(self, name: str, path: Path) -> None:
        self._run.log({name: _import_wandb().Image(str(path))})

    def summary(self, entries: dict[str, Any]) -> None:
        self._run.summary.update(plain(entries))

    def finish(self, status: str) -> None:
        def close() -> bool:
            self._run.finish(exit_code=0 if status == FINISHED else 1)
            return True

        self._run.summary["status"] = status
        self._within(close, "did not take the rest of the run, `wandb sync` sends it later")


class Sinks:
    """All sinks of a run. A sink that fails is dropped with a word about it; the run and its files go on."""

    def __init__(self, sinks: list[Sink], say: Say) -> None:
        self._sinks, self._say = sinks, say

    def metrics(self, entry: dict[str, Any]) -> None:
        self._each(lambda sink: sink.metrics(entry))

    def table(self, name: str, columns: list[str], rows: list[list[Any]]) -> None:
        self._each(lambda sink: sink.table(name, columns, rows))

    def image(self, name: str, path: Path) -> None:
        self._each(lambda sink: sink.image(name, path))

    def summary(self, entries: dict[str, Any]) -> None:
        self._each(lambda sink: sink.summary(entries))

    def finish(self, status: str) -> None:
        self._each(lambda sink: sink.finish(status))

    def _each(self, act: Callable[[Sink], None]) -> None:
        for sink in list(self._sinks):
            try:
                act(sink)
            except Exception as error:
                if isinstance(sink, FileSink):
                    raise
                self._sinks.remove(sink)
                self._say(
                    f"wandb: {type(error).__name__}: {' '.join(str(error).split())[:160]}; it is left out from here on"
                )


def open_sinks(config: Config, folder: RunFolder, *, group: str | None, say: Say) -> Sinks:
    """Open the sinks that the config names; files always."""
    sinks: list[Sink] = [FileSink(folder)]
    if config.logger.name == "wandb":
        try:
            sinks.append(WandbSink(config, folder.path, group=group, say=say))
        except Exception as error:
            say(
                f"wandb: could not start ({type(error).__name__}: {' '.join(str(error).split())[:160]}); results are in files only"
            )
    return Sinks(sinks, say)


def _import_wandb() -> Any:
    """Import wandb without its own error reporting, which would wait for a server that doesn't answer, offline runs included."""
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    return wandb


def has_login() -> bool:
    """Whether a W&B key is at hand (environment or netrc), without asking for one and without a network."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    wandb = _import_wandb()
    hosts = {urllib.parse.urlparse(wandb.Settings().base_url).hostname, "api.wandb.ai"}
    try:
        known = netrc.netrc(os.environ.get("NETRC")).hosts
        return any(host in known for host in hosts)
    except (OSError, netrc.NetrcParseError):
        return False
