"""What a running job tells its user: a live line on a terminal, plain lines elsewhere, or JSON."""

import json
import sys
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pipeline.manifest import Commit
from pipeline.summary import print_summary, reject_excess
from pipeline.units import size_text

PLAIN_EVERY = 5.0  # seconds between plain lines
FREE_EVERY = 5.0  # seconds between looks at the disk


class RunProgress:
    """Counts what each stage commits; rows, tokens/s, time left, rejects, workers and disk left.

    quiet: say nothing. log_json: JSON lines on stderr, one object an event, and nothing else there.
    """

    def __init__(
        self, console: Console | None = None, *, quiet: bool = False, log_json: bool = False
    ) -> None:
        self.quiet, self.log_json = quiet, log_json
        self.console = console or Console(stderr=True, quiet=quiet or log_json)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[detail]}"),
            TimeElapsedColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._workers: Callable[[], int] = lambda: 0
        self._free_bytes: Callable[[], int | None] = lambda: None
        self._free: int | None = None
        self._looked = float("-inf")

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

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)
        self._event("message", text=text)

    def watch(self, workers: Callable[[], int], free_bytes: Callable[[], int | None]) -> None:
        """Where to ask for the number of workers and for the space left at OUT."""
        self._workers, self._free_bytes = workers, free_bytes

    def stage(self, name: str, *, unit: str, total: int, done: int) -> None:
        """Begin a stage of `total` units, of which an earlier run finished `done`."""
        self._name, self._unit, self._total, self._done = name, unit, total, done
        self._already = done
        self._rows = self._tokens = self._rejects = 0
        self._started = self._last_line = time.monotonic()
        self._task = self._bar.add_task(f"{name} ({unit})", total=total, completed=done, detail="")
        self._event("stage", stage=name, unit=unit, done=done, total=total)
        if done:
            self.say(f"{name}: {done} of {total} {unit} are there already")

    def commit(self, commit: Commit) -> None:
        self._done += 1
        self._rows += commit.rows
        self._tokens += commit.tokens
        self._rejects += len(commit.rejects)
        figures = self._figures()
        detail = _detail(figures)
        self._bar.update(self._task, completed=self._done, detail=detail)
        self._event(
            "progress",
            stage=self._name,
            committed=commit.name,
            done=self._done,
            total=self._total,
            **figures,
        )
        now = time.monotonic()
        last = self._done == self._total
        if not self.console.is_terminal and (last or now - self._last_line >= PLAIN_EVERY):
            self._last_line = now
            self.say_plain(f"{self._name}: {self._done}/{self._total} {self._unit}, {detail}")

    def say_plain(self, line: str) -> None:
        """A line that the JSON says already."""
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def summary(self, manifest: Mapping[str, Any], out: str, *, max_reject_fraction: float) -> int:
        """Tell what a finished run came to, on stdout; returns the exit code."""
        if not self.quiet:
            print_summary(manifest, out)
        fields = ("rows_in", "rows_out", "rejected", "tokens", "complete", "summary")
        self._event("summary", out=out, **{name: manifest[name] for name in fields})
        excess = reject_excess(manifest, max_reject_fraction)
        if excess is None:
            return 0
        if self.log_json:
            self._event("error", exit_code=1, text=excess)
        else:
            print(excess, file=sys.stderr)
        return 1

    def _figures(self) -> dict[str, Any]:
        """Of this stage and this run; seconds_left: at the speed so far."""
        now = time.monotonic()
        elapsed = max(1e-9, now - self._started)
        if now - self._looked >= FREE_EVERY:
            self._looked, self._free = now, self._free_bytes()
        return {
            "rows": self._rows,
            "tokens": self._tokens,
            "tokens_per_second": round(self._tokens / elapsed, 1),
            "seconds_left": round(
                elapsed / (self._done - self._already) * (self._total - self._done), 1
            ),
            "rejected": self._rejects,
            "workers": self._workers(),
            "free_bytes": self._free,
        }

    def _event(self, event: str, **fields: Any) -> None:
        if self.log_json:
            line = json.dumps({"time": time.time(), "event": event, **fields})
            print(line, file=sys.stderr, flush=True)


def _detail(figures: Mapping[str, Any]) -> str:
    words = [
        f"{figures['rows']:,} rows",
        f"{figures['tokens_per_second']:,.0f} tokens/s",
        f"{_duration(figures['seconds_left'])} left",
        f"{figures['rejected']} rejected",
    ]
    if figures["workers"]:
        words.append(f"{figures['workers']} worker{'s' if figures['workers'] > 1 else ''}")
    if figures["free_bytes"] is not None:
        words.append(f"{size_text(figures['free_bytes'])} disk left")
    return ", ".join(words)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
