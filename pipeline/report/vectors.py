"""Norms and channel ranges of a column of vectors, head by head."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.report.counts import FloatArray, IntArray, LogCounts
from pipeline.schema import BoundColumn

# A vector is an outlier if its norm is so many times the median, or the median so many times it.
OUTLIER_FACTOR = 3.0
LARGEST_SHOWN = 3
CHANNELS_SHOWN = 5
BLOCK_VALUES = 2**20  # handled at a time in float64


class Largest(NamedTuple):
    """A vector with one of the largest norms: of token t of a row."""

    norm: float
    row: str
    t: int


class Channel(NamedTuple):
    """A channel with one of the largest ranges; ratio: its peak over the median channel's peak."""

    channel: int
    low: float
    high: float
    ratio: float


@dataclass(frozen=True, kw_only=True)
class VectorStats:
    """One head of one column (head None: the column has no heads).

    mean, std, smallest, largest: of the L2 norms, exact; median, p99 within 0.2 %.
    outliers: vectors whose norm is 3 times the median or more, or a third of it or less.
    low, high: float64 [D], the least and greatest value of each channel.
    channels: those with the largest absolute value. not_finite: vectors left out of all this.
    """

    column: str
    layer: str | None
    head: int | None
    count: int
    not_finite: int
    mean: float
    std: float
    smallest: float
    median: float
    p99: float
    largest: float
    outliers: int
    extremes: tuple[Largest, ...]
    low: FloatArray
    high: FloatArray
    channels: tuple[Channel, ...]


class VectorTotals:
    """Sums over a column of vectors [N, D] or [N, heads, D]."""

    def __init__(self, column: BoundColumn) -> None:
        self.column = column
        dim = column.inner_shape[-1]
        self.heads = column.inner_shape[0] if len(column.inner_shape) == 2 else 1
        self._norms = [_NormTotals() for _ in range(self.heads)]
        self._low = np.full((self.heads, dim), np.inf)
        self._high = np.full((self.heads, dim), -np.inf)

    def add(
        self, values: npt.NDArray[np.float32], rows: Sequence[str], row_of: IntArray, t: IntArray
    ) -> None:
        """values: float32 [N, …]; rows: ids; row_of, t: of each token its row and its index."""
        vectors = values.reshape(len(values), self.heads, -1)
        step = max(1, BLOCK_VALUES // max(1, vectors[0:1].size))
        for start in range(0, len(vectors), step):
            block = vectors[start : start + step]
            squares = np.einsum("nhd,nhd->nh", block, block, dtype=np.float64)
            for head, norms in enumerate(np.sqrt(squares).T):
                finite = np.isfinite(norms)
                self._norms[head].add(norms, finite, start, rows, row_of, t)
                kept = block[:, head] if finite.all() else block[finite, head]
                if len(kept):
                    np.minimum(self._low[head], kept.min(axis=0), out=self._low[head])
                    np.maximum(self._high[head], kept.max(axis=0), out=self._high[head])

    def finish(self) -> list[VectorStats]:
        return [
            VectorStats(
                column=self.column.name,
                layer=self.column.metadata.get("layer"),
                head=head if len(self.column.inner_shape) == 2 else None,
                low=self._low[head],
                high=self._high[head],
                channels=_widest(self._low[head], self._high[head]),
                **self._norms[head].finish(),
            )
            for head in range(self.heads)
            if self._norms[head].count
        ]


class _NormTotals:
    def __init__(self) -> None:
        self.count = self.not_finite = 0
        self.sum = self.sum_squares = 0.0
        self.smallest, self.largest = np.inf, 0.0
        self.logs = LogCounts()
        self.heap: list[Largest] = []

    def add(
        self,
        norms: FloatArray,
        finite: npt.NDArray[np.bool_],
        start: int,
        rows: Sequence[str],
        row_of: IntArray,
        t: IntArray,
    ) -> None:
        kept = norms[finite]
        self.not_finite += len(norms) - len(kept)
        if not len(kept):
            return
        self.count += len(kept)
        self.sum += float(kept.sum())
        self.sum_squares += float((kept**2).sum())
        self.smallest = min(self.smallest, float(kept.min()))
        self.largest = max(self.largest, float(kept.max()))
        self.logs.add(kept)
        ranked = np.where(finite, norms, -1.0)
        for at in np.argsort(-ranked, kind="stable")[:LARGEST_SHOWN].tolist():
            if finite[at]:
                token = start + at
                found = Largest(float(norms[at]), rows[row_of[token]], int(t[token]))
                heapq.heappush(self.heap, found)
        self.heap = heapq.nlargest(LARGEST_SHOWN, self.heap)
        heapq.heapify(self.heap)

    def finish(self) -> dict[str, Any]:
        mean = self.sum / self.count
        # The middle of a bin may lie beyond all that is in it.
        median, p99 = (
            min(max(self.logs.quantile(share), self.smallest), self.largest)
            for share in (0.5, 0.99)
        )
        return {
            "count": self.count,
            "not_finite": self.not_finite,
            "mean": mean,
            "std": max(0.0, self.sum_squares / self.count - mean**2) ** 0.5,
            "smallest": self.smallest,
            "median": median,
            "p99": p99,
            "largest": self.largest,
            "outliers": self.logs.outside(median / OUTLIER_FACTOR, median * OUTLIER_FACTOR),
            "extremes": tuple(sorted(self.heap, reverse=True)),
        }


def _widest(low: FloatArray, high: FloatArray) -> tuple[Channel, ...]:
    peak = np.maximum(np.abs(low), np.abs(high))
    middle = float(np.median(peak))
    return tuple(
        Channel(i, float(low[i]), float(high[i]), float(peak[i]) / middle if middle else 0.0)
        for i in np.argsort(-peak, kind="stable")[:CHANNELS_SHOWN].tolist()
    )
