"""The comparison of recorded results with those of a second decoding."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from actors.losses import loss_of
from actors.margins import MARGINS
from pipeline.verify.compare import SCHEMA, RowComparison, first_difference
from pipeline.verify.rows import RECORDED


def row(name: str, tokens: list[int] | None, text: str | None = None, error: str = "") -> dict[str, Any]:
    return {
        "sample_id": name,
        "source": "a.txt",
        "row_index": int(name.partition("#")[0]),
        "finish_reason": "stop",
        "generated_text": text or " ".join(map(str, tokens or [])),
        "token_ids": tokens,
        "error_type": error,
        "error_message": f"about {error}" if error else "",
    }


def compared(old: list[dict[str, Any]], *new: list[dict[str, Any]], metric: str = "exact") -> RowComparison:
    comparison = RowComparison(pa.Table.from_pylist(old, RECORDED), loss_of(metric, "--metric"))
    schema = pa.schema([*RECORDED, ("error_type", pa.string()), ("error_message", pa.string())])
    for rows in new:
        comparison.add(pa.Table.from_pylist(rows, schema))
    comparison.finish()
    return comparison


def test_rows_are_joined_by_id_in_any_order_and_batches() -> None:
    old = [row("0", [1, 2, 3]), row("1", [4, 5]), row("2", [6])]
    comparison = compared(old, [row("2", [6])], [row("1", [4, 7]), row("0", [1, 2, 3]), row("9", [1])])
    assert comparison.counts == {"equal": 2, "different": 1, "by_tokens": 3}
    [result] = comparison.table().to_pylist()
    assert comparison.table().schema == SCHEMA
    assert (
        result["sample_id"],
        result["position"],
        result["recorded_token"],
        result["decoded_token"],
    ) == ("1", 1, 5, 7)
    assert (result["recorded_token_ids"], result["decoded_token_ids"], result["loss"]) == (
        [4, 5],
        [4, 7],
        1.0,
    )
    assert comparison.asked().to_pylist() == [
        {"sample_id": "1", "tokens": [4], "one": 7, "other": 5, "retry_index": None}
    ]


def test_failed_and_missing_rows_are_not_equal() -> None:
    comparison = compared([row("0", [1]), row("1", [2])], [row("0", [], error="engine_died")])
    assert comparison.counts == {"not_compared": 2}
    assert [row["error_type"] for row in comparison.table().to_pylist()] == ["engine_died", "missing"]
    assert comparison.num_samples() == (0, 0)
    assert not comparison.asked().num_rows


def test_rows_without_tokens_are_compared_by_text() -> None:
    old = [row("0", None, "a red ring"), row("1", None, "a blue star")]
    comparison = compared(old, [row("0", [7], "a red ring"), row("1", [8], "a bold star")])
    assert comparison.counts == {"equal": 1, "different": 1, "by_text": 2}
    [result] = comparison.table().to_pylist()
    assert (result["compared"], result["position"], result["recorded_token_ids"]) == ("text", 3, None)
    assert not comparison.asked().num_rows, "a text has no token to compute a margin of"


def test_a_text_that_its_tokens_do_not_give_differs() -> None:
    comparison = compared([row("0", [1, 2], "damaged")], [row("0", [1, 2], "1 2")])
    assert comparison.counts["different"] == 1
    assert comparison.table().to_pylist()[0]["recorded_token"] is None
    assert not comparison.asked().num_rows


def test_a_wrong_finish_reason_is_a_difference() -> None:
    comparison = compared([row("0", [1, 2])], [row("0", [1, 2]) | {"finish_reason": "length"}])
    assert comparison.counts == {"different": 1, "by_tokens": 1}
    [result] = comparison.table().to_pylist()
    assert (result["recorded_finish_reason"], result["decoded_finish_reason"]) == ("stop", "length")
    assert not comparison.asked().num_rows


def test_an_output_that_ends_early_has_no_tie() -> None:
    comparison = compared([row("0", [1, 2])], [row("0", [1, 2, 3])])
    assert (comparison.counts["different"], comparison.asked().num_rows) == (1, 0)


def test_margins_within_the_tolerance_make_ties() -> None:
    old, new = [row(str(n), [n, 1]) for n in range(3)], [row(str(n), [n, 2]) for n in range(3)]
    margins = [("0", 0.001, 0.01), ("1", -0.02, 0.01)]
    table = pa.Table.from_pylist([dict(zip(MARGINS.names, margin, strict=True)) for margin in margins], MARGINS)
    comparison = compared(old, new)
    comparison.add_margins(table, None)
    assert (comparison.counts["tie"], comparison.counts["different"]) == (1, 2)
    assert [row["outcome"] for row in comparison.table().to_pylist()] == ["tie", "different", "different"]
    assert comparison.num_samples() == (3, 2)
    wider = compared(old, new)
    wider.add_margins(table, 0.05)
    assert [row["tolerance"] for row in wider.table().to_pylist()] == [0.05, 0.05, None]
    assert wider.counts["tie"] == 2


def test_prompts_of_one_sample_count_as_one_sample() -> None:
    old = [row("0#0", [1]), row("0#1", [2]), row("1#0", [3])]
    comparison = compared(old, [row("0#0", [9]), row("0#1", [8]), row("1#0", [3])])
    assert comparison.counts["different"] == 2
    assert comparison.num_samples() == (2, 1)


def test_the_first_difference_of_sequences() -> None:
    assert [first_difference("abc", other) for other in ("xbc", "abd", "ab", "abcd", "")] == [0, 2, 2, 3, 0]


def test_rows_with_one_id_are_all_compared() -> None:
    """The same row twice, one of them with other tokens, and the id at another place of the source."""
    old = [row("0", [1, 2]), row("0", [1, 3]), row("1", [4]), row("0", [1, 2]) | {"row_index": 7}]
    comparison = compared(old, [row("1", [4]), row("0", [1, 2])])
    assert comparison.counts == {"equal": 2, "different": 1, "not_compared": 1, "by_tokens": 3}
    outcomes = [(row["outcome"], row["row_index"], row["error_type"]) for row in comparison.table().to_pylist()]
    assert outcomes == [("different", 0, None), ("not_compared", 7, "missing")]


def test_the_margin_of_one_row_is_not_that_of_another_with_its_id() -> None:
    old = [row("0", [1, 2]), row("0", [1, 3]), row("1", [4])]
    comparison = compared(old, [row("1", [5]), row("0", [1, 9])])
    assert comparison.asked()["sample_id"].to_pylist() == ["1"]
    margins = pa.table([["1"], [0.0], [1.0]], schema=MARGINS)
    comparison.add_margins(margins, None)
    assert comparison.counts == {"different": 2, "tie": 1, "by_tokens": 3}
