"""Draws the report's charts as SVG. Texts are escaped; colours are classes of the page's style sheet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

WIDTH, HEIGHT = 640, 240
LEFT, RIGHT, TOP, BOTTOM = 60, 12, 14, 48
NUM_TICKS = 4


@dataclass(frozen=True)
class Point:
    """A point of a line; `y` is None where there is no value. `title` is its tooltip."""

    x: float
    y: float | None
    title: str


def line_chart(points: Sequence[Point], label: str, x_unit: str, zero: bool = True) -> Markup:
    """Draw one line over `points`, sorted by x; with `zero`, the y axis begins at 0, otherwise near the least value."""
    values = [point.y for point in points if point.y is not None]
    if not values:
        return Markup('<p class="quiet">no data yet</p>')
    low, high = (0.0, max(values)) if zero else (min(values), max(values))
    ticks = nice_ticks(low, high if high > low else low + 1)
    low, high = ticks[0], ticks[-1]
    last = max(points[-1].x, 1e-9)

    def across(x: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * x / last

    def down(y: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (y - low) / (high - low)

    parts = [_y_axis(ticks, down)]
    for tick in nice_ticks(0, last):
        if tick <= last * 1.001:
            parts.append(_text(across(tick), HEIGHT - BOTTOM + 20, _number(tick), "middle"))
    parts.append(_text(WIDTH - RIGHT, HEIGHT - 6, x_unit, "end"))
    for run in _runs(points):
        path = " ".join(f"{across(x):.1f},{down(y):.1f}" for x, y in run)
        if len(run) > 1:
            base = f"{across(run[-1][0]):.1f},{down(low):.1f} {across(run[0][0]):.1f},{down(low):.1f}"
            parts.append(Markup('<polygon class="area" points="{} {}"/>').format(path, base))
        parts.append(Markup('<polyline class="line" points="{}"/>').format(path))
    radius = 2.5 if len(values) <= 60 else 1.5
    parts += [
        Markup('<g class="dot"><circle cx="{:.1f}" cy="{:.1f}" r="8" class="hit"/>').format(across(dot.x), down(dot.y))
        + Markup('<circle cx="{:.1f}" cy="{:.1f}" r="{}"/>').format(across(dot.x), down(dot.y), radius)
        + Markup("<title>{}</title></g>").format(dot.title)
        for dot in points
        if dot.y is not None
    ]
    return _svg(parts, label)


def bar_chart(bars: Sequence[tuple[str, float, str]], label: str, x_label: str) -> Markup:
    """Draw vertical bars of (name, value, tooltip), values from 0."""
    if not bars:
        return Markup('<p class="quiet">no drafts</p>')
    ticks = nice_ticks(0.0, max(max(value for _, value, _ in bars), 1e-9))

    def down(y: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * y / ticks[-1]

    parts = [_y_axis(ticks, down)]
    step = (WIDTH - LEFT - RIGHT) / len(bars)
    width = min(46.0, step * 0.72)
    every = math.ceil(len(bars) / 24)
    for index, (name, value, title) in enumerate(bars):
        middle = LEFT + step * (index + 0.5)
        parts.append(
            Markup('<rect class="bar" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" rx="2">').format(
                middle - width / 2, down(value), width, max(1.0, down(0) - down(value))
            )
            + Markup("<title>{}</title></rect>").format(title)
        )
        if index % every == 0:
            parts.append(_text(middle, HEIGHT - BOTTOM + 20, name, "middle"))
    parts.append(_text(WIDTH - RIGHT, HEIGHT - 6, x_label, "end"))
    return _svg(parts, label)


def share_bar(shares: Sequence[tuple[str, float, str]], label: str) -> Markup:
    """Draw parts of a whole, (name, share, text), as one horizontal bar with a legend."""
    parts, left = [], 0.0
    for index, (name, share, text) in enumerate(shares):
        width = 100 * max(0.0, share)
        parts.append(
            Markup('<rect class="part{}" x="{:.3f}" y="0" width="{:.3f}" height="6">').format(index % 6, left, width)
            + Markup("<title>{}: {}</title></rect>").format(name, text)
        )
        left += width
    legend = Markup("").join(
        Markup(
            '<li><svg viewBox="0 0 8 8" class="key"><rect class="part{}" width="8" height="8" rx="2"/></svg>'
            "<span>{}</span><b>{}</b></li>"
        ).format(index % 6, name, text)
        for index, (name, _, text) in enumerate(shares)
    )
    svg = Markup('<svg class="share" viewBox="0 0 100 6" preserveAspectRatio="none" role="img" aria-label="{}">')
    return svg.format(label) + Markup("").join(parts) + Markup('</svg><ul class="legend">') + legend + Markup("</ul>")


def sparkline(histogram: Sequence[int]) -> Markup:
    """Draw how many steps accepted 0, 1, 2, … drafts as small bars."""
    most = max(histogram, default=0) or 1
    bars = Markup("").join(
        Markup('<rect x="{}" y="{:.1f}" width="7" height="{:.1f}" rx="1">').format(
            9 * num_accepted, min(19.2, 20 - 20 * count / most), max(0.8, 20 * count / most)
        )
        + Markup("<title>{:,} steps accepted {} drafts</title></rect>").format(count, num_accepted)
        for num_accepted, count in enumerate(histogram)
    )
    width = max(9, 9 * len(histogram))
    return (
        Markup('<svg class="spark" width="{0}" height="20" viewBox="0 0 {0} 20">').format(width)
        + bars
        + Markup("</svg>")
    )


def nice_ticks(low: float, high: float) -> list[float]:
    """Return about `NUM_TICKS` + 1 ticks at multiples of 1, 2 or 5 times a power of ten that contain [low, high]."""
    span = max(high - low, 1e-12)
    power = 10.0 ** math.floor(math.log10(span / NUM_TICKS))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor * NUM_TICKS >= span * 0.999)
    first = math.floor(low / step + 1e-9)
    last = max(first + 1, math.ceil(high / step - 1e-9))
    return [step * number for number in range(first, last + 1)]


def _runs(points: Sequence[Point]) -> list[list[tuple[float, float]]]:
    """Split points at missing values."""
    runs: list[list[tuple[float, float]]] = [[]]
    for point in points:
        if point.y is None:
            runs.append([])
        else:
            runs[-1].append((point.x, point.y))
    return [run for run in runs if run]


def _y_axis(ticks: Sequence[float], down: object) -> Markup:
    assert callable(down)
    lines = [
        Markup('<line class="grid" x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}"/>').format(
            LEFT, WIDTH - RIGHT, down(tick), down(tick)
        )
        + _text(LEFT - 8, down(tick) + 4, _number(tick), "end")
        for tick in ticks
    ]
    return Markup("").join(lines)


def _text(x: float, y: float, text: str, anchor: str) -> Markup:
    return Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>').format(x, y, anchor, text)


def _number(value: float) -> str:
    """Return a short number: 1.5M, 20k, 3, 0.25."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.3g}{unit}"
    return f"{value:.4g}"


def _svg(parts: Sequence[Markup], label: str) -> Markup:
    head = Markup('<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}">').format(WIDTH, HEIGHT, label)
    return head + Markup("").join(parts) + Markup("</svg>")
