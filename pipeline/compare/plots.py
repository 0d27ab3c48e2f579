"""Draws the plots of a comparison with matplotlib: speed over loss, and acceptance by position."""

from __future__ import annotations

import importlib.util
import io
from typing import Any

from pipeline.compare.figures import Comparison

NO_MATPLOTLIB = "plots: matplotlib is not installed, so none are drawn (pip install matplotlib)"
DPI = 150


def can_draw() -> bool:
    """Return whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(comparison: Comparison) -> dict[str, bytes]:
    """Return PNG files by name."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    plots: dict[str, bytes] = {}
    for name, paint in (("speed_over_loss.png", _speed_over_loss), ("acceptance_by_position.png", _by_position)):
        figure = Figure(figsize=(7.5, 4.5), layout="constrained")
        FigureCanvasAgg(figure)
        paint(figure.add_subplot(), comparison)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
        plots[name] = buffer.getvalue()
    return plots


def _speed_over_loss(axes: Any, comparison: Comparison) -> None:
    for number, method in enumerate(comparison.methods):
        x, y = 100 * method.loss.value, method.speedup.value
        reach = [[max(0.0, y - method.speedup.low)], [max(0.0, method.speedup.high - y)]]
        marker = "o" if method.lossless else "s"
        axes.errorbar(x, y, yerr=reach, fmt=marker, color=f"C{number % 10}", capsize=3)
        axes.annotate(method.name, (x, y), xytext=(7, 5), textcoords="offset points", fontsize=9)
    axes.axhline(1.0, color="0.6", linewidth=1, linestyle="--")
    axes.margins(0.18, 0.15)
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, -1.0), max(high, 5.0))
    axes.set_xlabel("loss: mean edit distance from plain decoding, % (squares are lossy)")
    axes.set_ylabel("speed over plain decoding")
    axes.set_title(f"Speed over loss, {comparison.num_rows:,} rows, intervals of 95 %", loc="left")
    axes.grid(alpha=0.3)


def _by_position(axes: Any, comparison: Comparison) -> None:
    drawn = [method for method in comparison.methods if any(method.by_position)]
    for method in drawn:
        positions = range(1, len(method.by_position) + 1)
        axes.plot(positions, method.by_position, marker="o", markersize=4, label=method.name)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("position of the draft")
    axes.set_ylabel("share of steps that accept it")
    axes.set_title(f"Acceptance by position, {comparison.num_rows:,} rows", loc="left")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    if drawn:
        axes.legend(frameon=False)
