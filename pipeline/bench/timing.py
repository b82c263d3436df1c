"""Interleaved repeats and their medians, so that a busy machine disturbs all ways alike."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple


class Line(NamedTuple):
    """One line of the table: `ours` and `theirs` in `unit`; ratio ours / theirs; bar to reach."""

    what: str
    ours: float
    theirs: float
    unit: str
    bar: str = ""

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs


def medians(
    ways: Mapping[str, Callable[[], object]],
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Seconds of each way by `clock`, run in turn after one warm-up each."""
    took: dict[str, list[float]] = {name: [] for name in ways}
    for round_ in range(repeats + 1):
        for name, run in ways.items():
            started = clock()
            run()
            if round_:
                took[name].append(clock() - started)
    return {name: statistics.median(times) for name, times in took.items()}
