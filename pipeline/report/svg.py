"""Charts as inline SVG. Colours, line widths and fonts are the page's, by class; no script.

Every chart is WIDTH units wide, the width of a phone, so that its text stays readable there.
"""

import html
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from markupsafe import Markup

WIDTH, HEIGHT = 360, 190
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 14, 36

Text = Callable[[float], str]


class Series(NamedTuple):
    """A line: (x, y) points; css: class of its colour."""

    name: str
    points: Sequence[tuple[float, float]]
    css: str


class Tick(NamedTuple):
    at: float
    text: str


class Span(NamedTuple):
    """A row of a range chart: a thin line low to high, a thick one from middle to upper."""

    name: str
    low: float
    middle: float
    upper: float
    high: float


def number(value: float) -> str:
    """A number for an axis: 0.25, 1.5k, 3M."""
    size = abs(value)
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}"


def nice_ticks(top: float, count: int = 4) -> list[float]:
    """Round values from 0 up to `top` or a little above, about `count` of them."""
    if not (math.isfinite(top) and top > 0):
        return [0.0, 1.0]
    step = nice_step(top / count)
    return [i * step for i in range(math.ceil(top / step - 1e-9) + 1)]


def nice_step(rough: float) -> float:
    """The next of 1, 2, 2.5 and 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * (1 - 1e-9))


def nice_top(peak: float) -> float:
    """A round value a little above `peak`."""
    if not (math.isfinite(peak) and peak > 0):
        return 1.0
    power = 10.0 ** math.floor(math.log10(peak))
    return next(m * power for m in (1, 1.5, 2, 3, 4, 5, 6, 8, 10) if m * power >= peak)


class _Frame:
    """The axes of a chart; x and y map values to units."""

    def __init__(
        self, *, x: tuple[float, float], ticks: Sequence[Tick], y: Sequence[float], y_text: Text
    ) -> None:
        self._x, self._y = x, (y[0], y[-1])
        self.parts: list[str] = []
        for value in y:
            at = self.y(value)
            self.line(LEFT, at, WIDTH - RIGHT, at, "axis" if value == 0 else "grid")
            self.text(LEFT - 6, at + 3.5, y_text(value), "end")
        for tick in ticks:
            self.text(self.x(tick.at), HEIGHT - BOTTOM + 14, tick.text, "middle")

    def x(self, value: float) -> float:
        low, high = self._x
        return LEFT + (value - low) / ((high - low) or 1) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        low, high = self._y
        share = min(1.0, max(0.0, (value - low) / ((high - low) or 1)))
        return HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP)

    def line(self, x1: float, y1: float, x2: float, y2: float, css: str) -> None:
        self.parts.append(
            f'<line class="{css}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'
        )

    def text(self, x: float, y: float, text: str, anchor: str, css: str = "label") -> None:
        self.parts.append(_text(x, y, text, anchor, css))

    def finish(self, title: str, x_name: str) -> Markup:
        self.text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 4, x_name, "middle", "name")
        return svg(title, self.parts)


def _text(x: float, y: float, text: str, anchor: str, css: str) -> str:
    return (
        f'<text class="{css}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">'
        f"{html.escape(text)}</text>"
    )


def svg(title: str, parts: Sequence[str], height: float = HEIGHT) -> Markup:
    """The image; parts: SVG that is safe already."""
    name = html.escape(title)
    return Markup(
        f'<svg class="chart" viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{name}">'
        f"{''.join(parts)}</svg>"
    )


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    x_name: str,
    ticks: Sequence[Tick],
    top: float,
    y_text: Text = number,
) -> Markup:
    """Lines with dots over one x axis; y from 0 to top."""
    xs = [x for line in series for x, _ in line.points] or [0.0]
    frame = _Frame(x=(min(xs), max(xs)), ticks=ticks, y=nice_ticks(top), y_text=y_text)
    for line in series:
        points = [(frame.x(x), frame.y(y)) for x, y in line.points if math.isfinite(y)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        frame.parts.append(f'<polyline class="line {line.css}" points="{path}"/>')
        frame.parts += [
            f'<circle class="dot {line.css}" cx="{x:.1f}" cy="{y:.1f}" r="2.6"/>' for x, y in points
        ]
    return frame.finish(title, x_name)


def bar_chart(
    title: str,
    values: Sequence[float],
    *,
    x_name: str,
    ticks: Sequence[Tick],
    top: float,
    y_text: Text = number,
    value_text: Text | None = None,
) -> Markup:
    """A bar for each value, at 0.5, 1.5, … of the x axis; value_text: also written above it."""
    frame = _Frame(x=(0, len(values) or 1), ticks=ticks, y=nice_ticks(top), y_text=y_text)
    for i, value in enumerate(values):
        if not math.isfinite(value) or value <= 0:
            continue
        gap = 0.18 if value_text else 0.06
        left, right, y = frame.x(i + gap), frame.x(i + 1 - gap), frame.y(value)
        frame.parts.append(
            f'<rect class="bar" x="{left:.1f}" y="{y:.1f}" width="{right - left:.1f}" '
            f'height="{frame.y(0) - y:.1f}" rx="1.5"/>'
        )
        if value_text:
            frame.text((left + right) / 2, y - 4, value_text(value), "middle", "label value")
    return frame.finish(title, x_name)


def band_chart(
    title: str, low: Sequence[float], high: Sequence[float], *, channels: int, peak: float
) -> Markup:
    """The band between two lines over all channels; y symmetric around 0 up to `peak`."""
    top = nice_top(peak)
    count = len(low)
    ticks = [Tick(count * i / 4, f"{channels * i // 4:,}") for i in range(5)]
    frame = _Frame(x=(0, count), ticks=ticks, y=[-top, 0, top], y_text=number)
    upper = [f"{frame.x(i + d):.1f},{frame.y(v):.1f}" for i, v in enumerate(high) for d in (0, 1)]
    lower = [f"{frame.x(i + d):.1f},{frame.y(v):.1f}" for i, v in enumerate(low) for d in (0, 1)]
    frame.parts.append(f'<polygon class="band" points="{" ".join(upper + lower[::-1])}"/>')
    return frame.finish(title, "channel")


def span_chart(title: str, spans: Sequence[Span], *, x_name: str) -> Markup:
    """Ranges one below the other over a logarithmic axis."""
    left, row, top = 118, 22, 6
    low = math.floor(math.log10(max(min(span.low for span in spans), 1e-9)))
    high = math.ceil(math.log10(max(max(span.high for span in spans), 1e-8)))
    height = top + row * len(spans) + 38

    def x(value: float) -> float:
        log = math.log10(max(value, 10.0**low))
        return left + (log - low) / max(1, high - low) * (WIDTH - left - RIGHT)

    parts = []
    for power in range(low, high + 1):
        at, bottom = x(10.0**power), height - 34
        parts.append(f'<line class="grid" x1="{at:.1f}" y1="{top}" x2="{at:.1f}" y2="{bottom}"/>')
        parts.append(_text(at, bottom + 14, number(10.0**power), "middle", "label"))
    for i, span in enumerate(spans):
        y = top + row * (i + 0.5)
        parts.append(_text(left - 10, y + 3.5, span.name, "end", "label"))
        for css, start, stop in (
            ("whisker", span.low, span.high),
            ("box", span.middle, span.upper),
        ):
            parts.append(
                f'<line class="{css}" x1="{x(start):.1f}" y1="{y:.1f}" x2="{x(stop):.1f}" '
                f'y2="{y:.1f}"/>'
            )
        parts.append(f'<circle class="dot a" cx="{x(span.middle):.1f}" cy="{y:.1f}" r="3.4"/>')
    parts.append(_text((left + WIDTH - RIGHT) / 2, height - 4, x_name, "middle", "name"))
    return svg(title, parts, height)


def range_bar(start: float, stop: float) -> Markup:
    """A bar as wide as its place on the page; start, stop: the filled part, 0 to 1 of it."""
    left, right = (100 * min(1.0, max(0.0, v)) if math.isfinite(v) else 0.0 for v in (start, stop))
    return Markup(
        '<svg class="range" viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true">'
        '<rect class="track" width="100" height="8"/>'
        f'<rect class="bar" x="{left:.2f}" width="{max(0.0, right - left):.2f}" height="8"/></svg>'
    )


def share_bar(share: float) -> Markup:
    """A bar for a table cell."""
    return range_bar(0.0, share)
