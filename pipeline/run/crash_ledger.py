"""Records which rows each process runs, how many process deaths each row was in flight at, and failed rows.

One Ray actor on the driver's node holds this crash ledger. Deaths are inferred: if a row arrives at a new process while
the ledger lists it at an old one, the old process died with the row in flight. See docs/design/decisions/14 and 15.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

import pyarrow as pa
import ray

from actors.serving.crash_ledger import (
    GIVEN_UP_FROM_DEATHS,
    HOPELESS_FROM_ROWS,
    CrashLedger,
    EngineFailed,
    ErrorBudgetSpent,
    LossBudgetExceeded,
    deaths_message,
    row_keys,
)
from configs.acceptance import AuditConfig
from pipeline.cluster.ray_session import driver_actor
from pipeline.reports import loss, outcome
from pipeline.reports.loss import Losses

READ_TIMEOUT_S = 30.0
DECODER_DIED = "decoder_died"


@dataclass
class _Row:
    """A row that is in flight or was given up: its process (empty if none), the process's node, and process deaths."""

    holder: str = ""
    node: str = ""
    num_deaths: int = 0


class CrashLedgerState:
    """The state of the ledger: rows in flight, rows that were given up, and counts of results and errors.

    A process death counts for its rows without earlier deaths, and for its rows with earlier deaths that it reported as
    running. It counts for no row if the node of the process is spared. `losses` are those of the rows that earlier
    attempts audited.
    """

    def __init__(
        self,
        max_error_share: float | None = None,
        min_rows: int = 1,
        audit: AuditConfig | None = None,
        losses: Losses | None = None,
    ) -> None:
        self._audit, self._losses, self._failure = audit, losses or Losses(), ""
        self._loads: dict[str, tuple[int, str]] = {}
        self._engine_failure = ""
        self._given_up: dict[str, set[str]] = {}
        self._survived: set[str] = set()
        self._rows: dict[str, _Row] = {}
        self._running: dict[str, set[str]] = {}
        self._spared: set[str] = set()
        self._max_error_share = max_error_share
        self._min_rows = min_rows
        self._num_results = 0
        self._errors: Counter[str] = Counter()

    def num_known(self) -> int:
        return len(self._rows)

    def spare(self, nodes: Sequence[str]) -> None:
        """Do not count deaths on these nodes from now on."""
        self._spared.update(nodes)

    def begin_load(self, actor: str, node: str = "") -> int:
        """See `CrashLedger.begin_load`; `actor` is its id, which it keeps when Ray restarts it on a `node`."""
        num_deaths, before = self._loads.get(actor, (-1, node))
        num_deaths += num_deaths < 0 or before not in self._spared
        self._loads[actor] = (num_deaths, node)
        return num_deaths

    def end_load(self, actor: str, failure: str = "") -> None:
        """See `CrashLedger.end_load`."""
        self._loads.pop(actor, None)
        self._engine_failure = self._engine_failure or failure

    def engine_failure(self) -> str:
        """Return why the models cannot be loaded, or that every row ends its process; empty without either."""
        return self._engine_failure

    def begin(self, who: str, keys: Sequence[str], node: str = "") -> list[int]:
        """See `CrashLedger.begin`; `node` is the node of `who`."""
        counts = [self._begin(who, key, node) for key in keys]
        for key, num_deaths in zip(keys, counts, strict=True):
            if num_deaths >= GIVEN_UP_FROM_DEATHS:
                self._give_up(key)
        return counts

    def _give_up(self, key: str) -> None:
        """Note a row that was given up; the job ends if there are many of a stage, and no row has survived it."""
        stage = _stage_of(key)
        rows = self._given_up.setdefault(stage, set())
        rows.add(key)
        if len(rows) >= HOPELESS_FROM_ROWS and stage not in self._survived:
            self._engine_failure = (
                f"{len(rows)} rows each ended the process of the stage {stage!r} {GIVEN_UP_FROM_DEATHS} times, and no "
                "other row was finished; the log of the attempt has its last lines"
            )

    def _begin(self, who: str, key: str, node: str) -> int:
        row = self._rows.setdefault(key, _Row())
        if row.holder not in ("", who):
            was_running = key in self._running.get(row.holder, ())
            row.num_deaths += row.node not in self._spared and (row.num_deaths == 0 or was_running)
            self._rest(row.holder, key)
        row.holder, row.node = who, node
        return row.num_deaths

    def running(self, who: str, keys: Sequence[str]) -> None:
        """See `CrashLedger.running`."""
        ended = self._running.pop(who, set()) - set(keys)
        self._survived.update(map(_stage_of, ended))
        if keys:
            self._running[who] = set(keys)

    def end(self, who: str, keys: Sequence[str], num_results: int, errors: Mapping[str, int]) -> str:
        """Record the end of rows as `CrashLedger.end`; return `verdict()`. Rows that were given up stay recorded."""
        self._num_results += num_results
        self._errors.update(errors)
        for key in keys:
            self._rest(who, key)
            row = self._rows.get(key)
            if row is None or row.holder != who:
                continue
            if row.num_deaths >= GIVEN_UP_FROM_DEATHS:
                row.holder = ""
            else:
                self._survived.add(_stage_of(key))
                del self._rows[key]
        return self.verdict()

    def audited(self, losses: Sequence[float]) -> str:
        """Add losses, and return `loss_verdict()`."""
        self._losses = self._losses.plus(Losses(len(losses), math.fsum(losses)))
        return self.loss_verdict()

    def failed(self, reason: str) -> None:
        """See `CrashLedger.failed`."""
        self._failure = reason

    def failure(self) -> str:
        """Return the reason that `failed` recorded; empty without one."""
        return self._failure

    def loss_verdict(self) -> str:
        """Return why the loss budget is exceeded; empty if it is not."""
        return "" if self._audit is None else loss.verdict(self._audit, self._losses)

    def _rest(self, who: str, key: str) -> None:
        running = self._running.get(who, set())
        running.discard(key)
        if not running:
            self._running.pop(who, None)

    def verdict(self) -> str:
        """Return the reason to end the job; empty if the error share is allowed, or below `min_rows` results."""
        failed, num_results = self._errors.total(), self._num_results
        if self._max_error_share is None or num_results < max(self._min_rows, 1):
            return ""
        if failed / num_results <= self._max_error_share:
            return ""
        codes = ", ".join(f"{count:,} {code}" for code, count in self._errors.most_common())
        return f"{outcome.excess(failed, num_results, self._max_error_share)}: {codes}"


