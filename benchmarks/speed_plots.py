"""The plots of docs/results/performance.md, from committed results: throughput, phases, acceptance by position.

Owns what is drawn, and in which file; how lines are drawn is `benchmarks.plots`'. A withheld speed has no point.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.engine_tables import PARTS, cells_of, parts_of_pass, survival
from benchmarks.peer_tables import best_rows
from benchmarks.plots import range_curves, stacked_bars

FOLDER = Path("docs/results")
Figures = dict[str, dict[str, tuple[float, float, float]]]


def _point(cell: dict[str, float]) -> tuple[float, float, float]:
    return cell["median"], cell["low"], cell["high"]


def _told(name: str, withheld: list[int]) -> str:
    """A name in the legend, with the batches that have no point because outputs differed."""
    return name if not withheld else f"{name} (withheld at {', '.join(map(str, withheld))})"


def draw_peers(results: dict[str, Any]) -> str:
    """Tokens per second of every engine's best, over the batch."""
    rows = best_rows(results)
    groups: Figures = {}
    for name in dict.fromkeys(row["row"] for row in rows):
        own = [row for row in rows if row["row"] == name]
        withheld = [row["batch"] for row in own if row["tokens_per_s"] is None]
        points = {str(row["batch"]): _point(row["tokens_per_s"]) for row in own if row["tokens_per_s"]}
        groups[_told(name, withheld)] = points
    places = [str(batch) for batch in sorted({row["batch"] for row in rows})]
    return range_curves(groups, places, ("Each engine at its best", "samples decoded at once", "new tokens per second"))


def draw_engine(results: dict[str, Any]) -> str:
    """Tokens per second of plain decoding, chains and the controller, over the batch, for each length of outputs."""
    groups: Figures = {}
    cells = cells_of(results)
    for length in dict.fromkeys(length for length, _ in cells):
        own = {batch: rows for (tokens, batch), rows in cells.items() if tokens == length}
        for mode in ("plain", "chain", "controlled"):
            there = {batch: rows[mode]["tokens_per_s"] for batch, rows in own.items()}
            withheld = [batch for batch, speed in there.items() if speed is None]
            points = {str(batch): _point(speed) for batch, speed in there.items() if speed}
            groups[_told(f"{mode}, ≤ {length} tokens", withheld)] = points
    places = [str(batch) for batch in sorted({batch for _, batch in cells})]
    return range_curves(groups, places, ("This engine alone", "samples decoded at once", "new tokens per second"))


def draw_phases(results: dict[str, Any]) -> str:
    """Where the time of a pass goes, one bar for each batch, length and method."""
    bars = {
        f"batch {batch}, ≤ {length}, {mode}": dict(zip(PARTS, parts_of_pass(row), strict=True))
        for (length, batch), rows in cells_of(results).items()
        for mode, row in rows.items()
    }
    return stacked_bars(
        bars, "Where the time of a pass goes, by batch and most new tokens", "share of a pass' wall time"
    )


def draw_positions(results: dict[str, Any]) -> str:
    """How often a chain's first drafts are all accepted, over how many."""
    groups: Figures = {}
    for (length, batch), rows in cells_of(results).items():
        shares = survival(rows["chain"], results["gamma"])
        groups[f"batch {batch}, ≤ {length} tokens"] = {
            str(place): (100 * share,) * 3 for place, share in enumerate(shares, start=1)
        }
    places = [str(place) for place in range(1, results["gamma"] + 1)]
    titles = ("Acceptance by position", "draft of a chain", "% of steps that keep it and all before it")
    return range_curves(groups, places, titles)


PLOTS: dict[str, tuple[str, str, Callable[[dict[str, Any]], str]]] = {
    "peers_plot": ("peers", "throughput of every engine over the batch", draw_peers),
    "engine_plot": ("engine", "throughput of this engine over the batch", draw_engine),
    "engine_phases_plot": ("engine", "where the time of a pass goes", draw_phases),
    "engine_positions_plot": ("engine", "acceptance by position", draw_positions),
}
"""Name → the results that the picture is drawn from, what it shows, and how it is drawn."""


def file_of(name: str) -> Path:
    """Where a picture lies."""
    return FOLDER / f"{name}.svg"


def _shower(name: str, shows: str) -> Callable[[dict[str, Any]], str]:
    return lambda _: f"![{shows}]({file_of(name).name})"


TABLES = {name: (source, _shower(name, shows)) for name, (source, shows, _) in PLOTS.items()}
"""Generated parts of the pages in docs that show the pictures; without results they say how to make them."""


def draw_all(results: dict[str, dict[str, Any]]) -> dict[Path, str]:
    """Every picture whose results there are, by its file."""
    return {file_of(name): draw(results[source]) for name, (source, _, draw) in PLOTS.items() if source in results}
