"""The result record and the run folder that holds it.

A run folder has ``result.json`` (schema below), ``metrics.jsonl`` (one JSON object a line), ``config.yaml`` (as resolved), ``run.log``,
and what the task adds. Whole files are written beside their place and renamed, so that a reader never sees half of one.

``result.json``: ``schema_version``, ``name``, ``task``, ``status``, ``error``, ``fingerprint``, ``config``, ``choices``, ``overrides``,
``environment``, ``process``, ``started_at``, ``seconds``, and the task's own keys.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import yaml

from runner.schema import Config

SCHEMA_VERSION = 1
RUNNING, FINISHED, FAILED, INTERRUPTED, KILLED = "running", "finished", "failed", "interrupted", "killed"
_PACKAGES = (
    "gearsail",
    "torch",
    "dgl",
    "numpy",
    "scipy",
    "pymetis",
    "hydra-core",
    "omegaconf",
    "wandb",
    "cupy-cuda12x",
    "cupy-cuda13x",
)
# What says where results go or how a run is watched, but not what comes out of it.
_WITHOUT_INFLUENCE = (
    "name",
    "logger.",
    "train.resume",
    "train.checkpoint_every",
    "kernel.explain",
    "dataset.root",
    "dataset.path",
    "dataset.download",
)


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file that appears whole or not at all, even if the process ends in the middle."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(name, 0o666 & ~_umask())  # noqa: PTH101 (a temporary file is made for its owner alone)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def plain(value: Any) -> Any:
    """Return nested data as JSON has it: NaN and infinities as null, tuples as lists, records as objects."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain(dataclasses.asdict(value))
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | set):
        return [plain(entry) for entry in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)


def flat_config(config: Config) -> dict[str, Any]:
    """Return the config with dotted names: ``{"model.hidden": 16, …}``."""
    return _flatten(dataclasses.asdict(config), "")


def _flatten(nested: dict[str, Any], prefix: str) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in nested.items():
        flat |= _flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def fingerprint(config: Config, data_hash: str) -> str:
    """Return a hash of what influences a run's result: the options that matter, the data, the code's version."""
    relevant = {name: value for name, value in flat_config(config).items() if not name.startswith(_WITHOUT_INFLUENCE)}
    version, commit = code_version()
    text = json.dumps(
        plain({"config": relevant, "data": data_hash, "version": version, "code": commit}),
        sort_keys=True,
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def code_version() -> tuple[str | None, str | None]:
    """Return the version of the package and the commit of the checkout, each None where there is none."""
    return _version("gearsail"), _git()["commit"]


def environment() -> dict[str, Any]:
    """Describe the machine and the software: versions, CPU, memory, git commit; torch's part is added by who uses torch."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": platform.node(),
        "cpu": cpu_name(),
        "num_cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
        "git": _git(),
    }


def cpu_name() -> str:
    """Return the processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git() -> dict[str, Any]:
    """Commit of the checkout that runs, and whether its files differ from it; nulls for an installed wheel."""
    root = Path(__file__).parent.parent
    if not (root / ".git").exists():
        return {"commit": None, "dirty": None}
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()
        changed = subprocess.run(
            ["git", "status", "--porcelain"], cwd=root, capture_output=True, text=True, check=True, timeout=10
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "dirty": None}
    return {"commit": commit, "dirty": bool(changed.strip())}


class RunFolder:
    """Writes one run's files."""

    def __init__(self, path: Path, config: Config, *, choices: dict[str, str], overrides: list[str]) -> None:
        self.path = path
        self._start = time.monotonic()
        process = psutil.Process()
        self._record: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "name": config.name,
            "task": config.task.name,
            "status": RUNNING,
            "error": None,
            "fingerprint": None,
            "config": dataclasses.asdict(config),
            "choices": choices,
            "overrides": overrides,
            "environment": environment(),
            "process": {"pid": process.pid, "created": process.create_time()},
            "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": None,
        }
        write_atomically(path / "config.yaml", yaml.safe_dump(plain(config), sort_keys=False).encode())
        self._write()

    @property
    def record(self) -> dict[str, Any]:
        """The record so far."""
        return self._record

    def update(self, **entries: Any) -> None:
        """Add to the record and write it."""
        self._record |= entries
        self._write()

    def metrics(self, entry: dict[str, Any]) -> None:
        """Append a line to ``metrics.jsonl``; one write call, so that a kill can only cut the last line."""
        with (self.path / "metrics.jsonl").open("a") as stream:
            stream.write(json.dumps(plain(entry)) + "\n")

    def finish(self, status: str, error: str | None = None) -> None:
        """Close the record."""
        self.update(status=status, error=error, seconds=round(time.monotonic() - self._start, 3))

    def _write(self) -> None:
        write_atomically(self.path / "result.json", (json.dumps(plain(self._record), indent=2) + "\n").encode())


def read_result(path: Path) -> dict[str, Any]:
    """Return a run folder's record; a run that still says running but whose process is gone has status ``killed``."""
    record: dict[str, Any] = json.loads((path / "result.json").read_text())
    if (
        record["status"] == RUNNING
        and record["environment"]["host"] == platform.node()
        and not _is_alive(record["process"])
    ):
        record["status"] = KILLED
    return record


def _is_alive(process: dict[str, Any]) -> bool:
    try:
        found = psutil.Process(process["pid"])
        return abs(found.create_time() - process["created"]) < 1 and found.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of ``metrics.jsonl``; a last line that a kill cut short is left out."""
    file = path / "metrics.jsonl"
    if not file.is_file():
        return []
    lines = file.read_text().splitlines()
    entries = []
    for number, line in enumerate(lines):
        try:
            entries.append(json.loads(line))
        except json.JSONDecodeError:
            if number != len(lines) - 1:
                raise
    return entries


def spread(samples: list[float]) -> dict[str, float | int]:
    """Return median, quartiles and number of samples; NaN for none."""
    if not samples:
        return {"median": math.nan, "q1": math.nan, "q3": math.nan, "n": 0}
    q1, median, q3 = np.percentile(samples, [25, 50, 75])
    return {"median": float(median), "q1": float(q1), "q3": float(q3), "n": len(samples)}


def mean_std(samples: list[float]) -> tuple[float, float]:
    """Return mean and sample standard deviation (0 for one sample, NaN for none)."""
    if not samples:
        return math.nan, math.nan
    return float(np.mean(samples)), float(np.std(samples, ddof=1)) if len(samples) > 1 else 0.0
