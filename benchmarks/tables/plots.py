"""Draws the plots of the documents from committed results with matplotlib.

Every file has a digest of its data, so that a plot is drawn again only if its data has changed: other versions of
matplotlib draw other bytes.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.markdown import Results
from benchmarks.tables.engine import MODES, PARTS, best_rows, cells_of, parts_of_pass, survival
from benchmarks.tables.lantern import KS, points

FOLDER = Path("docs/results")
Point = tuple[float, float]


@dataclass(frozen=True)
class Plot:
    """Curves, bars or strips by name; `kind` decides how they are drawn, `titles` are those of plot, x- and y-axis."""

    kind: str
    titles: tuple[str, str, str]
    data: Mapping[str, Any]

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    def draw(self, path: Path) -> None:
        """Write the plot as SVG."""
        import matplotlib

        matplotlib.use("svg")
        from matplotlib import pyplot

        with pyplot.rc_context(
            {"svg.hashsalt": "draftfleet", "svg.fonttype": "none", "font.size": 9, "axes.grid": True, "grid.alpha": 0.3}
        ):
            figure = KINDS[self.kind](pyplot, self)
            figure.savefig(path, metadata={"Date": None, "Creator": None, "Description": self.digest})
            pyplot.close(figure)


def digest_of(path: Path) -> str:
    """Return the digest of the data of a drawn file; empty if there is none."""
    match = re.search(r"<dc:description>(\w+)</dc:description>", path.read_text()) if path.exists() else None
    return match[1] if match else ""


def _axes(pyplot: Any, plot: Plot, height: float = 4.2) -> tuple[Any, Any]:
    figure, axes = pyplot.subplots(figsize=(8, height), layout="constrained")
    axes.set_title(plot.titles[0], loc="left")
    axes.set_xlabel(plot.titles[1])
    axes.set_ylabel(plot.titles[2])
    return figure, axes


def _ranges(pyplot: Any, plot: Plot) -> Any:
    """Draw curves over named positions, whose points are (position, middle, low, high); the y-axis starts at 0."""
    figure, axes = _axes(pyplot, plot)
    positions = sorted({position for curve in plot.data.values() for position, *_ in curve})
    for number, (name, curve) in enumerate(plot.data.items()):
        shift = 0.04 * (number - (len(plot.data) - 1) / 2)
        across = [positions.index(position) + shift for position, *_ in curve]
        middles = [middle for _, middle, *_ in curve]
        errors = [[m - low for _, m, low, _ in curve], [high - m for _, m, _, high in curve]]
        style = "-" if number < 8 else "--"
        axes.errorbar(across, middles, errors, label=name, marker="o", markersize=4, capsize=2, linestyle=style)
    axes.set_xticks(range(len(positions)), map(str, positions))
    axes.set_ylim(bottom=0)
    figure.legend(loc="outside right upper")
    return figure


def _bars(pyplot: Any, plot: Plot) -> Any:
    """Draw horizontal bars of shares that sum to 1."""
    figure, axes = _axes(pyplot, plot, 1.5 + 0.26 * len(plot.data))
    names = list(plot.data)
    left = [0.0] * len(names)
    for number, part in enumerate(PARTS):
        widths = [100 * plot.data[name][number] for name in names]
        bars = axes.barh(names, widths, left=left, label=part)
        axes.bar_label(bars, [f"{width:.0f}" if width >= 6 else "" for width in widths], label_type="center")
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    figure.legend(loc="outside lower center", ncols=len(PARTS))
    return figure


def _trade_off(pyplot: Any, plot: Plot) -> Any:
    """Draw groups of points, each joined by a line. Points have a label if there is a third value, above the line of
    every second group and below that of the others."""
    figure, axes = _axes(pyplot, plot)
    for number, (name, group) in enumerate(plot.data.items()):
        points = sorted(group)
        [line] = axes.plot(*zip(*(point[:2] for point in points), strict=True), marker="o", markersize=4, label=name)
        right = number % 2 == 0
        place = {"xytext": (5, 4) if right else (-5, -10), "ha": "left" if right else "right"}
        for x, y, *label in points:
            if label:
                axes.annotate(
                    label[0], (x, y), textcoords="offset points", fontsize=7.5, color=line.get_color(), **place
                )
    axes.margins(0.12)
    axes.tick_params(length=4)
    axes.locator_params(nbins=8)
    if len(plot.data) > 1:
        figure.legend(loc="outside right upper")
    return figure


def _strips(pyplot: Any, plot: Plot) -> Any:
    """Draw values in [0, 1] over the steps, one strip per name, with a line at one half."""
    figure, rows = pyplot.subplots(len(plot.data), figsize=(8, 1.3 * len(plot.data)), layout="constrained", sharey=True)
    figure.suptitle(plot.titles[0])
    for axes, (name, values) in zip(rows, plot.data.items(), strict=True):
        axes.plot(values)
        axes.axhline(0.5, linestyle="--", color="grey")
        axes.set(ylim=(-0.05, 1.05), ylabel=name)
    return figure


KINDS: dict[str, Callable[[Any, Plot], Any]] = {
    "ranges": _ranges,
    "bars": _bars,
    "trade_off": _trade_off,
    "strips": _strips,
}


def _speeds(rows: Iterable[tuple[str, Results]], title: str) -> Plot:
    """Return tokens per second over the batch size, from (curve, row) pairs; a withheld speed has no point."""
    rows = list(rows)
    curves: dict[str, list[tuple[float, ...]]] = {}
    for name in dict.fromkeys(name for name, _ in rows):
        speeds = sorted((row["batch"], row["tokens_per_s"]) for curve, row in rows if curve == name)
        withheld = ", ".join(str(batch) for batch, speed in speeds if speed is None)
        label = f"{name} (withheld at {withheld})" if withheld else name
        curves[label] = [
            (batch, *(speed[key] for key in ("median", "low", "high"))) for batch, speed in speeds if speed
        ]
    return Plot("ranges", (title, "samples decoded at once", "new tokens per second"), curves)


def _engine(results: Results) -> Plot:
    """Return plain decoding, chains and the controller for each output length."""
    cells = cells_of(results)
    lengths = dict.fromkeys(length for length, _ in cells)
    rows = (
        (f"{mode}, ≤ {length} tokens", modes[mode])
        for length in lengths
        for mode in MODES
        for (tokens, _), modes in cells.items()
        if tokens == length
    )
    return _speeds(rows, "This engine alone")


def _phases(results: Results) -> Plot:
    """Return the shares of a pass's time for each batch size, output length and method."""
    bars = {
        f"batch {batch}, ≤ {length}, {mode}": parts_of_pass(row)
        for (length, batch), rows in cells_of(results).items()
        for mode, row in rows.items()
    }
    title = "Where the time of a pass goes, by batch and most new tokens"
    return Plot("bars", (title, "% of a pass's wall time", ""), bars)


