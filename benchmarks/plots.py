"""Small pictures as SVG text. Knows numbers and lines, nothing of what they mean."""

from __future__ import annotations

from html import escape

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
    colours = ("#c8551b", "#2a6fb0", "#3c8d4f", "#7a4fa3", "#555555")
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
        colour = colours[number % len(colours)]
        places = [place(x, y) for x, y in sorted(group)]
        parts.append(f'<polyline points="{" ".join(places)}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        for spot in places:
            x_px, y_px = spot.split(",")
            parts.append(f'<circle cx="{x_px}" cy="{y_px}" r="4" fill="{colour}"/>')
        label_y = top + 16 + 20 * number
        parts.append(f'<circle cx="{left + plot_w + 20}" cy="{label_y - 4}" r="5" fill="{colour}"/>')
        parts.append(f'<text x="{left + plot_w + 32}" y="{label_y}">{escape(name)}</text>')
    return "".join(parts) + "</svg>\n"
