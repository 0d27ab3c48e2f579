"""The crash ledger counts the crashes of a row, forgets finished rows, and detects too many failures."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from actors.serving.crash_ledger import HOPELESS_FROM_ROWS, ErrorBudgetSpent
from pipeline.rows.schemas import ERROR_CODES
from pipeline.run.crash_ledger import CrashLedgerState, with_ledger
from tests.actors.fakes import decoded_table
from tests.actors.poison import LocalLedger


def test_a_death_counts_for_every_row_without_deaths_and_otherwise_for_rows_that_ran() -> None:
    book = CrashLedgerState()
    assert book.begin("first", ["a", "b", "c"]) == [0, 0, 0]
    assert book.begin("second", ["a", "b", "c"]) == [1, 1, 1]
    book.running("second", ["a", "b"])
    assert book.begin("third", ["a", "b", "c"]) == [2, 2, 1]
    book.running("third", ["a"])
    book.running("third", ["b"])
    assert book.begin("fourth", ["c", "b", "a"]) == [1, 3, 2]


def test_a_batch_that_the_same_process_begins_twice_counts_no_death() -> None:
    book = CrashLedgerState()
    assert book.begin("one", ["a"]) == [0]
    assert book.begin("one", ["a"]) == [0]


def test_the_crash_ledger_removes_finished_rows_and_keeps_rows_that_were_given_up() -> None:
    book = CrashLedgerState()
    book.begin("p0", ["a", "b"])
    for life in range(1, 4):
        book.begin(f"p{life}", ["a", "b"])
        book.running(f"p{life}", ["a"])
    assert book.begin("p4", ["a", "b"]) == [4, 1]
    book.end("p4", ["a", "b"], 2, {"engine_died": 1})
    assert book.num_known() == 1
    assert book.begin("p5", ["a", "b"]) == [4, 0], "what was given up is given up again, should its block be lost"
    book.end("p5", ["a", "b"], 2, {"engine_died": 1})
    assert book._running == {}


def test_a_late_message_of_a_replaced_process_is_ignored() -> None:
    book = CrashLedgerState()
    book.begin("old", ["a"])
    book.begin("new", ["a"])
    book.end("old", ["a"], 1, {})
    assert book.begin("newer", ["a"]) == [1]


def test_deaths_in_loading_count_until_an_actor_has_loaded_and_not_on_a_drained_node() -> None:
    book = CrashLedgerState()
    assert [book.begin_load("a", "n1") for _ in range(3)] == [0, 1, 2]
    assert book.begin_load("b", "n1") == 0
    book.end_load("a")
    assert [book.begin_load("a", node) for node in ("n1", "n2")] == [0, 1]
    book.spare(["n2"])
    assert [book.begin_load("a", node) for node in ("n1", "n1")] == [1, 2]
    assert book.engine_failure() == ""
    book.end_load("a", "the first reason")
    book.end_load("b", "the second")
    assert book.engine_failure() == "the first reason"


def kill(book: CrashLedgerState, keys: list[str], num_deaths: int = 3) -> None:
    """Processes that each die with all of these rows running."""
    for life in range(num_deaths + 1):
        book.begin(f"{keys[0]}-{life}", keys)
        book.running(f"{keys[0]}-{life}", keys)


@pytest.mark.parametrize("num_rows", [HOPELESS_FROM_ROWS - 1, HOPELESS_FROM_ROWS])
@pytest.mark.parametrize("survivor", ["", "engine\ngood", "decode\ngood"])
def test_rows_that_all_end_their_process_end_the_job(num_rows: int, survivor: str) -> None:
    book = CrashLedgerState()
    if survivor:
        book.begin("early", [survivor])
        book.end("early", [survivor], 1, {})
    kill(book, [f"engine\n{number}" for number in range(num_rows)])
    is_hopeless = num_rows == HOPELESS_FROM_ROWS and survivor != "engine\ngood"
    assert ("no other row was finished" in book.engine_failure()) == is_hopeless


def test_a_finished_suspect_keeps_the_job_running() -> None:
    book = CrashLedgerState()
    keys = [f"engine\n{number}" for number in range(HOPELESS_FROM_ROWS)]
    book.begin("one", keys)
    book.running("one", keys[:1])
    book.running("one", keys[1:2])
    kill(book, keys)
    assert book.engine_failure() == ""


def test_a_share_of_errors_counts_from_the_minimum_number_of_rows() -> None:
    book = CrashLedgerState(max_error_share=0.1, min_rows=20)
    assert book.end("p", [], 19, {"broken_image": 19}) == ""
    verdict = book.end("p", [], 1, {"prompt_refused": 1})
    assert verdict == (
        "20 of 20 rows failed (100.0 %), more than job.max_error_share (0.1) allows: 19 broken_image, 1 prompt_refused"
    )
    exact = CrashLedgerState(max_error_share=0.5, min_rows=1)
    assert exact.end("p", [], 2, {"broken_image": 1}) == "", "the share itself is allowed"
    assert exact.end("p", [], 1, {"broken_image": 1}) != ""
    assert CrashLedgerState().end("p", [], 5, {"broken_image": 5}) == "", "no limit"


def test_no_error_at_all_may_be_allowed() -> None:
    ledger = LocalLedger(CrashLedgerState(max_error_share=0.0))
    ledger.end("p", [], 1000, {})
    with pytest.raises(ErrorBudgetSpent, match="1 of 1,001 rows failed"):
        ledger.end("p", [], 1, {"broken_image": 1})


class Crash(BaseException):
    """The end of a process."""


def test_a_row_that_ends_the_decoding_process_is_given_up_at_the_third_time() -> None:
    """Ray gives the same batch to a new process after each death; rows are counted separately from the second on."""
    book, seen = CrashLedgerState(), []
    table = decoded_table([{"id": f"s{index}", "text": "x"} for index in range(6)])

    def decode(rows: pa.Table) -> pa.Table:
        seen.append(rows["sample_id"].to_pylist())
        for sample_id, code in zip(*(rows[name].to_pylist() for name in ("sample_id", "error_type")), strict=True):
            if sample_id in ("s1", "s4") and not code:
                raise Crash
        return rows

    deaths, result = 0, None
    while result is None:
        try:
            result = with_ledger(decode, LocalLedger(book))(table)
        except Crash:
            deaths += 1
            assert deaths < 20, "the rows kill for ever"
    assert deaths == 5, "one for all of them, then two for each"
    assert seen[0] == [f"s{index}" for index in range(6)]
    assert seen[1:3] == [["s0"], ["s1"]]
    result_rows: list[dict[str, Any]] = result.to_pylist()
    assert [row["sample_id"] for row in result_rows] == [f"s{index}" for index in range(6)]
    assert [row["error_type"] for row in result_rows] == ["", "decoder_died", "", "", "decoder_died", ""]
    assert "decoder_died" in ERROR_CODES
    assert "3 times" in result_rows[1]["error_message"]
    assert result.schema == table.schema


def test_rows_without_deaths_are_decoded_as_one_table() -> None:
    calls: list[int] = []
    table = decoded_table([{"id": f"s{index}"} for index in range(4)])
    book = CrashLedgerState()
    assert with_ledger(lambda rows: (calls.append(rows.num_rows), rows)[1], LocalLedger(book))(table).equals(table)
    assert calls == [4]
    assert book.num_known() == 0


def test_an_empty_table_passes() -> None:
    table = decoded_table([])
    assert with_ledger(lambda rows: rows, LocalLedger(CrashLedgerState()))(table).equals(table)
