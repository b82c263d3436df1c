"""What a failure means: retries, the search for rows that fail alone, giving up."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import IncompleteError
from pipeline.task_queue import MAX_DEATHS, MAX_ERRORS, MAX_FAULTY_ROWS, Failure, TaskQueue
from pipeline.tasks import RolloutTask, Task, Trial, Unit

Outcome = Callable[[Unit], Failure | None]


def task(index: int, rows: int = 32) -> RolloutTask:
    return RolloutTask(index=index, rows=rows, inputs_sha256="0" * 64)


def units_of(unit: Unit) -> set[int]:
    """The rows a unit does."""
    rows = unit.rows if isinstance(unit, Trial) else range(unit.rows)
    faults = unit.task.faults if isinstance(unit, Trial) else unit.faults
    return set(rows) - set(faults)


def run(tasks: list[Task], outcome: Outcome) -> tuple[dict[str, Task], list[Unit], TaskQueue]:
    """Drive a queue to its end; returns finished tasks by name, every unit tried, the queue."""
    queue = TaskQueue(tasks, lambda line: None)
    finished: dict[str, Task] = {}
    tried: list[Unit] = []
    while not queue.done:
        unit = queue.next()
        tried.append(unit)
        failure = outcome(unit)
        if failure is not None:
            queue.failed(unit, failure)
            continue
        queue.finished(unit)
        if not isinstance(unit, Trial):
            assert unit.name not in finished
            finished[unit.name] = unit
    return finished, tried, queue


def poisoned(rows: set[int], kind: str = "died", name: str = "rollout-00000") -> Outcome:
    def outcome(unit: Unit) -> Failure | None:
        task_name = unit.task.name if isinstance(unit, Trial) else unit.name
        hit = task_name == name and units_of(unit) & rows
        return Failure(kind, "boom") if hit else None  # type: ignore[arg-type]

    return outcome


@pytest.mark.parametrize(
    ("kind", "reason", "tries"),
    [("died", "kills_worker", MAX_DEATHS), ("raised", "raises_error", MAX_ERRORS)],
)
def test_a_poison_row_is_found_and_the_rest_of_its_task_kept(
    kind: str, reason: str, tries: int
) -> None:
    finished, tried, queue = run([task(0), task(1)], poisoned({17}, kind))
    assert {i: fault.reason for i, fault in finished["rollout-00000"].faults.items()} == {
        17: reason
    }
    assert finished["rollout-00001"].faults == {}
    assert finished["rollout-00000"].attempt == tries + 1
    whole = [u for u in tried if not isinstance(u, Trial) and u.name == "rollout-00000"]
    assert len(whole) == tries + 1
    # Halving: two trials a level at most, and the row alone twice.
    assert len([u for u in tried if isinstance(u, Trial)]) <= 2 * 5 + 1
    assert not queue.given_up


@given(
    st.integers(1, 70).flatmap(
        lambda rows: st.tuples(st.just(rows), st.sets(st.integers(0, rows - 1), max_size=6))
    )
)
def test_any_set_of_poison_rows_is_found_exactly(case: tuple[int, set[int]]) -> None:
    rows, poison = case
    finished, _, queue = run([task(0, rows)], poisoned(poison))
    if "rollout-00000" in queue.given_up:
        # Only where the first rows tried all fail and nothing was seen to work.
        assert {0, 1} <= poison or rows <= 2
    else:
        assert set(finished["rollout-00000"].faults) == poison


def test_a_worker_taken_away_counts_as_nothing() -> None:
    losses = iter([Failure("lost", "preempted")] * 50)
    finished, tried, _ = run([task(0)], lambda unit: next(losses, None))
    assert len(tried) == 51 and not any(isinstance(unit, Trial) for unit in tried)
    assert finished["rollout-00000"].attempt == 1


def test_one_death_during_a_search_blames_no_row() -> None:
    """Row 5 kills; and once, by chance, the worker dies on row 20 alone."""
    chance = iter([Failure("died", "chance")])

    def outcome(unit: Unit) -> Failure | None:
        rows = units_of(unit)
        if isinstance(unit, Trial) and rows == {20}:
            return next(chance, None)
        # A search reaches 20 alone only if its neighbours seem to fail as well.
        return Failure("died", "boom") if 5 in rows or rows == {20, 21} else None

    finished, _, _ = run([task(0)], outcome)
    assert set(finished["rollout-00000"].faults) == {5}


def test_a_fault_of_all_rows_rejects_none_and_leaves_other_tasks_alone() -> None:
    finished, tried, queue = run([task(0), task(1)], poisoned(set(range(32))))
    assert list(finished) == ["rollout-00001"]
    assert "each row tried fails alone" in queue.given_up["rollout-00000"]
    assert len(tried) < 20
    with pytest.raises(IncompleteError, match=r"rollout-00000: each row tried fails alone: boom"):
        queue.check()


def test_a_task_that_fails_only_as_a_whole_is_given_up() -> None:
    def outcome(unit: Unit) -> Failure | None:
        return None if isinstance(unit, Trial) else Failure("died", "out of memory")

    _, _, queue = run([task(0)], outcome)
    assert queue.given_up == {"rollout-00000": "fails, but none of its rows does so alone"}


def test_faults_all_over_the_run_are_no_longer_put_down_to_rows() -> None:
    """One row in each task fails: a hundred such are believed, not more."""
    tasks: list[Task] = [task(i, rows=4) for i in range(MAX_FAULTY_ROWS + 1)]

    def outcome(unit: Unit) -> Failure | None:
        return Failure("raised", "cuda error") if 3 in units_of(unit) else None

    finished, _, queue = run(tasks, outcome)
    assert len(finished) == MAX_FAULTY_ROWS
    assert len(queue.given_up) == 1
