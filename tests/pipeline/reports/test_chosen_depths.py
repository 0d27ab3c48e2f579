"""Chosen depths in the summary: from choices to a row's telemetry, to sums, to lines."""

from __future__ import annotations

import json

from decoding.controllers.base import DepthChoice
from decoding.stats import Choices
from pipeline.reports.chosen_depths import ChosenDepths
from pipeline.reports.summary import Summary, combine


def row(choices: list[tuple[int, DepthChoice]]) -> str:
    """The extras of a row that took part in these steps, as they lie in the file."""
    counted = Choices()
    for num_active, choice in choices:
        counted.add(num_active, choice)
    return json.dumps({"lookup_match_rate": 0.5} | counted.extras())


FIRST = row(
    [
        (8, DepthChoice(0, "start")),
        (7, DepthChoice(5, "start", 30.0, 10.0)),
        (3, DepthChoice(5, "best", 60.0, 20.0)),
        (3, DepthChoice(2, "explore", 40.0, 20.0)),
        (3, DepthChoice(0, "last")),
    ]
)
SECOND = row([(5, DepthChoice(0, "best", 10.0, 10.0)), (5, DepthChoice(0, "best", 50.0, 40.0))])


def summed(*rows: str | None) -> ChosenDepths:
    depths = ChosenDepths()
    for extras in rows:
        depths.add_row(extras)
    return depths


def test_the_extras_of_a_row_record_the_depths_of_its_trees_and_the_reasons() -> None:
    result = json.loads(FIRST)["controller"]
    assert (result["levels_mean"], result["levels_max"]) == (3.0, 5)
    assert (result["num_off_steps"], result["num_measuring_steps"]) == (1, 3)
    assert result["by_batch_size"]["8"]["levels"] == {"0": 1, "5": 1}
    assert result["by_batch_size"]["4"] == {
        "levels": {"2": 1, "5": 1},
        "num_promised_steps": 2,
        "tokens_per_s": 50.0,
        "plain_tokens_per_s": 20.0,
    }


def test_without_chosen_depths_nothing_is_reported() -> None:
    counted = Choices()
    counted.add(4, DepthChoice(5, "fixed"))
    assert counted.extras() == {}
    assert summed(None, "", "{}", '{"note": 1}').lines() == []


def test_rows_add_up_by_batch_size() -> None:
    depths = summed(FIRST, SECOND)
    assert (depths.num_steps, depths.num_off_steps, depths.num_measuring_steps) == (6, 3, 3)
    assert depths.by_batch_size[8].levels == {0: 3, 5: 1}
    assert depths.lines() == [
        ("depths chosen", "off in 50 % of steps, 50.0 % to measure"),
        ("  batch 4", "2: 50 %, 5: 50 % (expected tokens/s 50, plain 20)"),
        ("  batch 8", "0: 75 %, 5: 25 % (expected tokens/s 30, plain 20)"),
    ]
    assert depths.to_json()["by_batch_size"][8]["tokens_per_s"] == 30.0
    json.dumps(depths.to_json())


def test_jobs_add_up_as_their_rows_do() -> None:
    parts = []
    for extras in (FIRST, SECOND):
        part = Summary("j", "m", "lossless", 1.0)
        part.depths.add_row(extras)
        parts.append(part)
    total = combine(parts)
    assert total.depths == summed(FIRST, SECOND)
    assert ("depths chosen", "off in 50 % of steps, 50.0 % to measure") in total.lines()
