"""Sums over a stream of values, in memory that does not grow with the rows."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

# Lengths and positions above this are counted as this: contexts end long before, and a hostile
# file must not make the table of counts as long as it likes.
LARGEST_INT = 2**24
# Bins of a quantity of unknown scale: 256 an octave, so a quantile is right within 0.2 %.
BINS_PER_OCTAVE = 256
LOWEST_LOG2, HIGHEST_LOG2 = -32, 32
# Powers of two up to LARGEST_INT: positions 0, 1, 2-3, 4-7, …
POSITION_BINS = 26


class IntCounts:
    """How often each non-negative integer came; quantiles are exact."""

    def __init__(self) -> None:
        self.counts: IntArray = np.zeros(1, dtype=np.int64)

    def add(self, values: IntArray) -> None:
        found = np.bincount(np.clip(values, 0, LARGEST_INT))
        size = max(len(found), len(self.counts))
        self.counts = np.pad(self.counts, (0, size - len(self.counts)))
        self.counts[: len(found)] += found

    @property
    def total(self) -> int:
        return int(self.counts.sum())

    @property
    def smallest(self) -> int:
        return int(np.flatnonzero(self.counts)[0])

    @property
    def largest(self) -> int:
        return int(np.flatnonzero(self.counts)[-1])

    def quantile(self, share: float) -> int:
        """The smallest value that at least `share` of the values do not exceed."""
        return int(np.searchsorted(np.cumsum(self.counts), share * self.total))

    def histogram(self, width: int, bins: int) -> IntArray:
        """Counts in [0, width), [width, 2 width), …; larger values fall into the last bin."""
        values = np.flatnonzero(self.counts)
        at = np.minimum(values // width, bins - 1)
        return np.bincount(at, weights=self.counts[values], minlength=bins).astype(np.int64)


class LogCounts:
    """Counts of positive numbers of any scale, in bins of a 256th of an octave."""

    def __init__(self) -> None:
        bins = (HIGHEST_LOG2 - LOWEST_LOG2) * BINS_PER_OCTAVE
        self.counts: IntArray = np.zeros(bins, dtype=np.int64)

    def add(self, values: FloatArray) -> None:
        """values: finite and not negative; what is out of range counts in the outermost bins."""
        with np.errstate(divide="ignore"):
            logs = np.log2(values) - LOWEST_LOG2
        at = np.clip(np.floor(logs * BINS_PER_OCTAVE), 0, len(self.counts) - 1).astype(np.int64)
        self.counts += np.bincount(at, minlength=len(self.counts))

    def quantile(self, share: float) -> float:
        """The middle of the bin that holds the quantile."""
        at = int(np.searchsorted(np.cumsum(self.counts), share * self.counts.sum()))
        return float(self._middle(np.array(at)))

    def outside(self, low: float, high: float) -> int:
        """How many values lie in bins whose middle is not in [low, high]."""
        middles = self._middle(np.arange(len(self.counts)))
        return int(self.counts[(middles < low) | (middles > high)].sum())

    @staticmethod
    def _middle(at: npt.NDArray[Any]) -> FloatArray:
        middle: FloatArray = np.exp2((at + 0.5) / BINS_PER_OCTAVE + LOWEST_LOG2)
        return middle


class PositionMeans:
    """Means of some quantities by position; bins 0, 1, 2-3, 4-7, …"""

    def __init__(self, quantities: int) -> None:
        self.counts: IntArray = np.zeros(POSITION_BINS, dtype=np.int64)
        self.sums: FloatArray = np.zeros((quantities, POSITION_BINS))

    def add(self, positions: IntArray, *values: FloatArray) -> None:
        bins = position_bin(positions)
        self.counts += np.bincount(bins, minlength=POSITION_BINS)
        for sums, value in zip(self.sums, values, strict=True):
            sums += np.bincount(bins, weights=value, minlength=POSITION_BINS)

    def rows(self) -> Iterator[tuple[int, int, int, list[float]]]:
        """(first position, last position, count, means) of each bin that is not empty."""
        for i in np.flatnonzero(self.counts).tolist():
            first, last = (0, 0) if i == 0 else (2 ** (i - 1), 2**i - 1)
            count = int(self.counts[i])
            yield first, last, count, (self.sums[:, i] / count).tolist()


def position_bin(positions: IntArray) -> IntArray:
    """The number of bits of each position: 0 -> 0, 1 -> 1, 2 and 3 -> 2, …"""
    bits = np.frexp(np.clip(positions, 0, LARGEST_INT).astype(np.float64))[1]
    return bits.astype(np.int64)
