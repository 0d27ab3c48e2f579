"""Small pictures as SVG text. Knows numbers and lines, nothing of what they mean."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

COLOURS = ("#c8551b", "#2a6fb0", "#3c8d4f", "#7a4fa3", "#555555", "#b8860b", "#138a8a", "#b0305f")
WIDTH_PX, ROW_PX, LEFT_PX, PLOT_PX = 720, 110, 120, 80


def weight_traces(traces: dict[str, list[float]], title: str = "weight of the first context, step by step") -> str:
    """One strip per sample: values in [0, 1] over the steps, with a line at one half."""
    longest = max(len(values) for values in traces.values())
    height = 30 + ROW_PX * len(traces)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH_PX} {height}" font-family="sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" fill="#ffffff"/><text x="10" y="18">{escape(title)}</text>'
    ]
    step_px = (WIDTH_PX - LEFT_PX - 20) / max(1, longest - 1)
    for row, (name, values) in enumerate(traces.items()):
        top = 30 + ROW_PX * row
        points = " ".join(f"{LEFT_PX + i * step_px:.1f},{top + PLOT_PX * (1 - v):.1f}" for i, v in enumerate(values))
        right, middle = WIDTH_PX - 20, top + PLOT_PX / 2
        parts.append(
            f'<text x="10" y="{middle + 4}">{escape(name)}</text>'
            f'<rect x="{LEFT_PX}" y="{top}" width="{right - LEFT_PX}" height="{PLOT_PX}" fill="#f4f4f4"/>'
            f'<line x1="{LEFT_PX}" y1="{middle}" x2="{right}" y2="{middle}" stroke="#999999" stroke-dasharray="4 4"/>'
            f'<text x="{LEFT_PX - 16}" y="{top + 10}">1</text><text x="{LEFT_PX - 16}" y="{top + PLOT_PX}">0</text>'
            f'<polyline points="{points}" fill="none" stroke="#c8551b" stroke-width="2"/>'
        )
    return "".join(parts) + "</svg>\n"


def trade_off(groups: dict[str, list[tuple[float, float]]], across: str, up: str) -> str:
    """Points of several groups in one plane, each group joined by a line; both axes span the points."""
    points = [point for group in groups.values() for point in group]
    low_x, high_x = min(x for x, _ in points), max(x for x, _ in points)
    low_y, high_y = min(y for _, y in points), max(y for _, y in points)
    plot_w, plot_h, left, top = 480, 300, 60, 20

    def place(x: float, y: float) -> str:
        across_px = left + plot_w * (x - low_x) / (high_x - low_x or 1.0)
        return f"{across_px:.1f},{top + plot_h * (high_y - y) / (high_y - low_y or 1.0):.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH_PX} {top + plot_h + 50}" '
        f'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="#ffffff"/>'
        f'<rect x="{left}" y="{top}" width="{plot_w}" height="{plot_h}" fill="#f4f4f4"/>'
        f'<text x="{left}" y="{top + plot_h + 18}">{low_x:.2f}</text>'
        f'<text x="{left + plot_w}" y="{top + plot_h + 18}" text-anchor="end">{high_x:.2f}</text>'
        f'<text x="{left + plot_w / 2}" y="{top + plot_h + 36}" text-anchor="middle">{escape(across)}</text>'
        f'<text x="{left - 6}" y="{top + 10}" text-anchor="end">{high_y:.2f}</text>'
        f'<text x="{left - 6}" y="{top + plot_h}" text-anchor="end">{low_y:.2f}</text>'
        f'<text x="16" y="{top + plot_h / 2}" transform="rotate(-90 16 {top + plot_h / 2})" '
        f'text-anchor="middle">{escape(up)}</text>'
    ]
    for number, (name, group) in enumerate(groups.items()):
        colour = COLOURS[number % len(COLOURS)]
        places = [place(x, y) for x, y in sorted(group)]
        parts.append(f'<polyline points="{" ".join(places)}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        for spot in places:
            x_px, y_px = spot.split(",")
            parts.append(f'<circle cx="{x_px}" cy="{y_px}" r="4" fill="{colour}"/>')
        label_y = top + 16 + 20 * number
        parts.append(f'<circle cx="{left + plot_w + 20}" cy="{label_y - 4}" r="5" fill="{colour}"/>')
        parts.append(f'<text x="{left + plot_w + 32}" y="{label_y}">{escape(name)}</text>')
    return "".join(parts) + "</svg>\n"


def range_curves(
    groups: Mapping[str, Mapping[str, tuple[float, float, float]]],
    places: Sequence[str],
    titles: tuple[str, str, str],
) -> str:
    """Curves over named places, each value (middle, low, high) a point with its range; the upward axis begins at 0.

    `titles` are those of the picture and of the axes across and up. A place that a group has no value for is left out.

    Raises:
        ValueError: there is no value at all, or one is negative, infinite or no number.
    """
    values = [number for group in groups.values() for point in group.values() for number in point]
    if not values or not all(math.isfinite(value) and value >= 0.0 for value in values):
        raise ValueError(f"a picture needs finite numbers from 0 on, not {values}")
    plot_w, plot_h, left, top = 430, 300, 70, 40
    step = _round_step(max(values))
    num_steps = max(1, math.ceil(max(values) / step - 1e-9))
    highest = num_steps * step

    def down(value: float) -> float:
        return top + plot_h * (1.0 - value / highest)

    parts = [_open(max(top + plot_h + 50, top + 20 * len(groups) + 20), titles[0])]
    parts.append(f'<rect x="{left}" y="{top}" width="{plot_w}" height="{plot_h}" fill="#f4f4f4"/>')
    for number in range(num_steps + 1):
        y = down(number * step)
        parts.append(f'<line x1="{left}" y1="{y:.1f}" x2="{left + plot_w}" y2="{y:.1f}" stroke="#dddddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{number * step:g}</text>')
    middles = {place: left + plot_w * (number + 0.5) / len(places) for number, place in enumerate(places)}
    for place, x in middles.items():
        parts.append(f'<text x="{x:.1f}" y="{top + plot_h + 18}" text-anchor="middle">{escape(place)}</text>')
    parts.append(_axis_titles(left + plot_w / 2, top + plot_h + 38, top + plot_h / 2, titles[1], titles[2]))
    for number, (name, group) in enumerate(groups.items()):
        colour, dashes = COLOURS[number % len(COLOURS)], ' stroke-dasharray="5 3"' if number >= len(COLOURS) else ""
        # Beside each other, so that equal values stay apart.
        aside = 4.0 * (number - (len(groups) - 1) / 2)
        spots = [(middles[place] + aside, group[place]) for place in places if place in group]
        line = " ".join(f"{x:.1f},{down(middle):.1f}" for x, (middle, _, _) in spots)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"{dashes}/>')
        for x, (middle, low, high) in spots:
            parts.append(
                f'<line x1="{x:.1f}" y1="{down(low):.1f}" x2="{x:.1f}" y2="{down(high):.1f}" '
                f'stroke="{colour}" stroke-width="3" stroke-opacity="0.5"/>'
                f'<circle cx="{x:.1f}" cy="{down(middle):.1f}" r="3.5" fill="{colour}"/>'
            )
        parts.append(_key(left + plot_w + 20, top + 16 + 20 * number, colour, name))
    return "".join(parts) + "</svg>\n"


def stacked_bars(bars: Mapping[str, Mapping[str, float]], title: str, across: str) -> str:
    """Bars that lie below each other, each cut into its named parts; all of one whole, shown as 0 to 100 %.

    Raises:
        ValueError: a bar has no parts, or a negative one, or comes to nothing.
    """
    for name, parts_of in bars.items():
        if not parts_of or min(parts_of.values()) < 0.0 or not 0.0 < sum(parts_of.values()) < math.inf:
            raise ValueError(f"the parts of {name!r} are no shares of a whole: {dict(parts_of)}")
    kinds = list(dict.fromkeys(kind for parts_of in bars.values() for kind in parts_of))
    left, top, plot_w, row_h = 200, 64, 490, 24
    bottom = top + row_h * len(bars)
    parts = [_open(bottom + 48, title)]
    for number, kind in enumerate(kinds):
        parts.append(_key(left + 8 + plot_w * number / len(kinds), 48, COLOURS[number % len(COLOURS)], kind))
    for row, (name, parts_of) in enumerate(bars.items()):
        y, x = top + row_h * row, float(left)
        parts.append(f'<text x="{left - 8}" y="{y + 15}" text-anchor="end">{escape(name)}</text>')
        whole = sum(parts_of.values())
        for number, kind in enumerate(kinds):
            share = parts_of.get(kind, 0.0) / whole
            width = plot_w * share
            colour = COLOURS[number % len(COLOURS)]
            parts.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{row_h - 5}" fill="{colour}"/>')
            if share >= 0.06:
                middle = x + width / 2
                parts.append(
                    f'<text x="{middle:.1f}" y="{y + 14}" text-anchor="middle" fill="#ffffff">{100 * share:.0f}</text>'
                )
            x += width
    for percent in (0, 25, 50, 75, 100):
        x = left + plot_w * percent / 100
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{percent} %</text>')
    parts.append(f'<text x="{left + plot_w / 2}" y="{bottom + 36}" text-anchor="middle">{escape(across)}</text>')
    return "".join(parts) + "</svg>\n"


def _open(height: int, title: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH_PX} {height}" font-family="sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" fill="#ffffff"/>'
        f'<text x="10" y="20" font-size="14">{escape(title)}</text>'
    )


def _axis_titles(across_x: float, across_y: float, up_y: float, across: str, up: str) -> str:
    return (
        f'<text x="{across_x}" y="{across_y}" text-anchor="middle">{escape(across)}</text>'
        f'<text x="16" y="{up_y}" transform="rotate(-90 16 {up_y})" text-anchor="middle">{escape(up)}</text>'
    )


def _key(x: float, y: float, colour: str, name: str) -> str:
    return f'<circle cx="{x}" cy="{y - 4}" r="5" fill="{colour}"/><text x="{x + 12}" y="{y}">{escape(name)}</text>'


def _round_step(highest: float) -> float:
    """A distance of marks, 1, 2 or 5 times a power of ten, of which four to nine reach `highest`."""
    if highest <= 0.0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(highest / 4))
    return next(power * factor for factor in (1, 2, 5, 10) if highest / (power * factor) <= 9)
