"""Lists the exit statuses of commands: the one table for their help and the reference."""

from __future__ import annotations

DONE, FAILED, REFUSED, TOO_MANY_ERRORS, TOO_LOSSY, NO_RESULT = range(6)
SIGNALS = "143, 130"
"""128 plus the number of SIGTERM or SIGINT (`pipeline.cluster.signals.Stop.status`)."""

MEANINGS: dict[int | str, tuple[str, str]] = {
    DONE: ("done", "of a job whose source turns out to hold no rows, too"),
    FAILED: ("failed", "not all rows were computed"),
    REFUSED: ("refused", "nothing was started: configuration, source, store or output cannot be used"),
    TOO_MANY_ERRORS: (
        "too many rows failed",
        "more than `job.max_error_share` of all rows of a finished job of at least 20 rows, or of the rows so far of a "
        "running job, which ends, from `job.error_share_min_rows` rows on",
    ),
    TOO_LOSSY: ("too lossy", "the loss of audited rows exceeds `audit.max_loss`, and the job was ended"),
    NO_RESULT: ("no row succeeded", "all rows of a finished job failed, however few they are"),
    SIGNALS: ("stopped by SIGTERM, SIGINT", "finished rows are saved"),
}
"""Name and explanation of each status."""
JOB = (DONE, FAILED, REFUSED, TOO_MANY_ERRORS, NO_RESULT, SIGNALS)
"""Statuses of a job that writes rows."""
AUDITED_JOB = (DONE, FAILED, REFUSED, TOO_MANY_ERRORS, TOO_LOSSY, NO_RESULT, SIGNALS)
TRAINING = (DONE, FAILED, REFUSED, NO_RESULT, SIGNALS)


def in_help(statuses: tuple[int | str, ...]) -> str:
    """Return some statuses with their names, as a paragraph of a command's help."""
    return f"Exit status: {', '.join(f'{status} {MEANINGS[status][0]}' for status in statuses)}."
