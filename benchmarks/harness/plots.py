"""Draws plots as SVG text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

COLOURS = ("#c8551b", "#2a6fb0", "#3c8d4f", "#7a4fa3", "#555555", "#b8860b", "#138a8a", "#b0305f")
WIDTH_PX = 720
Point = tuple[float, float]


class Picture:
    """Shapes on a white page, in pixels from the upper left corner."""

    def __init__(self, height: float, title: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH_PX} {height:g}" font-family="sans-serif" '
            f'font-size="12"><rect width="100%" height="100%" fill="#ffffff"/>'
        ]
        self.text(10, 20, title, size=14)

    def __str__(self) -> str:
        return "".join(self._parts) + "</svg>\n"

    def text(self, x: float, y: float, text: str, anchor: str = "start", fill: str = "#000000", size: int = 12) -> None:
        style = f'text-anchor="{anchor}" fill="{fill}" font-size="{size}"'
        self._parts.append(f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>')

    def rect(self, x: float, y: float, width: float, height: float, fill: str = "#f4f4f4") -> None:
        self._parts.append(f'<rect x="{x:.1f}" y="{y:g}" width="{width:.1f}" height="{height:g}" fill="{fill}"/>')

    def line(self, x1: float, y1: float, x2: float, y2: float, stroke: str, style: str = "") -> None:
        self._parts.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{stroke}"{style}/>')

    def circle(self, x: float, y: float, fill: str, radius: float = 4) -> None:
        self._parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" fill="{fill}"/>')

    def curve(self, points: Sequence[Point], stroke: str, style: str = "") -> None:
        places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._parts.append(f'<polyline points="{places}" fill="none" stroke="{stroke}" stroke-width="1.5"{style}/>')

    def key(self, x: float, y: float, colour: str, name: str) -> None:
        """Draw one entry of the legend."""
        self.circle(x, y - 4, colour, radius=5)
        self.text(x + 12, y, name)

    def axes(self, left: float, top: float, width: float, height: float, across: str, up: str) -> None:
        """Draw the background of the plot area, and the titles of the x-axis (`across`) and the y-axis (`up`)."""
        self.rect(left, top, width, height)
        self.text(left + width / 2, top + height + 38, across, "middle")
        middle = top + height / 2
        turn = f'transform="rotate(-90 16 {middle:g})" text-anchor="middle"'
        self._parts.append(f'<text x="16" y="{middle:g}" {turn}>{escape(up)}</text>')


def weight_traces(traces: Mapping[str, Sequence[float]], title: str) -> str:
    """Draw one strip per sample: values in [0, 1] over the steps, with a line at one half."""
    left, width, strip, row = 120, WIDTH_PX - 140, 80, 110
    picture = Picture(30 + row * len(traces), title)
    step = width / max(1, max(map(len, traces.values())) - 1)
    for number, (name, values) in enumerate(traces.items()):
        top = 30 + row * number
        picture.text(10, top + strip / 2 + 4, name)
        picture.rect(left, top, width, strip)
        picture.line(left, top + strip / 2, left + width, top + strip / 2, "#999999", ' stroke-dasharray="4 4"')
        picture.text(left - 16, top + 10, "1")
        picture.text(left - 16, top + strip, "0")
        picture.curve([(left + i * step, top + strip * (1 - value)) for i, value in enumerate(values)], COLOURS[0])
    return str(picture)


def trade_off(groups: Mapping[str, Sequence[Point]], across: str, up: str) -> str:
    """Draw a scatter plot of several groups, each joined by a line; both axes span the points."""
    xs, ys = zip(*(point for group in groups.values() for point in group), strict=True)
    low_x, high_x, low_y, high_y = min(xs), max(xs), min(ys), max(ys)
    width, height, left, top = 480, 300, 60, 40
    picture = Picture(top + height + 50, "")
    picture.axes(left, top, width, height, across, up)
    picture.text(left, top + height + 18, f"{low_x:.2f}")
    picture.text(left + width, top + height + 18, f"{high_x:.2f}", "end")
    picture.text(left - 6, top + 10, f"{high_y:.2f}", "end")
    picture.text(left - 6, top + height, f"{low_y:.2f}", "end")
    for number, (name, group) in enumerate(groups.items()):
        colour = COLOURS[number % len(COLOURS)]
        across_px, down_px = width / (high_x - low_x or 1.0), height / (high_y - low_y or 1.0)
        points = [(left + across_px * (x - low_x), top + down_px * (high_y - y)) for x, y in sorted(group)]
        picture.curve(points, colour)
        for x, y in points:
            picture.circle(x, y, colour)
        picture.key(left + width + 20, top + 16 + 20 * number, colour, name)
    return str(picture)


def range_curves(
    groups: Mapping[str, Mapping[str, tuple[float, float, float]]],
    places: Sequence[str],
    titles: tuple[str, str, str],
) -> str:
    """Draw curves over named x positions; each value (middle, low, high) is a point with its range, and y starts at 0.

    `titles` are those of the plot, the x-axis and the y-axis. Raises ValueError if there is no value, or one is
    negative, infinite or NaN.
    """
    values = [number for group in groups.values() for point in group.values() for number in point]
    if not values or not all(math.isfinite(value) and value >= 0.0 for value in values):
        raise ValueError(f"a plot needs finite numbers from 0 on, not {values}")
    width, height, left, top = 430, 300, 70, 40
    step = _round_step(max(values))
    num_steps = max(1, math.ceil(max(values) / step - 1e-9))

    def down(value: float) -> float:
        return top + height * (1.0 - value / (num_steps * step))

    picture = Picture(max(top + height + 50, top + 20 * len(groups) + 20), titles[0])
    picture.axes(left, top, width, height, titles[1], titles[2])
    for number in range(num_steps + 1):
        y = down(number * step)
        picture.line(left, y, left + width, y, "#dddddd")
        picture.text(left - 6, y + 4, f"{number * step:g}", "end")
    middles = {place: left + width * (number + 0.5) / len(places) for number, place in enumerate(places)}
    for place, x in middles.items():
        picture.text(x, top + height + 18, place, "middle")
    for number, (name, group) in enumerate(groups.items()):
        colour, dashes = COLOURS[number % len(COLOURS)], ' stroke-dasharray="5 3"' if number >= len(COLOURS) else ""
        # Groups are shifted along x, so that equal values do not overlap.
        shift = 4.0 * (number - (len(groups) - 1) / 2)
        spots = [(middles[place] + shift, *group[place]) for place in places if place in group]
        picture.curve([(x, down(middle)) for x, middle, _, _ in spots], colour, dashes)
        for x, middle, low, high in spots:
            picture.line(x, down(low), x, down(high), colour, ' stroke-width="3" stroke-opacity="0.5"')
            picture.circle(x, down(middle), colour, radius=3.5)
        picture.key(left + width + 20, top + 16 + 20 * number, colour, name)
    return str(picture)


def stacked_bars(bars: Mapping[str, Mapping[str, float]], title: str, across: str) -> str:
    """Draw horizontal stacked bars, each scaled to 100 %; raise ValueError if a bar has no parts, a negative part or a
    sum of 0."""
    for name, parts in bars.items():
        if not parts or min(parts.values()) < 0.0 or not 0.0 < sum(parts.values()) < math.inf:
            raise ValueError(f"the parts of {name!r} are no shares of a whole: {dict(parts)}")
    colours = dict(zip(dict.fromkeys(kind for parts in bars.values() for kind in parts), COLOURS, strict=False))
    left, top, width, row = 200, 64, 490, 24
    bottom = top + row * len(bars)
    picture = Picture(bottom + 48, title)
    for number, (kind, colour) in enumerate(colours.items()):
        picture.key(left + 8 + width * number / len(colours), 48, colour, kind)
    for number, (name, parts) in enumerate(bars.items()):
        y, x, whole = top + row * number, float(left), sum(parts.values())
        picture.text(left - 8, y + 15, name, "end")
        for kind, colour in colours.items():
            share = parts.get(kind, 0.0) / whole
            picture.rect(x, y, width * share, row - 5, colour)
            if share >= 0.06:
                picture.text(x + width * share / 2, y + 14, f"{100 * share:.0f}", "middle", "#ffffff")
            x += width * share
    for mark in (0, 25, 50, 75, 100):
        picture.text(left + width * mark / 100, bottom + 16, f"{mark} %", "middle")
    picture.text(left + width / 2, bottom + 36, across, "middle")
    return str(picture)


def _round_step(highest: float) -> float:
    """Return a tick distance, 1, 2 or 5 times a power of ten, with four to nine ticks up to `highest`."""
    if highest <= 0.0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(highest / 4))
    return next(power * factor for factor in (1, 2, 5, 10) if highest / (power * factor) <= 9)
