"""Converts completions to the Arrow result tables of the engine actors; defines the results of trials of methods."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from configs.method import MethodConfig
from configs.pool import ActorPoolConfig
from decoding.types import Completion

UNFINISHED = ("length", "looped")
"""Finish reasons of texts that the target did not end: their status is `truncated`."""
ReportProgress = Callable[[pa.Table], None]
"""Called after each batch with its table of results."""


@dataclass(frozen=True)
class Stamp:
    """Columns that identify the run in every row."""

    job_id: str
    attempt: int
    config_fingerprint: str


@dataclass(frozen=True)
class CandidateResult:
    """Result of one candidate; the 95 % interval is None after a single round."""

    method: str
    sample_s: float | None
    """Engine seconds per sample; None if not measured."""
    low_s: float | None
    high_s: float | None
    acceptance_length: float
    num_rows: int
    note: str = ""
    """`chosen`, `within the interval` of the chosen method, `slower`, or the reason why it was dropped."""
    speedup: float | None = None
    """Seconds per sample of plain decoding, as a multiple of this method's; None if both were not measured together."""
    speedup_low: float | None = None
    speedup_high: float | None = None


@dataclass(frozen=True)
class PhaseSeconds:
    """Engine seconds of one sample by phase, in one block of rows that a method decoded."""

    encode_s: float
    """Encoding the prompt: the vision tower, and the processor if it runs in the engine's process."""
    prefill_s: float
    decode_s: float


@dataclass(frozen=True)
class TrialResult:
    """Result of one trial: the chosen method, the reason for the trial, and the results of all candidates."""

    method: str
    reason: str
    num_rows: int
    num_rounds: int
    tokens_per_sample: float
    standings: tuple[CandidateResult, ...]
    plain: tuple[PhaseSeconds, ...] = ()
    """Times of plain decoding by round, without the first round if there are several."""


class RowRefused(ValueError):
    """Raised for a row that cannot run, with a stable error code and a message."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def method_values(method: MethodConfig, drafter_id: str, completion: Completion) -> dict[str, Any]:
    """Return the method columns of one row. In a trial of methods, a row that was not decoded has the trial's label."""
    label = completion.method or method.label
    if method.auto is not None and label not in {config.label for config in method.methods if config.needs_checkpoint}:
        drafter_id = ""
    return {"method": label, "drafter_id": drafter_id}


def result_values(completion: Completion) -> dict[str, Any]:
    """Return the result columns of one completion."""
    error = completion.error
    return {
        "status": "error" if error else "truncated" if completion.finish_reason in UNFINISHED else "success",
        "error_type": error.code if error else "",
        "error_message": error.message if error else "",
        "finish_reason": completion.finish_reason,
        "loop_start": completion.loop_start,
        "retry_index": completion.attempt,
        "failed_checks": list(completion.failed_checks),
        "generated_text": completion.text,
        "token_ids": [] if error else list(completion.token_ids),
        "mean_logprob": completion.mean_logprob,
        "num_input_tokens": completion.num_input_tokens,
        "num_visual_tokens": completion.num_visual_tokens,
        "num_generated_tokens": len(completion.token_ids),
        "telemetry": completion.telemetry,
    }


def result_table(
    schema: pa.Schema, table: pa.Table, constants: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
) -> pa.Table:
    """Build a table of `schema`; each column comes from `constants`, else from `rows`, else from `table`."""
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
    """Return the telemetry fields that the schema names; dictionaries become JSON text."""
    values = {field.name: getattr(telemetry, field.name) for field in struct}
    return {
        name: json.dumps(value, sort_keys=True) if isinstance(value, dict) else value for name, value in values.items()
    }


def counts(completions: Iterable[Completion]) -> tuple[int, int, int]:
    """Return the numbers of generated tokens, steps and accepted draft tokens."""
    num_tokens = num_steps = num_accepted = 0
    for completion in completions:
        num_tokens += len(completion.token_ids)
        num_steps += completion.telemetry.num_spec_steps
        num_accepted += completion.telemetry.num_accepted_draft_tokens
    return num_tokens, num_steps, num_accepted


def errors_of(result: pa.Table) -> dict[str, int]:
    """Count the failed rows of a result table by error code."""
    return dict(Counter(code for code in result.column("error_type").to_pylist() if code))


def torch_threads(pool: ActorPoolConfig) -> int | None:
    """Return the torch threads of one actor: as configured, else an equal share of the cores on a CPU, else None."""
    if pool.torch_threads is not None or pool.gpus:
        return pool.torch_threads
    num_cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, num_cores // pool.max_size)
