"""Figures and recommendations of a comparison, on rows whose truth is known."""

from __future__ import annotations

import csv
import io
from dataclasses import replace

import numpy as np
import pytest

from pipeline.compare import plots, tables
from pipeline.compare.figures import ComparedRow, Key, compare

NUM_ROWS = 200


def output(speed: float, lossless: bool = True, accepted: int = 0, changed: int = 0) -> dict[Key, ComparedRow]:
    """Rows of very different lengths, whose time is that of plain decoding over `speed`; `changed` of them differ."""
    rng, noise = np.random.default_rng(0), np.random.default_rng(int(1000 * speed))
    rows: dict[Key, ComparedRow] = {}
    for index in range(NUM_ROWS):
        num_tokens = int(rng.integers(4, 200))
        steps = num_tokens // (1 + accepted)
        tokens = tuple(range(num_tokens)) if index >= changed else tuple(range(1000, 1000 + num_tokens))
        rows["a.txt", index, None, None, None, f"a#{index}"] = ComparedRow(
            num_tokens / 100 / speed * float(noise.lognormal(0, 0.02)),
            *(num_tokens, steps, steps * accepted, (0,) * accepted + (steps,)),
            "",
            tokens,
            lossless,
        )
    return rows


def test_speed_and_equality_are_those_of_the_rows() -> None:
    comparison = compare({"plain": output(1.0), "fast": output(1.5, accepted=2)}, slots=8)
    plain, fast = comparison.methods
    assert (plain.speedup.value, fast.speedup.low < 1.5 < fast.speedup.high) == (1.0, True)
    assert fast.speedup.high - fast.speedup.low < 0.05  # pairs: lengths of rows do not widen it
    assert (fast.equal, fast.loss.value, fast.acceptance_length.value) == (1.0, 0.0, 3.0)
    assert fast.by_position == (1.0, 1.0)
    assert comparison.recommended == "fast"
    assert "the fastest lossless method: 1.5" in comparison.reason


def test_a_method_that_is_not_measurably_faster_is_not_recommended() -> None:
    slow = compare({"plain": output(1.0), "slow": output(0.7)}, slots=8)
    assert (slow.recommended, "no lossless method is faster: slow reaches 0.70x" in slow.reason) == ("plain", True)
    alike = compare({"plain": output(1.0), "alike": output(0.999)}, slots=8)
    assert alike.recommended == "plain"
    assert "measurably" in alike.reason


def test_a_lossy_method_is_named_with_its_loss_and_never_recommended() -> None:
    outputs = {"plain": output(1.0), "exact": output(1.5), "lossy": output(2.0, lossless=False, changed=50)}
    comparison = compare(outputs, slots=8)
    assert comparison.recommended == "exact"
    assert "lossy reaches 2.0" in comparison.reason
    assert "25.0 % edit distance, 75 % of rows equal" in comparison.reason
    lossy = comparison.methods[2]
    assert lossy.loss.low < 0.25 < lossy.loss.high


def test_rows_that_a_method_lacks_are_left_out_of_all() -> None:
    short = {key: row for key, row in output(1.5).items() if key[1] >= 20}
    comparison = compare({"plain": output(1.0), "short": short}, slots=8)
    assert (comparison.num_rows, comparison.num_left_out) == (NUM_ROWS - 20, 20)
    assert {method.num_rows for method in comparison.methods} == {NUM_ROWS - 20}
    with pytest.raises(ValueError, match="no row was decoded by all methods"):
        compare({"plain": output(1.0), "none": {}}, slots=8)


def test_texts_are_compared_if_tokens_are_unknown() -> None:
    plain = {key: replace(row, tokens=None, text="abcd") for key, row in output(1.0).items()}
    other = {key: replace(row, tokens=None, text="abxd") for key, row in output(1.2).items()}
    figures = compare({"plain": plain, "other": other}, slots=8).methods[1]
    assert (figures.equal, figures.loss.value) == (0.0, 0.25)


def test_tables_have_every_method_and_plots_are_drawn() -> None:
    comparison = compare({"plain": output(1.0), "a|b": output(1.5, accepted=2)}, slots=8)
    shown = tables.as_terminal(comparison).splitlines()
    assert shown[0].split()[:2] == ["method", "rows/s"]
    assert len(shown[2].split("  ")) > 3
    assert r"a\|b" in tables.as_markdown(comparison)
    [plain, other] = csv.DictReader(io.StringIO(tables.as_csv(comparison)))
    assert (plain["name"], float(other["speedup"])) == ("plain", comparison.methods[1].speedup.value)
    drawn = plots.draw(comparison)
    assert sorted(drawn) == ["acceptance_by_position.png", "speed_over_loss.png"]
    assert all(data.startswith(b"\x89PNG") for data in drawn.values())