def _stage_of(key: str) -> str:
    return key.partition("\n")[0]


@dataclass(frozen=True)
class CrashLedgerClient:
    """Client of the ledger's actor that implements `CrashLedger` for one stage; cheap to send to workers."""

    actor: Any
    stage: str = ""

    def of(self, stage: str) -> CrashLedgerClient:
        """Return a client for another stage; a row has one entry per stage."""
        return replace(self, stage=stage)

    def begin_load(self) -> int:
        """See `CrashLedger.begin_load`."""
        context = ray.get_runtime_context()
        count: int = ray.get(self.actor.begin_load.remote(context.get_actor_id(), context.get_node_id()))
        return count

    def end_load(self, failure: str = "") -> None:
        """See `CrashLedger.end_load`."""
        ray.get(self.actor.end_load.remote(ray.get_runtime_context().get_actor_id(), failure))

    def begin(self, who: str, keys: Sequence[str]) -> list[int]:
        """See `CrashLedger.begin`."""
        node = ray.get_runtime_context().get_node_id()
        counts: list[int] = ray.get(self.actor.begin.remote(who, self._named(keys), node))
        if max(counts, default=0) >= GIVEN_UP_FROM_DEATHS and (reason := ray.get(self.actor.engine_failure.remote())):
            raise EngineFailed(reason)
        return counts

    def running(self, who: str, keys: Sequence[str]) -> None:
        """See `CrashLedger.running`."""
        ray.get(self.actor.running.remote(who, self._named(keys)))

    def end(self, who: str, keys: Sequence[str], num_results: int, errors: Mapping[str, int]) -> None:
        """See `CrashLedger.end`."""
        verdict = ray.get(self.actor.end.remote(who, self._named(keys), num_results, dict(errors)))
        if verdict:
            raise ErrorBudgetSpent(verdict)

    def audited(self, losses: Sequence[float]) -> None:
        """See `CrashLedger.audited`."""
        if verdict := ray.get(self.actor.audited.remote(list(losses))):
            raise LossBudgetExceeded(verdict)

    def failed(self, reason: str) -> None:
        """See `CrashLedger.failed`."""
        ray.get(self.actor.failed.remote(reason))

    def spare(self, nodes: Sequence[str]) -> None:
        """See `CrashLedgerState.spare`; does not wait."""
        self.actor.spare.remote(list(nodes))

    def verdict(self) -> str:
        """Return `CrashLedgerState.verdict()`; empty if the actor does not answer, because the cluster shuts down."""
        return self._answer("verdict")

    def loss_verdict(self) -> str:
        """Return `CrashLedgerState.loss_verdict()`, as `verdict` does."""
        return self._answer("loss_verdict")

    def failure(self) -> str:
        """Return `CrashLedgerState.failure()`, as `verdict` does."""
        return self._answer("failure")

    def engine_failure(self) -> str:
        """Return `CrashLedgerState.engine_failure()`, as `verdict` does."""
        return self._answer("engine_failure")

    def _answer(self, name: str) -> str:
        try:
            return str(ray.get(getattr(self.actor, name).remote(), timeout=READ_TIMEOUT_S))
        except ray.exceptions.RayError:
            return ""

    def _named(self, keys: Sequence[str]) -> list[str]:
        return [f"{self.stage}\n{key}" for key in keys]


