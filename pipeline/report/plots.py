"""Which charts a report has, from its statistics. `Scale` keeps two runs comparable."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from pipeline.report import svg
from pipeline.report.collect import Statistics
from pipeline.report.counts import FloatArray, IntCounts, PositionMeans
from pipeline.report.shares import DEPTHS
from pipeline.report.svg import Series, Span, Tick
from pipeline.report.vectors import VectorStats

HISTOGRAM_BINS = 24
CHANNEL_BUCKETS = 256  # a chart is 300 units wide: more channels share a bucket
ENTROPY, TOP1, TOPK = range(3)  # the quantities of PositionMeans


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Where the axes end that all runs of a page share."""

    longest: int
    last_offset: int
    entropy: float
    drafted: float

    @classmethod
    def of(cls, runs: Sequence[Statistics]) -> "Scale":
        means = [
            means[ENTROPY]
            for run in runs
            for by in (run.in_answer, run.in_row)
            for _, _, _, means in by.rows()
        ]
        return cls(
            longest=max(run.lengths.largest for run in runs),
            last_offset=max(run.offsets.largest for run in runs),
            entropy=max([m for m in means if np.isfinite(m)], default=1.0),
            drafted=max(max(_drafted(run)) for run in runs),
        )


def lengths(found: Statistics, scale: Scale) -> Markup:
    return _histogram("Tokens of a row", found.lengths, scale.longest, "tokens of a row")


def offsets(found: Statistics, scale: Scale) -> Markup:
    return _histogram("Position offsets", found.offsets, scale.last_offset, "position offset")


def context(found: Statistics, context_length: int) -> Markup:
    """The part of the trained context that positions reach."""
    last = found.last_positions.largest + 1
    return svg.range_bar(found.offsets.smallest / context_length, last / context_length)


def _histogram(title: str, counts: IntCounts, largest: int, x_name: str) -> Markup:
    width = max(1, int(np.ceil(svg.nice_step(max(largest, 1) / HISTOGRAM_BINS))))
    bins = largest // width + 1
    values = counts.histogram(width, bins)
    every = max(1, -(-bins // 4))
    ticks = [Tick(i, svg.number(i * width)) for i in range(0, bins + 1, every)]
    top = float(values.max())
    return svg.bar_chart(title, values.tolist(), x_name=x_name, ticks=ticks, top=top)


def entropy(found: Statistics, scale: Scale, *, in_answer: bool) -> Markup:
    where = "answer" if in_answer else "row"
    means = found.in_answer if in_answer else found.in_row
    points = _points(means, ENTROPY)
    return svg.line_chart(
        f"Teacher entropy by position in the {where}",
        [Series("entropy", points, "a")],
        x_name=f"token of the {where}",
        ticks=_position_ticks(means),
        top=scale.entropy,
    )


def masses(found: Statistics, *, in_answer: bool) -> Markup:
    where = "answer" if in_answer else "row"
    means = found.in_answer if in_answer else found.in_row
    return svg.line_chart(
        f"Top-1 and top-k mass by position in the {where}",
        [
            Series("top-k", _points(means, TOPK), "b"),
            Series("top-1", _points(means, TOP1), "a"),
        ],
        x_name=f"token of the {where}",
        ticks=_position_ticks(means),
        top=1.0,
        y_text="{:.0%}".format,
    )


def _points(means: PositionMeans, quantity: int) -> list[tuple[float, float]]:
    return [(first.bit_length(), m[quantity]) for first, _, _, m in means.rows()]


def _position_ticks(means: PositionMeans) -> list[Tick]:
    firsts = [first for first, *_ in means.rows()]
    every = max(1, -(-len(firsts) // 6))
    return [Tick(first.bit_length(), f"{first:,}") for first in firsts[::every]]


def acceptance(found: Statistics) -> Markup:
    values = [value or 0.0 for value in found.total.acceptance]
    return svg.bar_chart(
        "Upper bound on acceptance by depth",
        values,
        x_name="depth k",
        ticks=[Tick(k - 0.5, str(k)) for k in range(1, DEPTHS + 1)],
        top=1.0,
        y_text="{:.0%}".format,
        value_text=lambda value: f"{value:.0%}",
    )


def _drafted(found: Statistics) -> list[float]:
    """Tokens a step at most, with 1 to DEPTHS drafts."""
    return [found.total.expected_length(depth) or 0.0 for depth in range(1, DEPTHS + 1)]


def drafted(found: Statistics, scale: Scale) -> Markup:
    return svg.bar_chart(
        "Tokens a step by number of drafts",
        _drafted(found),
        x_name="drafts",
        ticks=[Tick(k - 0.5, str(k)) for k in range(1, DEPTHS + 1)],
        top=scale.drafted,
        value_text="{:.2f}".format,
    )


def norms(vectors: Sequence[VectorStats]) -> Markup:
    spans = [
        Span(vector_name(v), v.smallest, v.median, max(v.median, v.p99), v.largest) for v in vectors
    ]
    return svg.span_chart("Norms", spans, x_name="L2 norm")


def channels(vector: VectorStats, peak: float) -> Markup:
    low = _buckets(vector.low, np.minimum)
    high = _buckets(vector.high, np.maximum)
    title = f"Channel ranges of {vector_name(vector)}"
    return svg.band_chart(title, low, high, channels=len(vector.low), peak=peak)


def _buckets(values: FloatArray, reduce: np.ufunc) -> list[float]:
    count = min(len(values), CHANNEL_BUCKETS)
    starts = np.arange(count) * len(values) // count
    found: list[float] = reduce.reduceat(values, starts).tolist()
    return found


def vector_name(vector: VectorStats) -> str:
    return vector.column if vector.head is None else f"{vector.column}[{vector.head}]"
