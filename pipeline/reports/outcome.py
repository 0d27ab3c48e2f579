"""Judges the rows of a finished job: it is done, no row succeeded, or too many failed."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, NamedTuple

from pipeline.rows.schemas import ERROR_ADVICE

MIN_JUDGED_ROWS = 20
"""Minimum number of rows of a finished job whose share of errors is compared with `job.max_error_share`."""
MAX_EXAMPLE_CHARS = 200


class JobOutcome(StrEnum):
    """How a finished job ended."""

    DONE = "done"
    TOO_MANY_ERRORS = "too_many_errors"
    NO_RESULT = "no_result"


class JobVerdict(NamedTuple):
    """The outcome of a finished job, and why it failed, in one sentence; empty if it did not."""

    outcome: JobOutcome = JobOutcome.DONE
    reason: str = ""


NO_VERDICT = JobVerdict()


def judge(
    num_rows: int, errors: Mapping[str, int], examples: Mapping[str, str], max_error_share: float | None
) -> JobVerdict:
    """Judge the rows of an output by the number of its errors by code; `examples` has a message by code.

    A job without rows is done. If no row succeeded, the number of rows and `max_error_share` (None: no limit) do not
    matter.
    """
    num_failed = sum(errors.values())
    if 0 < num_rows == num_failed:
        rows = "the only row" if num_rows == 1 else f"all {num_rows:,} rows"
        return JobVerdict(JobOutcome.NO_RESULT, f"no row succeeded: {rows} failed, {_commonest(errors, examples)}")
    if num_rows < MIN_JUDGED_ROWS or max_error_share is None or num_failed / num_rows <= max_error_share:
        return NO_VERDICT
    reason = f"{excess(num_failed, num_rows, max_error_share)}, {_commonest(errors, examples)}"
    return JobVerdict(JobOutcome.TOO_MANY_ERRORS, reason)


def judge_json(summary: Mapping[str, Any], max_error_share: float | None) -> JobVerdict:
    """Judge the rows of the output of a `_job/summary.json`; summaries of older versions have no examples."""
    errors, examples = summary["errors_by_type"], summary.get("error_examples", {})
    return judge(summary["num_samples"], errors, examples, max_error_share)


def excess(num_failed: int, num_rows: int, max_error_share: float) -> str:
    """Return that more rows failed than `job.max_error_share` allows."""
    share = 100 * num_failed / num_rows
    return (
        f"{num_failed:,} of {num_rows:,} rows failed ({share:.1f} %), more than job.max_error_share "
        f"({max_error_share:g}) allows"
    )


def most_common(errors: Mapping[str, int]) -> tuple[str, int]:
    """Return the most frequent code and its count, of two the first by name; `("", 0)` without errors."""
    return min(errors.items(), key=lambda entry: (-entry[1], entry[0]), default=("", 0))


def _commonest(errors: Mapping[str, int], examples: Mapping[str, str]) -> str:
    code, count = most_common(errors)
    example = " ".join(examples.get(code, "").split())[:MAX_EXAMPLE_CHARS]
    text = f"most often with {code} ({count:,})" + (f', for example "{example}"' if example else "")
    return f"{text}; {ERROR_ADVICE.get(code, DEFAULT_ADVICE)}"


DEFAULT_ADVICE = "errors/ has the message of every row, and --retry-errors runs these rows again"