@contextlib.contextmanager
def open_ledger(
    max_error_share: float | None = None,
    min_rows: int = 1,
    audit: AuditConfig | None = None,
    losses: Losses | None = None,
) -> Iterator[CrashLedgerClient]:
    """Run a ledger actor on this node while the block runs, and yield its client; parameters as `CrashLedgerState`."""
    limits = (max_error_share, min_rows, audit, losses)
    with driver_actor(CrashLedgerState, *limits, max_restarts=-1, max_task_retries=-1) as actor:
        yield CrashLedgerClient(actor)


def with_ledger(function: Callable[[pa.Table], pa.Table], ledger: CrashLedger) -> Callable[[pa.Table], pa.Table]:
    """Wrap a function of READ tables so that the ledger lists its rows while it runs.

    Rows with deaths run one by one; from `GIVEN_UP_FROM_DEATHS` deaths on, a row becomes an error row (`decoder_died`).
    """

    def stage(table: pa.Table) -> pa.Table:
        who, keys = uuid4().hex, row_keys(table)
        deaths = ledger.begin(who, keys)
        if not any(deaths):
            result = function(table)
        else:
            parts = []
            for index, num_deaths in enumerate(deaths):
                row = table.slice(index, 1)
                if num_deaths >= GIVEN_UP_FROM_DEATHS:
                    row = as_failed_row(row, num_deaths)
                ledger.running(who, [keys[index]] if num_deaths else [])
                parts.append(function(row))
            result = pa.concat_tables(parts)
        ledger.end(who, keys, 0, {})  # the engine counts results and errors
        return result

    return stage


def as_failed_row(row: pa.Table, num_deaths: int) -> pa.Table:
    """Return a table of one row as an error row (`decoder_died`), which later stages pass on unchanged."""
    message = deaths_message("the decoding process", num_deaths)
    for name, value in (("error_type", DECODER_DIED), ("error_message", message)):
        row = row.set_column(row.schema.get_field_index(name), name, pa.repeat(value, row.num_rows))
    return row
