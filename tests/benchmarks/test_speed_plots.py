"""Tests speed plots: positions of marks, no marks for withheld results, and deterministic output."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks import speed_plots
from benchmarks.harness.plots import range_curves, stacked_bars
from benchmarks.tables import __main__ as tables

TITLES = ("a < b", "across", "up, tokens/s")


def circles(picture: str) -> list[tuple[float, float]]:
    """The points, and the keys of the legend."""
    return [(float(x), float(y)) for x, y in re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', picture)]


def test_points_are_placed_on_an_axis_from_zero_to_a_round_number() -> None:
    picture = range_curves({"one": {"1": (50.0, 40.0, 60.0), "8": (100.0, 100.0, 100.0)}}, ["1", "8"], TITLES)
    ElementTree.fromstring(picture)
    (_, low), (_, high), key = circles(picture)
    assert (low, high) == (40 + 150, 40), "100 is the top of 300 pixels"
    assert key[0] > 500
    assert f'y1="{40 + 300 * 0.6:.1f}" x2' in picture, "40 at the lower end of the range"
    assert f'y2="{40 + 300 * 0.4:.1f}" stroke' in picture, "60 at its upper end"
    assert ">100<" in picture
    assert ">120<" not in picture, "the axis ends at the first round number that holds all"
    assert "a &lt; b" in picture
    assert "up, tokens/s" in picture


def test_a_place_without_a_value_has_no_point() -> None:
    both = {"one": {"1": (1.0, 1.0, 1.0)}, "two": {"1": (2.0, 2.0, 2.0), "8": (3.0, 3.0, 3.0)}}
    assert len(circles(range_curves(both, ["1", "8"], TITLES))) == 3 + 2


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_a_value_that_cannot_be_drawn_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="finite numbers from 0 on"):
        range_curves({"one": {"1": (value, 1.0, 1.0)}}, ["1"], TITLES)
    with pytest.raises(ValueError, match="finite numbers from 0 on"):
        range_curves({"one": {}}, ["1"], TITLES)


def test_the_parts_of_a_bar_fill_it() -> None:
    picture = stacked_bars({"row": {"a": 1.0, "b": 3.0, "c": 0.0}}, "title", "share")
    widths = [float(width) for width in re.findall(r'<rect x="[\d.]+" y="\d+" width="([\d.]+)"', picture)]
    assert widths == [122.5, 367.5, 0.0]
    assert ">25<" in picture
    assert ">75<" in picture
    five = stacked_bars(
        {"row": dict.fromkeys(["prompts", "drafts", "verifying", "committing", "between"], 1.0)}, "", ""
    )
    assert max(x for x, _ in circles(five)) + 12 + 8 * len("committing") < 720, "the last name is not cut off"
    with pytest.raises(ValueError, match="no shares of a whole"):
        stacked_bars({"row": {"a": 0.0}}, "title", "share")
    with pytest.raises(ValueError, match="no shares of a whole"):
        stacked_bars({"row": {"a": -1.0, "b": 2.0}}, "title", "share")


def test_pictures_are_those_of_the_committed_results_and_there_are_no_others() -> None:
    made = speed_plots.draw_all(tables.read_results())
    for path, picture in made.items():
        assert path.read_text() == picture
        ElementTree.fromstring(picture)
    others = {speed_plots.file_of(name) for name in speed_plots.PLOTS} - set(made)
    assert [path for path in others if path.exists()] == []


def test_without_results_a_page_explains_how_to_make_the_picture() -> None:
    text = "<!-- table: engine_plot -->\n<!-- end -->"
    assert tables.fill(text, {}).splitlines()[1] == "`python -m benchmarks.engine` was not run yet."
    shown = tables.fill(text, {"engine": {}}).splitlines()[1]
    assert shown == "![throughput of this engine over the batch](engine_plot.svg)"


def test_every_engine_of_the_peers_has_its_range_and_one_whose_outputs_differ_has_no_point() -> None:
    results: dict[str, Any] = tables.read_results()["peers"]
    picture = speed_plots.draw_peers(results)
    names = {row["row"] for row in results["rows"]}
    withheld = next(row for row in results["rows"] if row["batch"] == 8 and row["row"] == "transformers")
    others = [
        {**row, "tokens_per_s": None} if (row["batch"], row["row"]) == (8, withheld["row"]) else row
        for row in results["rows"]
    ]
    fewer = speed_plots.draw_peers({**results, "rows": others})
    assert all(f">{name}<" in picture for name in names)
    assert len(circles(fewer)) == len(circles(picture)) - 1
    assert ">transformers (withheld at 8)<" in fewer


def test_pictures_lie_where_the_page_looks_for_them() -> None:
    assert Path("docs/results/performance.md") in tables.DOCUMENTS
    assert {speed_plots.file_of(name).parent for name in speed_plots.PLOTS} == {Path("docs/results")}
