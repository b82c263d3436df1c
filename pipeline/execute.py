"""Carry a run out, from settings to finished folder; where workers run is the caller's business.

jobs/extract_mtp.py brings Ray actors; `LocalWorker` is this process.
"""

import errno
import functools
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Protocol

import torch
from rich.console import Console

from pipeline.config_file import settings_text
from pipeline.endpoint import EndpointExecutor
from pipeline.errors import PipelineError, StorageError, no_space
from pipeline.forecast import Probe, forecast, probe_rows
from pipeline.manifest import Commit, RunFolder
from pipeline.progress import RunProgress
from pipeline.run import Run, start
from pipeline.settings import OF_THE_CALL, Settings
from pipeline.storage import open_storage
from pipeline.summary import describe
from pipeline.task_queue import Failure, TaskQueue
from pipeline.tasks import Task
from pipeline.units import size_text
from pipeline.worker import Worker

CARD_SHARE = 0.05  # of the time may go into rewriting the card; it grows with every shard
# Features compress to about 0.68 of their logical bytes (DESIGN §4), and the integers of small
# models to less; what does not hold this much surely will not do.
LEAST_COMPRESSED = 0.3


class Executor(Protocol):
    """Takes tasks and yields each one's record as it is committed, in any order."""

    def __call__(self, tasks: list[Task]) -> Iterator[Commit]: ...


class Workers(Executor, Protocol):
    """An executor with loaded target models; size: how many."""

    @property
    def size(self) -> int: ...

    def probe(self, rows: list[dict[str, Any]]) -> Probe:
        """See `Worker.probe`."""
        ...


Stage = Literal["rollouts", "features"]


def execute(
    settings: Settings,
    make_workers: Callable[[Run], Workers],
    progress: RunProgress | None = None,
    *,
    stages: Sequence[Stage] = ("rollouts", "features"),
) -> dict[str, Any]:
    """The whole run, or one stage of it; returns the manifest. Quiet without `progress`.

    Raises PipelineError, and IncompleteError where the disk is full.
    """
    try:
        progress = progress or RunProgress(Console(quiet=True))
        return _execute(settings, make_workers, progress, stages)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise no_space(settings.out) from error


def dry_run(
    settings: Settings, make_workers: Callable[[Run], Workers], progress: RunProgress
) -> dict[str, Any]:
    """Plan in a scratch folder, try a few rows, and return the forecast; OUT stays untouched."""
    free = open_storage(settings.out).free_bytes()
    with tempfile.TemporaryDirectory(prefix="dry-run-") as scratch:
        folder = RunFolder(scratch)
        inner = settings.model_copy(update={"out": scratch})
        run = start(inner, folder=folder, say=progress.say)
        progress.say(describe(run))
        workers = make_workers(run)
        probe = workers.probe(probe_rows(run))
        return forecast(run, probe, workers=workers.size, free=free)


def _execute(
    settings: Settings,
    make_workers: Callable[[Run], Workers],
    progress: RunProgress,
    stages: Sequence[Stage],
) -> dict[str, Any]:
    folder = RunFolder(settings.out)
    folder.create()
    with folder.locked():
        run = start(settings, folder=folder, say=progress.say)
        progress.say(describe(run))
        run.write_manifest(complete=False)
        folder.write_text("run.yaml", settings_text(settings, without=OF_THE_CALL))

        @functools.cache  # not before there is something to do, and once
        def workers() -> Workers:
            return make_workers(run)

        _roll_out(run, workers, progress, stages)
        if "features" not in stages:
            return run.write_manifest(complete=False)
        shards = run.shard_tasks()
        _check_space(run, shards)
        card = _Card(run)
        for commit in _stage(run, workers, shards, "shard", progress):
            card.update()
            progress.commit(commit)
        folder.sweep(run.commits.values())
        run.write_card()
        return run.write_manifest(complete=True)


def _roll_out(
    run: Run,
    workers: Callable[[], Workers],
    progress: RunProgress,
    stages: Sequence[Stage],
) -> None:
    def executor() -> Executor:
        if "rollouts" not in stages:
            raise PipelineError(f"--out {run.folder.url}: not all rollouts are there yet")
        return EndpointExecutor(run.spec) if run.settings.rollout_endpoint else workers()

    for commit in _stage(run, executor, run.rollout_tasks(), "rollout", progress):
        progress.commit(commit)


def _stage(
    run: Run,
    executor: Callable[[], Executor],
    tasks: Sequence[Task],
    kind: str,
    progress: RunProgress,
) -> Iterator[Commit]:
    """Do what is not done of a stage, taking up each record as it comes."""
    left = run.undone(tasks, kind)
    name, unit = ("rollouts", "parts") if kind == "rollout" else ("features", "shards")
    progress.stage(name, unit=unit, total=len(tasks), done=len(tasks) - len(left))
    if left:
        workers = executor()
        progress.watch(lambda: getattr(workers, "size", 1), run.folder.storage.free_bytes)
        for commit in workers(left):
            run.commits[commit.name] = commit
            yield commit


def _check_space(run: Run, tasks: Sequence[Task]) -> None:
    """Raise IncompleteError where what is left of the features surely does not fit on the disk."""
    free = run.folder.storage.free_bytes()
    if free is None:
        return
    tokens = sum(c.tokens for c in run.of_kind("rollout"))
    rows = sum(task.rows for task in tasks) or 1
    share = sum(task.rows for task in tasks if task.name not in run.commits) / rows
    needed = tokens * share * run.spec.layout.bytes_per_token * LEAST_COMPRESSED
    if needed > free:
        raise StorageError(
            f"--out {run.folder.url}: no space left for the features still to be extracted: they "
            f"take at least {size_text(needed)} and {size_text(free)} are free; the rollouts are "
            "kept, and the same command goes on from them once there is space"
        )


class _Card:
    """Keeps the dataset card up to date at a bounded share of the time."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._next = 0.0

    def update(self) -> None:
        started = time.monotonic()
        if started >= self._next:
            self._run.write_card()
            now = time.monotonic()
            self._next = now + (now - started) / CARD_SHARE


class LocalWorker:
    """Workers of one: this process."""

    size = 1

    def __init__(self, run: Run) -> None:
        on_gpu = run.settings.device != "cpu" and torch.cuda.is_available()
        self._worker = Worker(run.spec, "cuda:0" if on_gpu else "cpu")

    def __call__(self, tasks: list[Task]) -> Iterator[Commit]:
        queue = TaskQueue(tasks, lambda line: print(line, file=sys.stderr))
        while not queue.done:
            unit = queue.next()
            try:
                commit = self._worker.execute(unit)
            except PipelineError:
                raise
            except Exception as error:  # a row that the target model's code cannot do
                queue.failed(unit, Failure("raised", f"{type(error).__name__}: {error}"))
                continue
            queue.finished(unit)
            if commit is not None:
                yield commit
        queue.check()

    def probe(self, rows: list[dict[str, Any]]) -> Probe:
        return self._worker.probe(rows)
