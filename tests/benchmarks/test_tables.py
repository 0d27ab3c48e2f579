"""The documents agree with the committed results, and tables and plots are rendered from rows and columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.harness.markdown import Cells
from benchmarks.tables.figures import FIGURE, refresh, unkeyed
from benchmarks.tables.parts import DOCUMENTS, MARK, PARTS, fill, read_all
from benchmarks.tables.plots import FOLDER, KINDS, PLOTS, Plot, digest_of, plots_of
from benchmarks.tables.specs import Table, load

RESULTS = read_all()


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_generated_parts_are_those_of_the_committed_results(document: Path) -> None:
    assert fill(document.read_text(), RESULTS) == document.read_text()


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_the_command_behind_a_part_is_printed_on_its_page(document: Path) -> None:
    text = document.read_text()
    makes = {name: f"make bench-{name}" for name in ("engine", "peers", "gpu")} | {"methods": "make bench"}
    parts = [PARTS[match["name"]] for match in MARK.finditer(text)]
    missing = [part.command for part in parts if part.command not in text and makes.get(part.source, "–") not in text]
    assert missing == []


def test_every_part_is_shown_in_a_document() -> None:
    shown = {match["name"] for document in DOCUMENTS for match in MARK.finditer(document.read_text())}
    assert shown == set(PARTS)


def test_a_benchmark_that_was_not_run_has_a_note_instead_of_a_table() -> None:
    text = "before\n<!-- table: engine -->\nold figures\n<!-- end -->\nafter"
    assert fill(text, {}) == text.replace("old figures", "`python -m benchmarks.engine` was not run yet.")


# --- cells and tables ----------------------------------------------------------------------------------------------


def test_cells_render_shares_ranges_quotients_lists_verdicts_and_withheld_figures() -> None:
    speed = {"median": 2.0, "low": 1.5, "high": 2.25}
    verdict = {"num_sequences": 4, "num_equal": 3, "num_different": 1}
    assert Cells().format("{0:.1%} · {1:.1f} · {2} · {3:.1f}", 0.125, speed, verdict, None) == (
        "12.5 % · 2.0 (1.5–2.2) · 75.0 %, **1 beyond rounding** · withheld"
    )
    assert Cells().format("{0:/60 .1f} · {1:.0f}", 90, [1.0, 2.0]) == "1.5 · 1 · 2"


def test_rows_are_found_by_a_path_whose_keys_are_columns() -> None:
    path = "pairs.*.rows.*"
    made = Table("pair | place | value", "{0} | {1} | {twice:.1f}", path, lambda row: {"twice": 2 * row["x"]})
    results = {"pairs": {"a": {"rows": [{"x": 1}, {"x": 2}]}, "b": {"rows": [{"x": 4}]}}}
    assert made(results).splitlines()[2:] == ["| a | 0 | 2.0 |", "| a | 1 | 4.0 |", "| b | 0 | 8.0 |"]


def test_a_missing_field_is_an_error_unless_the_table_allows_it() -> None:
    results = {"rows": [{"x": 1}]}
    with pytest.raises(KeyError, match="y"):
        Table("x | y", "{x} | {y}")(results)
    assert Table("x | y", "{x} | {y}", absent="–")(results).endswith("| 1 | – |")


SPECS = """
gone:
  commit: "abc123"
  command: python -m gone
  parts:
    old: {titles: x, cells: "{x}"}
here:
  command: python -m here
  parts:
    section: {at: a.b, left_out: true, before: "**{name}**", titles: x, cells: "{x}"}
    words: {text: "it is {name}"}
