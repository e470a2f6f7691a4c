"""Progress with rate and remaining time: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from runner.units import format_seconds

_LINE_EVERY_S = 10.0


class Bar:
    """A context manager that counts steps: ``with Bar(console, "seed 0", 200) as bar: bar.step("loss 0.3")``."""

    def __init__(self, console: Console, title: str, total: int, done: int = 0) -> None:
        self._console, self._title, self._total = console, title, total
        self._done = self._done_before = done
        self._start = self._last_line = time.monotonic()
        self._progress: Progress | None = None
        if console.is_terminal:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(30),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]}"),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
                console=console,
                transient=True,
            )
            self._bar = self._progress.add_task(title, total=total, completed=done, rate="", note="")

    def __enter__(self) -> Bar:
        if self._progress:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress:
            self._progress.stop()

    def step(self, note: str = "") -> None:
        """Count one step; a plain line follows every ten seconds and at the end."""
        self._done += 1
        now = time.monotonic()
        rate = (self._done - self._done_before) / max(now - self._start, 1e-9)
        if self._progress:
            self._progress.update(self._bar, completed=self._done, rate=f"{rate:.3g}/s", note=note)
        elif now - self._last_line >= _LINE_EVERY_S or self._done == self._total:
            self._last_line = now
            left = format_seconds((self._total - self._done) / rate) if self._done < self._total else "0 s"
            self._console.print(
                f"{self._title}: {self._done}/{self._total}  {rate:.3g}/s  {left} left  {note}".rstrip(),
                highlight=False,
            )
