"""Draws the plots of docs/results/performance.md from committed results; a withheld speed has no point."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks.engine.tables import MODES, PARTS, cells_of, parts_of_pass, survival
from benchmarks.harness.markdown import Results
from benchmarks.harness.plots import range_curves, stacked_bars
from benchmarks.peers.tables import best_rows

FOLDER = Path("docs/results")


def _draw_speeds(rows: Iterable[tuple[str, Results]], title: str) -> str:
    """Plot tokens per second over the batch size, from (curve, row) pairs."""
    rows = list(rows)
    groups = {}
    for name in dict.fromkeys(name for name, _ in rows):
        speeds = {row["batch"]: row["tokens_per_s"] for curve, row in rows if curve == name}
        withheld = [str(batch) for batch, speed in speeds.items() if speed is None]
        label = f"{name} (withheld at {', '.join(withheld)})" if withheld else name
        groups[label] = {
            str(batch): (speed["median"], speed["low"], speed["high"]) for batch, speed in speeds.items() if speed
        }
    places = [str(batch) for batch in sorted({row["batch"] for _, row in rows})]
    return range_curves(groups, places, (title, "samples decoded at once", "new tokens per second"))


def draw_peers(results: Results) -> str:
    """Plot the best variant of every engine."""
    return _draw_speeds(((row["row"], row) for row in best_rows(results)), "Each engine at its best")


def draw_engine(results: Results) -> str:
    """Plot plain decoding, chains and the controller for each output length."""
    cells = cells_of(results)
    lengths = dict.fromkeys(length for length, _ in cells)
    rows = (
        (f"{mode}, ≤ {length} tokens", modes[mode])
        for length in lengths
        for mode in MODES
        for (tokens, _), modes in cells.items()
        if tokens == length
    )
    return _draw_speeds(rows, "This engine alone")


def draw_phases(results: Results) -> str:
    """Plot the shares of a pass's time, one bar for each batch size, output length and method."""
    bars = {
        f"batch {batch}, ≤ {length}, {mode}": dict(zip(PARTS, parts_of_pass(row), strict=True))
        for (length, batch), rows in cells_of(results).items()
        for mode, row in rows.items()
    }
    title = "Where the time of a pass goes, by batch and most new tokens"
    return stacked_bars(bars, title, "share of a pass' wall time")


def draw_positions(results: Results) -> str:
    """Plot how often the first drafts of a chain are all accepted."""
    groups = {
        f"batch {batch}, ≤ {length} tokens": {
            str(place): (100 * share,) * 3
            for place, share in enumerate(survival(rows["chain"], results["gamma"]), start=1)
        }
        for (length, batch), rows in cells_of(results).items()
    }
    places = [str(place) for place in range(1, results["gamma"] + 1)]
    titles = ("Acceptance by position", "draft of a chain", "% of steps that keep it and all before it")
    return range_curves(groups, places, titles)


PLOTS: dict[str, tuple[str, str, Callable[[Results], str]]] = {
    "peers_plot": ("peers", "throughput of every engine over the batch", draw_peers),
    "engine_plot": ("engine", "throughput of this engine over the batch", draw_engine),
    "engine_phases_plot": ("engine", "where the time of a pass goes", draw_phases),
    "engine_positions_plot": ("engine", "acceptance by position", draw_positions),
}
"""Name → the results of a plot, its caption, and the function that draws it."""


def file_of(name: str) -> Path:
    return FOLDER / f"{name}.svg"


def _reference(name: str, caption: str) -> Callable[[Results], str]:
    return lambda _: f"![{caption}]({file_of(name).name})"


TABLES = {name: (source, _reference(name, caption)) for name, (source, caption, _) in PLOTS.items()}
"""Generated parts of the documents that show the plots."""


def draw_all(results: dict[str, Results]) -> dict[Path, str]:
    """Draw every plot whose results exist; return SVG text by file."""
    return {file_of(name): draw(results[source]) for name, (source, _, draw) in PLOTS.items() if source in results}
