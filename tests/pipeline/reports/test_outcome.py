"""The judgement of a finished job, at its bounds."""

from __future__ import annotations

import pytest

from pipeline.reports.outcome import MIN_JUDGED_ROWS, JobOutcome, judge, judge_json
from pipeline.rows.schemas import ERROR_ADVICE, ERROR_CODES

DONE, TOO_MANY, NOTHING = JobOutcome.DONE, JobOutcome.TOO_MANY_ERRORS, JobOutcome.NO_RESULT


@pytest.mark.parametrize(
    ("num_rows", "num_failed", "max_error_share", "expected"),
    [
        (0, 0, 0.5, DONE),
        (0, 0, 0.0, DONE),
        (1, 1, 0.5, NOTHING),
        (19, 18, 0.0, DONE),
        (19, 19, 0.5, NOTHING),
        (20, 10, 0.5, DONE),
        (20, 11, 0.5, TOO_MANY),
        (20, 1, 0.0, TOO_MANY),
        (20, 0, 0.0, DONE),
        (10_000, 9_999, None, DONE),
        (10_000, 10_000, None, NOTHING),
        (10_000, 10_000, 0.5, NOTHING),
    ],
)
def test_a_job_is_judged_by_its_rows(
    num_rows: int, num_failed: int, max_error_share: float | None, expected: JobOutcome
) -> None:
    errors = {"context_too_long": num_failed} if num_failed else {}
    verdict = judge(num_rows, errors, {}, max_error_share)
    assert verdict.outcome is expected
    assert bool(verdict.reason) == (expected is not DONE)
    summary = {"num_samples": num_rows, "errors_by_type": errors}  # of a version without examples
    assert judge_json(summary, max_error_share) == verdict


def test_the_reason_names_the_commonest_error_with_an_example_and_what_to_do() -> None:
    errors = {"broken_image": 3, "context_too_long": 9, "engine_died": 9}
    reason = judge(24, errors, {"context_too_long": "the prompt has\n 2100 tokens"}, 0.5).reason
    assert reason == (
        "21 of 24 rows failed (87.5 %), more than job.max_error_share (0.5) allows, most often with context_too_long "
        '(9), for example "the prompt has 2100 tokens"; raise pool.max_context_tokens, or lower '
        "sampling.max_new_tokens or the number of frames"
    )
    reason = judge(1, {"broken_image": 1}, {}, 0.5).reason
    assert reason.startswith("no row succeeded: the only row failed, most often with broken_image (1); errors/ has")


def test_advice_is_about_codes_that_exist() -> None:
    assert set(ERROR_ADVICE) <= set(ERROR_CODES)
    assert MIN_JUDGED_ROWS == 20
