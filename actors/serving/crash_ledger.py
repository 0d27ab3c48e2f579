"""Records in the crash ledger which rows a process runs, to find rows that end processes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol
from uuid import uuid4

import pyarrow as pa

ALONE_FROM_DEATHS = 2
"""A row that was in flight at this number of process deaths is decoded alone."""
GIVEN_UP_FROM_DEATHS = 3
"""A row that was in flight at this number of process deaths is not run again and becomes an error row."""

MAX_LOAD_DEATHS = 3
"""Process deaths of one actor, one after the other while it loaded its models, at which the job ends."""
HOPELESS_FROM_ROWS = 10
"""Number of rows of a stage that were given up, without a row that survived, at which the job ends."""
MAX_REASON_CHARS = 1000

ENGINE_DIED = "engine_died"


class ErrorBudgetSpent(RuntimeError):
    """Raised if more rows failed than the job allows; the message has their number and causes."""


class EngineFailed(RuntimeError):
    """Raised if the models of a job cannot be loaded, or every row ends its process; the message has the reason."""


class LossBudgetExceeded(RuntimeError):
    """Raised if the loss of audited rows exceeds `audit.max_loss`; the message has the loss and its interval."""


class CrashLedger(Protocol):
    """Crash ledger of one stage. Every call returns after its entry is durable."""

    def begin_load(self) -> int:
        """Record that this actor loads its models; return how many of its processes have died in loading since the
        last that did not."""
        ...

    def end_load(self, failure: str = "") -> None:
        """Record that this actor has loaded its models, or the `failure` that ends the job."""
        ...

    def begin(self, who: str, keys: Sequence[str]) -> list[int]:
        """Record that process `who` takes these rows; return for each row at how many deaths it was in flight. Raise
        EngineFailed if every row ends its process."""
        ...

    def running(self, who: str, keys: Sequence[str]) -> None:
        """Record that `who` currently runs exactly these of its suspect rows."""
        ...

    def end(self, who: str, keys: Sequence[str], num_results: int, errors: Mapping[str, int]) -> None:
        """Record that `who` finished these rows with `num_results` output rows; `errors` counts failed rows by code.
        Raise ErrorBudgetSpent if too many rows failed."""
        ...

    def audited(self, losses: Sequence[float]) -> None:
        """Record the losses of audited rows. Raise LossBudgetExceeded if they exceed the budget."""
        ...

    def failed(self, reason: str) -> None:
        """Record why the caller is about to raise a MetricError, which Ray does not pass on as it is."""
        ...


def row_keys(table: pa.Table) -> list[str]:
    """Return the ledger keys of a table's rows, which are unique even if sample ids repeat."""
    columns = (table.column(name).to_pylist() for name in ("sample_id", "source", "row_index"))
    return [f"{sample_id}\n{source}\n{row_index}" for sample_id, source, row_index in zip(*columns, strict=True)]


def deaths_message(process: str, num_deaths: int) -> str:
    """Return the error message of a row that is not run again."""
    return (
        f"{process} died {num_deaths} times while it had this row, the last time with nothing beside it; "
        "the row was not run again"
    )


class ProcessLedger:
    """Records the rows of one process in a ledger, under a unique name. Thread-safe.

    Without a ledger nothing is recorded, and no row is a suspect. For the methods see `CrashLedger`.
    """

    def __init__(self, ledger: CrashLedger | None) -> None:
        self._ledger = ledger
        self._who = uuid4().hex
        self._parts: dict[str, Sequence[str]] = {}
        self._lock = threading.Lock()

    def begin(self, keys: Sequence[str]) -> list[int]:
        return [0] * len(keys) if self._ledger is None else self._ledger.begin(self._who, keys)

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Load models in the block. An error of the block is recorded, and so is a block that ended the processes of
        this actor `MAX_LOAD_DEATHS` times: EngineFailed."""
        if self._ledger is None:
            yield
            return
        if (num_deaths := self._ledger.begin_load()) >= MAX_LOAD_DEATHS:
            reason = (
                f"the process of an actor ended {num_deaths} times while it loaded the models, as it does if the "
                "machine's memory does not hold them; the log of the attempt has its last lines"
            )
            self._ledger.end_load(reason)
            raise EngineFailed(reason)
        try:
            yield
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:MAX_REASON_CHARS]
            self._ledger.end_load(f"an actor cannot load the models: {reason}")
            raise
        self._ledger.end_load()

    def running(self, part: str, keys: Sequence[str]) -> None:
        """Record that this part of the process currently runs exactly these suspect rows."""
        if self._ledger is None:
            return
        with self._lock:
            self._parts[part] = list(keys)
            self._ledger.running(self._who, sorted({key for keys in self._parts.values() for key in keys}))

    def audited(self, losses: Sequence[float]) -> None:
        if self._ledger is not None and losses:
            self._ledger.audited(losses)

    def failed(self, reason: str) -> None:
        if self._ledger is not None:
            self._ledger.failed(reason)

    def end(self, keys: Sequence[str], num_results: int, errors: Mapping[str, int]) -> None:
        if self._ledger is not None:
            self._ledger.end(self._who, keys, num_results, errors)
