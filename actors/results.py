"""Result tables of the engine actors: from completions to Arrow."""

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
"""Called after each batch with rows, generated tokens, steps and accepted drafts."""


@dataclass(frozen=True)
class Stamp:
    """Columns that identify the run in every row."""

    job_id: str
    attempt: int
    config_fingerprint: str


def method_values(method: Method, target_id: str, drafter_id: str) -> dict[str, Any]:
    """Method columns that are constant in a run; see `own_method_values`."""
    values = {"verify_mode": method.verify_mode, "target_id": target_id}
    return values if method.auto is not None else {**values, "method": method.label, "drafter_id": drafter_id}


def own_method_values(method: Method, drafter_id: str, completion: Completion | None) -> dict[str, Any]:
    """Method columns of one row in a trial of methods; a row that was not decoded has the trial's label."""
    if method.auto is None:
        return {}
    label = completion.method if isinstance(completion, TriedCompletion) else method.label
    drafting = {one.label for one in method.methods if one.needs_checkpoint}
    return {"method": label, "drafter_id": drafter_id if label in drafting else ""}


def result_table(
    schema: pa.Schema, table: pa.Table, constants: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
) -> pa.Table:
    """One table of `schema`, from `constants`, `rows` and the columns of `table`, in this order of precedence."""
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
    """Telemetry by the field names of the schema; dictionaries become JSON."""
    values: dict[str, Any] = {}
    for index in range(struct.num_fields):
        name = struct.field(index).name
        value = getattr(telemetry, name)
        values[name] = json.dumps(value, sort_keys=True) if isinstance(value, dict) else value
    return values


def failed(sample_id: str, code: str, message: str) -> Completion:
    """The completion of a sample that was not decoded."""
    return Completion(sample_id=sample_id, finish_reason="error", error=RequestError(code, message))


def counts(completions: Iterable[Completion]) -> tuple[int, int, int]:
    """Tokens, steps and accepted drafts."""
    done = list(completions)
    return (
        sum(len(completion.token_ids) for completion in done),
        sum(completion.telemetry.num_spec_steps for completion in done),
        sum(completion.telemetry.num_accepted_draft_tokens for completion in done),
    )


def errors_of(result: pa.Table) -> dict[str, int]:
    """Number of failed rows of a result table by code."""
    return dict(Counter(code for code in result.column("error_type").to_pylist() if code))


def torch_threads(pool: ActorPool) -> int | None:
    """Torch threads of one actor: as configured, or an equal share of this machine's cores on the CPU."""
    if pool.torch_threads is not None or pool.num_gpus:
        return pool.torch_threads
    num_cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, num_cores // pool.max_size)
