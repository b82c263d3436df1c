"""What a running job tells its user: a live line on a terminal, plain lines elsewhere."""

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pipeline.manifest import Commit

PLAIN_EVERY = 5.0  # seconds between plain lines


class RunProgress:
    """Counts what each stage commits; rows, tokens/s, time left and rejects at a glance."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[detail]}"),
            TimeElapsedColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def say(self, line: str) -> None:
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def stage(self, name: str, *, unit: str, total: int, done: int) -> None:
        """Begin a stage of `total` units, of which an earlier run finished `done`."""
        self._name, self._unit, self._total, self._done = name, unit, total, done
        self._already = done
        self._rows = self._tokens = self._rejects = 0
        self._started = self._last_line = time.monotonic()
        self._task = self._bar.add_task(f"{name} ({unit})", total=total, completed=done, detail="")
        if done:
            self.say(f"{name}: {done} of {total} {unit} are there already")

    def commit(self, commit: Commit) -> None:
        self._done += 1
        self._rows += commit.rows
        self._tokens += commit.tokens
        self._rejects += len(commit.rejects)
        detail = self._detail()
        self._bar.update(self._task, completed=self._done, detail=detail)
        now = time.monotonic()
        last = self._done == self._total
        if not self.console.is_terminal and (last or now - self._last_line >= PLAIN_EVERY):
            self._last_line = now
            self.say(f"{self._name}: {self._done}/{self._total} {self._unit}, {detail}")

    def _detail(self) -> str:
        elapsed = max(1e-9, time.monotonic() - self._started)
        left = elapsed / (self._done - self._already) * (self._total - self._done)
        return (
            f"{self._rows:,} rows, {self._tokens / elapsed:,.0f} tokens/s, "
            f"{_duration(left)} left, {self._rejects} rejected"
        )


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
