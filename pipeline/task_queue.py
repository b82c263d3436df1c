"""Which unit of work goes next, and what a failure means. Knows nothing of where units run.

A task that fails is tried again; one that keeps failing is searched, half by half, for the rows
that make it fail, which become rejects so that the rest of the task is kept. A worker that is
taken away (preempted, its node gone) is nobody's fault and counts as nothing.
"""

import dataclasses
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from typing import Literal, NamedTuple

from pipeline.errors import IncompleteError
from pipeline.tasks import RowFault, Task, Trial, Unit

MAX_DEATHS = 3  # process deaths of one task before its rows are searched
MAX_ERRORS = 2  # exceptions of one task before that
# Where single rows fail one after the other and nothing succeeds, it is not the rows: a broken
# GPU must not reject a dataset.
MAX_FAILED_ALONE = 4  # trials of single rows in one search before any trial succeeds
MAX_FAULTY_ROWS = 100  # of a whole stage


class Failure(NamedTuple):
    """What happened to a unit.

    kind: died (its process), raised (an exception), lost (the worker was taken away)
    """

    kind: Literal["died", "raised", "lost"]
    detail: str


# Yields rows to try, is sent what happened, and returns the rows that fail.
Search = Generator[range, Failure | None, dict[int, RowFault]]

_REASONS = {"died": "kills_worker", "raised": "raises_error"}
QUARANTINE_REASONS = frozenset(_REASONS.values())


def find_faults(rows: range, *, known_to_fail: bool = False) -> Search:
    """Find the rows that fail on their own, by halves.

    A single row must fail twice: one death alone may be chance.
    """
    if not known_to_fail:
        failure = yield rows
        if failure is None:
            return {}
        if len(rows) == 1:
            failure = yield rows
            if failure is None:
                return {}
            return {rows.start: RowFault(_REASONS[failure.kind], failure.detail)}
    if len(rows) == 1:
        return (yield from find_faults(rows))
    middle = rows.start + len(rows) // 2
    left = yield from find_faults(range(rows.start, middle))
    right = yield from find_faults(range(middle, rows.stop))
    return {**left, **right}


class TaskQueue:
    """Hands out units until every task is finished or given up."""

    def __init__(self, tasks: Sequence[Task], say: Callable[[str], None]) -> None:
        """say: told of every failure, in a line."""
        self._waiting: deque[Unit] = deque(tasks)
        self._unfinished = len(tasks)
        self._say = say
        self._failures: Counter[tuple[str, str]] = Counter()
        self._searches: dict[str, Search] = {}
        self._failed_alone: Counter[str] = Counter()
        self._succeeded: set[str] = set()  # tasks in whose search some trial did
        self._faulty_rows = 0
        self.given_up: dict[str, str] = {}  # task name -> why

    @property
    def done(self) -> bool:
        return self._unfinished == 0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def next(self) -> Unit:
        return self._waiting.popleft()

    def finished(self, unit: Unit) -> None:
        """A unit did what it should."""
        if isinstance(unit, Trial):
            self._succeeded.add(unit.task.name)
            self._go_on(unit.task, None)
        else:
            self._unfinished -= 1

    def failed(self, unit: Unit, failure: Failure) -> None:
        self._say(f"{unit.name}: {failure.detail}")
        if failure.kind == "lost":
            self._waiting.appendleft(unit)
        elif isinstance(unit, Trial):
            name = unit.task.name
            self._failed_alone[name] += len(unit.rows) == 1
            if name not in self._succeeded and self._failed_alone[name] == MAX_FAILED_ALONE:
                self._give_up(unit.task, f"each row tried fails alone: {failure.detail}")
            else:
                self._go_on(unit.task, failure)
        else:
            self._count(dataclasses.replace(unit, attempt=unit.attempt + 1), failure)

    def check(self) -> None:
        """Raises IncompleteError if a task was given up."""
        if self.given_up:
            lines = [f"  {name}: {why}" for name, why in sorted(self.given_up.items())]
            raise IncompleteError(
                "tasks kept failing and no row of theirs is to blame; what is committed stays, and "
                "the same command goes on from there\n" + "\n".join(lines)
            )

    def _count(self, task: Task, failure: Failure) -> None:
        key = (task.name, failure.kind)
        self._failures[key] += 1
        if self._failures[key] < (MAX_DEATHS if failure.kind == "died" else MAX_ERRORS):
            self._waiting.appendleft(task)
            return
        self._say(f"{task.name}: searching its {task.rows} rows for what makes it fail")
        search = find_faults(range(task.rows), known_to_fail=True)
        self._searches[task.name] = search
        self._waiting.appendleft(Trial(task=task, rows=next(search)))

    def _go_on(self, task: Task, failure: Failure | None) -> None:
        """The next trial of a task's search, or its end."""
        try:
            rows = self._searches[task.name].send(failure)
        except StopIteration as end:
            self._end_search(task, end.value)
        else:
            self._waiting.appendleft(Trial(task=task, rows=rows))

    def _end_search(self, task: Task, faults: dict[int, RowFault]) -> None:
        if not faults:
            self._give_up(task, "fails, but none of its rows does so alone")
            return
        self._faulty_rows += len(faults)
        if self._faulty_rows > MAX_FAULTY_ROWS:
            self._give_up(task, f"more than {MAX_FAULTY_ROWS} rows of the run fail alone")
            return
        del self._searches[task.name]
        self._say(f"{task.name}: rejecting {len(faults)} of its rows, keeping the rest")
        for kind in _REASONS:
            del self._failures[task.name, kind]
        self._waiting.appendleft(dataclasses.replace(task, faults={**task.faults, **faults}))

    def _give_up(self, task: Task, why: str) -> None:
        del self._searches[task.name]
        self.given_up[task.name] = why
        self._unfinished -= 1
        self._say(f"{task.name}: given up ({why})")
