"""What a process says about the rows it holds, to somebody who outlives it; and what follows from a row's past.

Knows rows by a key alone. Who keeps the journal, and where, is told by whoever builds the graph.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Protocol
from uuid import uuid4

import pyarrow as pa

ALONE_FROM_DEATHS = 2
"""A row that was in flight at so many deaths of processes is decoded with nothing beside it."""
GIVEN_UP_FROM_DEATHS = 3
"""A row that was in flight at so many is not run again: it becomes an error row."""


ENGINE_DIED = "engine_died"


class ErrorBudgetSpent(RuntimeError):
    """More rows have failed than the job allows; the message says how many, and why they failed."""


class Journal(Protocol):
    """What a process of one stage may say. Every call returns when it has been written down."""

    def begin(self, who: str, keys: Sequence[str]) -> list[int]:
        """Process `who` holds these rows from now on; how many deaths each of them was in."""
        ...

    def running(self, who: str, keys: Sequence[str]) -> None:
        """Of its rows with a past, `who` works on exactly these from now on."""
        ...

    def end(self, who: str, keys: Sequence[str], num_results: int, errors: Mapping[str, int]) -> None:
        """`who` is done with these rows; they became so many rows of the output, of which some failed, by code.

        Raises:
            ErrorBudgetSpent: too many rows have failed; the job is to end.
        """
        ...


def row_keys(table: pa.Table) -> list[str]:
    """What a table's rows are called in the journal: their ids, and where they come from, should ids repeat."""
    columns = (table.column(name).to_pylist() for name in ("sample_id", "source", "row_index"))
    return [f"{sample_id}\n{source}\n{row_index}" for sample_id, source, row_index in zip(*columns, strict=True)]


def told_of_deaths(what: str, num_deaths: int) -> str:
    """The message of a row that was given up; `what` is the kind of process that died."""
    return (
        f"{what} died {num_deaths} times while it had this row, the last time with nothing beside it; "
        "the row was not run again"
    )


class NoJournal:
    """The journal where nobody keeps one: no row has a past."""

    def begin(self, who: str, keys: Sequence[str]) -> list[int]:
        return [0] * len(keys)

    def running(self, who: str, keys: Sequence[str]) -> None:
        pass

    def end(self, who: str, keys: Sequence[str], num_results: int, errors: Mapping[str, int]) -> None:
        pass


class Holder:
    """One process in a journal, under a name that no other process ever has; several of its parts may run rows."""

    def __init__(self, journal: Journal | None) -> None:
        self._journal = journal or NoJournal()
        self._who = uuid4().hex
        self._parts: dict[str, list[str]] = {}
        self._lock = threading.Lock()

    def begin(self, keys: Sequence[str]) -> list[int]:
        """See `Journal.begin`."""
        return self._journal.begin(self._who, keys)

    def running(self, part: str, keys: Sequence[str]) -> None:
        """Of the rows with a past, this part of the process works on exactly these from now on."""
        with self._lock:
            self._parts[part] = list(keys)
            self._journal.running(self._who, sorted({key for keys in self._parts.values() for key in keys}))

    def end(self, keys: Sequence[str], num_results: int, errors: Mapping[str, int]) -> None:
        """See `Journal.end`."""
        self._journal.end(self._who, keys, num_results, errors)
