"""From completions back to Arrow: what the result tables of every engine actor have in common.

Knows the run's stamp, telemetry and how columns are put together; what a row means is its actor's business. The schema
of a table comes from whoever builds the graph.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from actors.choice import TriedCompletion
from configs.method import Method
from configs.schema import ActorPool
from decoding.types import Completion, RequestError

Tally = Callable[[int, int, int, int], None]
"""Told after each batch: rows, generated tokens, spec steps, accepted drafts."""


@dataclass(frozen=True)
class Stamp:
    """What every row of one run says about the run."""

    job_id: str
    attempt: int
    config_fingerprint: str


def method_values(method: Method, target_id: str, drafter_id: str) -> dict[str, Any]:
    """The columns that say how all rows of a run were made; see `own_method_values` for the others."""
    values = {"verify_mode": method.verify_mode, "target_id": target_id}
    return values if method.auto is not None else {**values, "method": method.label, "drafter_id": drafter_id}


def own_method_values(method: Method, drafter_id: str, completion: Completion | None) -> dict[str, Any]:
    """Where several methods are tried, the columns that say which of them decoded a row; a row that none has decoded
    has the name of the whole."""
    if method.auto is None:
        return {}
    label = completion.method if isinstance(completion, TriedCompletion) else method.label
    drafting = {one.label for one in method.methods if one.needs_checkpoint}
    return {"method": label, "drafter_id": drafter_id if label in drafting else ""}


def result_table(
    schema: pa.Schema, table: pa.Table, constants: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
) -> pa.Table:
    """One table of `schema`: the run's constants, each row's own values, and otherwise the columns of `table`.

    A column is a row's own when the rows have its name; `telemetry` is taken from the completion's.
    """
    if not rows:
        return schema.empty_table()
    columns = []
    for field in schema:
        if field.name in constants:
            values: Any = [constants[field.name]] * len(rows)
        elif field.name in rows[0]:
            values = [row[field.name] for row in rows]
        else:
            columns.append(table.column(field.name).cast(field.type))
            continue
        if field.name == "telemetry":
            values = [telemetry_values(value, field.type) for value in values]
        columns.append(pa.array(values, type=field.type))
    return pa.table(columns, schema=schema)


def telemetry_values(telemetry: Any, struct: pa.StructType) -> dict[str, Any]:
    """The telemetry under the field names of the schema; what a method adds travels as one JSON object."""
    values: dict[str, Any] = {}
    for index in range(struct.num_fields):
        name = struct.field(index).name
        value = getattr(telemetry, name)
        values[name] = json.dumps(value, sort_keys=True) if isinstance(value, dict) else value
    return values


def failed(sample_id: str, code: str, message: str) -> Completion:
    """The completion of a sample that never ran."""
    return Completion(sample_id=sample_id, finish_reason="error", error=RequestError(code, message))


def counts(completions: Iterable[Completion]) -> tuple[int, int, int]:
    """Tokens, spec steps and accepted drafts, for whoever shows progress."""
    done = list(completions)
    return (
        sum(len(completion.token_ids) for completion in done),
        sum(completion.telemetry.num_spec_steps for completion in done),
        sum(completion.telemetry.num_accepted_draft_tokens for completion in done),
    )


def errors_of(result: pa.Table) -> dict[str, int]:
    """Rows of a result table that failed, by code."""
    return dict(Counter(code for code in result.column("error_type").to_pylist() if code))


def torch_threads(pool: ActorPool) -> int | None:
    """Threads of one actor: as configured; else, on the CPU, this machine's cores shared among all actors."""
    if pool.torch_threads is not None or pool.num_gpus:
        return pool.torch_threads
    num_cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, num_cores // pool.max_size)
