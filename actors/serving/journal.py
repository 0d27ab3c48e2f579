"""The crash journal: records which rows a process runs, to find rows that kill processes."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Protocol
from uuid import uuid4

import pyarrow as pa

ALONE_FROM_DEATHS = 2
"""From this many deaths of processes, a row is decoded alone."""
GIVEN_UP_FROM_DEATHS = 3
"""From this many, a row is not run again and becomes an error row."""

ENGINE_DIED = "engine_died"


class ErrorBudgetSpent(RuntimeError):
    """More rows failed than the job allows; the message has their number and causes."""


class Journal(Protocol):
    """The journal of one stage. Every call returns after the entry is durable."""

    def begin(self, who: str, keys: Sequence[str]) -> list[int]:
        """Record that process `who` takes these rows; return how many deaths each row was in flight at."""
        ...

    def running(self, who: str, keys: Sequence[str]) -> None:
        """Record that `who` runs exactly these of its suspect rows."""
        ...

    def end(self, who: str, keys: Sequence[str], num_results: int, errors: Mapping[str, int]) -> None:
        """Record that `who` finished these rows with `num_results` output rows; `errors` counts failed rows by code.

        Raises:
            ErrorBudgetSpent: too many rows failed; the job must stop.
        """
        ...


def row_keys(table: pa.Table) -> list[str]:
    """Keys of a table's rows in the journal; unique even if sample ids repeat."""
    columns = (table.column(name).to_pylist() for name in ("sample_id", "source", "row_index"))
    return [f"{sample_id}\n{source}\n{row_index}" for sample_id, source, row_index in zip(*columns, strict=True)]


def deaths_message(process: str, num_deaths: int) -> str:
    """The error message of a row that is not run again."""
    return (
        f"{process} died {num_deaths} times while it had this row, the last time with nothing beside it; "
        "the row was not run again"
    )


class JournalClient:
    """One process in a journal, under a unique name; several parts of the process may run rows. Thread-safe.

    Without a journal nothing is recorded, and no row is a suspect. For the methods see `Journal`.
    """

    def __init__(self, journal: Journal | None) -> None:
        self._journal = journal
        self._who = uuid4().hex
        self._parts: dict[str, Sequence[str]] = {}
        self._lock = threading.Lock()

    def begin(self, keys: Sequence[str]) -> list[int]:
        return [0] * len(keys) if self._journal is None else self._journal.begin(self._who, keys)

    def running(self, part: str, keys: Sequence[str]) -> None:
        """Of the suspect rows, this part of the process runs exactly these."""
        if self._journal is None:
            return
        with self._lock:
            self._parts[part] = list(keys)
            self._journal.running(self._who, sorted({key for keys in self._parts.values() for key in keys}))

    def end(self, keys: Sequence[str], num_results: int, errors: Mapping[str, int]) -> None:
        if self._journal is not None:
            self._journal.end(self._who, keys, num_results, errors)
