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