"""


def test_specifications_render_surroundings_reasons_and_the_commit_of_deleted_code(tmp_path: Path) -> None:
    (tmp_path / "specs.yaml").write_text(SPECS)
    parts = load({}, tmp_path)
    assert parts["old"].render({"rows": [{"x": 1}]}).splitlines()[-1] == (
        "Measured at commit `abc123` by `python -m gone`; that code was deleted since."
    )
    rows: dict[str, Any] = {"rows": [{"x": 1}], "left_out": ["y"]}
    section = parts["section"].render
    assert section({"name": "one", "a": {"b": rows}}) == "**one**\n\n| x |\n|---|\n| 1 |\n\nLeft out: y."
    assert section({"a": {}}) == "Not measured yet."
    assert section({"a": {}, "skipped": {"a.b": "no time"}}) == "*a.b*: no figures, no time."
    assert parts["words"].render({"name": "one"}) == "it is one"


# --- plots ---------------------------------------------------------------------------------------------------------


def test_plots_have_the_data_of_the_committed_results_and_there_are_no_others() -> None:
    plots = plots_of(RESULTS)
    assert {path: digest_of(path) for path in plots} == {path: plot.digest for path, plot in plots.items()}
    assert {FOLDER / f"{name}.svg" for name in PLOTS} == set(FOLDER.glob("*.svg"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_plot_is_drawn_with_its_names_and_twice_the_same(kind: str, tmp_path: Path) -> None:
    data: dict[str, Any] = {
        "ranges": {"a < b": [(1, 50.0, 40.0, 60.0), (8, 100.0, 100.0, 100.0)], "two": [(8, 3.0, 2.0, 5.0)]},
        "bars": {"a < b": (0.1, 0.2, 0.3, 0.2, 0.2)},
        "trade_off": {"a < b": [(2.0, 1.0), (1.0, 2.0)], "two": [(1.0, 1.0)]},
        "strips": {"a < b": [0.0, 1.0], "two": [0.5]},
    }[kind]
    plot = Plot(kind, ("title", "across", "up"), data)
    files = [tmp_path / name for name in ("one.svg", "two.svg")]
    for path in files:
        plot.draw(path)
    texts = [path.read_text() for path in files]
    ElementTree.fromstring(texts[0])
    assert texts[0] == texts[1]
    assert digest_of(files[0]) == plot.digest != Plot(kind, ("other", "across", "up"), data).digest
    assert "a &lt; b" in texts[0]
    assert "title" in texts[0]


def test_a_withheld_speed_has_no_point_and_is_named() -> None:
    peers: dict[str, Any] = RESULTS["peers"]
    rows = [
        row | {"tokens_per_s": None} if (row["batch"], row["row"]) == (8, "transformers") else row
        for row in peers["rows"]
    ]
    (plot,) = plots_of({"peers": {**peers, "rows": rows}}).values()
    assert [x for x, *_ in plot.data["transformers (withheld at 8)"]] == [1, 32]


# --- what the documents claim of committed results -----------------------------------------------------------------


# --- figures in prose ----------------------------------------------------------------------------------------------

LOG = Path("docs/design/log.md")
KEYED_SECTIONS = ("## LANTERN on the zoo's image models\n", "## The papers' claims on the shipped pair\n")


def test_a_figure_is_rendered_by_its_key_and_a_stale_one_is_replaced() -> None:
    results: dict[str, Any] = {"some": {"a b": {"x": [0.5, 0.25]}, "n": 1234}}
    text = "it is 9.99<!-- = some > a b > x > 1 : .1% --> of 7<!-- = some > n : ,.0f -->"
    ratio = "<!-- = some > a b > x > 0 / a b > x > 1 : .1f -->"
    assert refresh(f"{text}; 1.0{ratio}", results) == (
        f"it is 25.0 %<!-- = some > a b > x > 1 : .1% --> of 1,234<!-- = some > n : ,.0f -->; 2.0{ratio}"
    )
    with pytest.raises(KeyError):
        refresh("1<!-- = some > gone : d -->", results)


def test_a_number_without_a_key_is_found() -> None:
    text = "at δ = 0.1 it is 1.25, in the paper 1.20<!-- paper -->, `0.5`, and 3.1<!-- = some > n : .1f -->"
    assert unkeyed(f"{text} at guidance 7.5.") == ["1.25"]


@pytest.mark.parametrize("section", KEYED_SECTIONS)
def test_the_discussion_of_the_claims_has_no_number_typed_by_hand(section: str) -> None:
    text = LOG.read_text(encoding="utf-8").split(section)[1].split("\n## ")[0]
    assert len(FIGURE.findall(text)) > 20
    assert unkeyed(text) == []


def test_a_stale_figure_in_a_document_is_found() -> None:
    text = LOG.read_text(encoding="utf-8")
    first = FIGURE.search(text)
    assert first is not None
    stale = text.replace(first[0], first[0].replace(first["figure"], "0.001", 1), 1)
    assert fill(text, RESULTS) == text != stale
    assert fill(stale, RESULTS) == text
