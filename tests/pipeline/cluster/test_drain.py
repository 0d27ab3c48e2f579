"""A draining node is recorded once in the crash ledger, its rows are saved at once, and no row is blamed for it."""

from __future__ import annotations

import io
import json
import sys
import threading
from collections.abc import Mapping
from typing import Any

import pytest

from actors.events import Events
from actors.results import Stamp
from pipeline.cluster.drain import Drains, watch_drains
from pipeline.run.crash_ledger import CrashLedgerState


class RecordedCalls:
    """The calls to the crash ledger and the writer, in order."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def drains(self, events: Events | None = None) -> Drains:
        return Drains(lambda nodes: self.calls.append(nodes), lambda flag: self.calls.append(flag), events)


def test_a_draining_node_is_reported_once_and_writes_are_immediate_while_any_node_drains() -> None:
    result = RecordedCalls()
    drains = result.drains()
    for draining in ({}, {"b": 0, "a": 0}, {"b": 0, "a": 0}, {"b": 0, "c": 0}, {}, {}, {"b": 0}):
        drains.look(draining)
    assert result.calls == [True, ["a", "b"], ["c"], False, True]


def test_a_draining_node_is_logged_with_its_deadline(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("time.time", lambda: 1000.0)
    RecordedCalls().drains().look({"0123456789abcdef": 1_025_400, "f" * 56: 0})
    assert capsys.readouterr().err.splitlines() == [
        "node 0123456789ab drains, gone in 25 s: new rows go to other nodes",
        "node ffffffffffff drains: new rows go to other nodes",
    ]
    line = io.StringIO()
    monkeypatch.setattr(sys, "stderr", line)
    RecordedCalls().drains(Events(Stamp("job-1", 2, "f"), enabled=True)).look({"0123": 1_025_400})
    message = json.loads(line.getvalue())
    assert (message["event"], message["level"], message["node"], message["left_s"]) == (
        "node_drains",
        "warning",
        "0123",
        25.4,
    )


def test_nodes_are_watched_until_the_block_ends() -> None:
    result, seen = RecordedCalls(), threading.Event()

    def look() -> Mapping[str, int]:
        if result.calls:
            seen.set()
        return {"a": 0}

    with watch_drains(result.drains(), look, every_s=0.001):
        assert seen.wait(600)
    assert result.calls == [True, ["a"]]
    assert "drains" not in {thread.name for thread in threading.enumerate()}


def test_a_process_that_ends_on_a_draining_node_counts_no_death() -> None:
    book = CrashLedgerState()
    book.begin("p0", ["a", "b"], "going")
    book.spare(["going"])
    assert book.begin("p1", ["a", "b"], "staying") == [0, 0]
    assert book.begin("p2", ["a", "b"], "staying") == [1, 1], "elsewhere it is, also later"
    book.running("p2", ["a"])
    book.spare(["staying"])
    assert book.begin("p3", ["a", "b"], "third") == [1, 1], "a suspect that runs is spared as well"
    assert book._running == {}
    book.running("p3", ["a"])
    assert book.begin("p4", ["a", "b"], "third") == [2, 1]


def test_a_row_that_ends_processes_on_several_nodes_is_given_up_also_while_nodes_drain() -> None:
    book = CrashLedgerState()
    book.spare(["n0"])
    deaths = []
    for life in range(6):
        deaths += book.begin(f"p{life}", ["poison"], f"n{life}")
        book.running(f"p{life}", ["poison"])
    assert deaths == [0, 0, 1, 2, 3, 4], "one death is not counted, and no more than that"