def _positions(results: Results) -> Plot:
    """Return how often the first drafts of a chain are all accepted."""
    curves = {
        f"batch {batch}, ≤ {length} tokens": [
            (depth, *[100 * share] * 3) for depth, share in enumerate(survival(rows["chain"], results["gamma"]), 1)
        ]
        for (length, batch), rows in cells_of(results).items()
    }
    titles = ("Acceptance by position", "draft of a chain", "% of steps that keep it and all before it")
    return Plot("ranges", titles, curves)


def _lantern(results: Results) -> Plot:
    """Return acceptance length and Fréchet distance, for k and δ under coupled noise, and other rules."""
    rows, share = results["kinds"]["text"]["rows"], results["kinds"]["text"]["settings"]["k"]
    groups: dict[str, Sequence[Results]] = {
        f"k = {share[str(k)]}, δ rising": [cell for (other, _), cell in points(results).items() if other == k]
        for k in KS
    }
    for label, names in (
        ("the paper's residual", ("lantern_paper_0.1", "metric_l2", "lantern_paper_0.4")),
        ("EAGLE-2", ("eagle2_rejection", "eagle2_coupled")),
    ):
        groups[label] = [rows[f"1/{name}"] for name in names]
    data = {
        name: [(cell["mean_acceptance_length"], cell["frechet_real"]) for cell in some] for name, some in groups.items()
    }
    return Plot("trade_off", ("", "mean acceptance length", "distance to real images"), data)


def _lossy(results: Results, methods: Results) -> Plot:
    """Return acceptance length and F1 of attribute words of relaxed rules."""
    names = {
        "LVSpec, λ": "LVSpec: λ",
        "without shift": "LVSpec: λ without position shift",
        "random": "random relaxation: probability",
    }
    data: dict[str, list[tuple[float, float, str]]] = {
        label: [
            (cell["acceptance_length"]["single"], cell["attribute_f1"], setting)
            for setting, cell in results["groups"][name].items()
        ]
        for label, name in names.items()
    }
    for label, name in (("typical", "typical"), ("FLy, gate only", "fly_gate")):
        cell = methods["methods"][name]["scenarios"]["single"]
        data[label] = [(cell["mean_acceptance_length"], cell["attribute_f1"], label)]
    return Plot("trade_off", ("", "mean acceptance length", "F1 of attribute words"), data)


def _weights(results: Results) -> Plot:
    return Plot("strips", ("weight of the first context, step by step", "", ""), results["ensemble_weights"])


def _peers(results: Results) -> Plot:
    """Return the best variant of every engine."""
    return _speeds(((row["row"], row) for row in best_rows(results)), "Each engine at its best")


PLOTS: dict[str, tuple[Callable[..., Plot], tuple[str, ...]]] = {
    "engine_plot": (_engine, ("engine",)),
    "engine_phases_plot": (_phases, ("engine",)),
    "engine_positions_plot": (_positions, ("engine",)),
    "peers_plot": (_peers, ("peers",)),
    "lantern_trade_off": (_lantern, ("lantern",)),
    "lossy_trade_off": (_lossy, ("ablations", "methods")),
    "tabed_weights": (_weights, ("ablations",)),
}
"""File name → the data of the plot, and the results that it reads."""


def plots_of(results: Mapping[str, Results]) -> dict[Path, Plot]:
    """Return the plots whose results exist, by file."""
    return {
        FOLDER / f"{name}.svg": make(*(results[source] for source in needed))
        for name, (make, needed) in PLOTS.items()
        if all(source in results for source in needed)
    }


def draw_changed(results: Mapping[str, Results]) -> None:
    """Draw the plots whose data differs from that of their files."""
    for path, plot in plots_of(results).items():
        if digest_of(path) != plot.digest:
            plot.draw(path)
