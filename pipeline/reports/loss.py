"""Bounds the mean loss of a lossy method from the audited rows of an output, and compares it with the job's budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from configs.acceptance import AuditConfig
from pipeline.cluster.partitions import IN_PROCESS, Workers
from pipeline.output.files import partitions_of
from pipeline.reports.result_tables import READ_FILE_S, read_tables
from pipeline.storage.output_dir import OutputDir

LOSS = "audit_loss"
_HALVINGS = 60
_PRIOR = 0.5


def loss_interval(num_rows: int, sum_of_losses: float, confidence: float) -> tuple[float, float]:
    """Return the confidence sequence of the mean of losses in [0, 1] after `num_rows` rows.

    With probability `confidence` it contains the mean at all numbers of rows together, so the job may look at it after
    every batch. Beta-binomial mixture (Robbins 1970, "Statistical methods related to the law of the iterated
    logarithm"; Howard, Ramdas, McAuliffe and Sekhon 2021, "Time-uniform, nonparametric, nonasymptotic confidence
    sequences", section 3 and appendix on sub-Bernoulli processes): the interval has the means μ at which the mixture
    B(a + s, a + n − s) / B(a, a) / (μ^s (1 − μ)^(n − s)) with a = 1/2 is below 1 / (1 − confidence), for n losses of
    sum s. The ratio is a supermartingale for any losses in [0, 1] with conditional mean μ. It depends only on n and s,
    not on the order of losses, so a resumed job continues it.
    """
    rest = max(0.0, num_rows - sum_of_losses)
    bound = -math.log(1.0 - confidence) + 2 * math.lgamma(_PRIOR) - math.lgamma(2 * _PRIOR)
    bound += math.lgamma(2 * _PRIOR + num_rows) - math.lgamma(_PRIOR + sum_of_losses) - math.lgamma(_PRIOR + rest)

    def is_outside(mean: float) -> bool:
        return -sum_of_losses * math.log(mean) - rest * math.log1p(-mean) > bound

    mean = sum_of_losses / num_rows if num_rows else 0.5
    return (
        _edge(is_outside, mean, 0.0) if sum_of_losses > 0 else 0.0,
        _edge(is_outside, mean, 1.0) if rest > 0 else 1.0,
    )


def _edge(is_outside: Callable[[float], bool], inside: float, outside: float) -> float:
    """Return the point outside next to the boundary between two points, by bisection."""
    for _ in range(_HALVINGS):
        middle = (inside + outside) / 2
        if middle in (inside, outside):  # neighbours in double precision
            break
        if is_outside(middle):
            outside = middle
        else:
            inside = middle
    return outside


@dataclass(frozen=True)
class Losses:
    """Number and sum of the losses of audited rows."""

    num_rows: int = 0
    total: float = 0.0

    def plus(self, other: Losses) -> Losses:
        return Losses(self.num_rows + other.num_rows, self.total + other.total)

    @property
    def mean(self) -> float | None:
        return self.total / self.num_rows if self.num_rows else None


def sum_of(losses: pa.ChunkedArray | pa.Array) -> Losses:
    """Count and sum the losses of a column; rows that are not audited have null."""
    return Losses(pc.count(losses).as_py(), pc.sum(losses).as_py() or 0.0)


def read_losses(output: OutputDir, names: Sequence[str], workers: Workers = IN_PROCESS) -> Losses:
    """Sum the losses of result files, which may lack the column, wherever `workers` run the partitions of files."""
    losses = Losses()
    work_s = READ_FILE_S * len(names)
    for part in workers.map(partial(_sum_of_files, output), partitions_of(names), work_s, "audit", "sink.path"):
        losses = losses.plus(part)
    return losses


def _sum_of_files(output: OutputDir, names: Sequence[str]) -> Losses:
    losses = Losses()
    for table in read_tables(output, names, (LOSS,)):
        if LOSS in table.column_names:
            losses = losses.plus(sum_of(table[LOSS]))
    return losses


def verdict(audit: AuditConfig, losses: Losses) -> str:
    """Return why the budget is exceeded; empty if it is not, or there is none.

    It is exceeded if the interval is above `max_loss`: then the loss certainly is, at the stated confidence. From
    `min_rows` audited rows on, it is exceeded too if the upper end is above `max_loss`: by then, the audit must have
    shown that the budget holds.
    """
    if audit.max_loss is None or not losses.num_rows:
        return ""
    low, high = loss_interval(losses.num_rows, losses.total, audit.confidence)
    if low > audit.max_loss:
        reason = "is certainly above"
    elif losses.num_rows >= audit.min_rows and high > audit.max_loss:
        reason = f"is not shown to be within, after audit.min_rows ({audit.min_rows:,}) rows,"
    else:
        return ""
    return f"the loss {describe(audit, losses)} {reason} audit.max_loss ({audit.max_loss:g})"


def describe(audit: AuditConfig, losses: Losses) -> str:
    """Return mean loss, interval and number of rows as text."""
    low, high = loss_interval(losses.num_rows, losses.total, audit.confidence)
    mean = math.nan if losses.mean is None else losses.mean
    return (
        f"{mean:.4f} ({low:.4f} to {high:.4f} at {100 * audit.confidence:g} % confidence; {audit.metric}, "
        f"{losses.num_rows:,} audited rows)"
    )


def lines(audit: AuditConfig, losses: Losses) -> list[tuple[str, str]]:
    """Return the lines of the summary as (label, value)."""
    if audit.max_loss is None:
        return [("audited loss", describe(audit, losses))]
    result = "exceeded" if verdict(audit, losses) else "not exceeded"
    return [("audited loss", describe(audit, losses)), ("loss budget", f"{audit.max_loss:g}, {result}")]


def to_json(audit: AuditConfig, losses: Losses) -> dict[str, Any]:
    """Return the audit's part of `_job/summary.json`."""
    low, high = loss_interval(losses.num_rows, losses.total, audit.confidence)
    return {
        **audit.model_dump(mode="json"),
        "num_rows": losses.num_rows,
        "mean_loss": losses.mean,
        "low": low,
        "high": high,
        "exceeded": bool(verdict(audit, losses)),
    }


def fewest_rows(audit: AuditConfig) -> int:
    """Return the number of equal rows that shows that the budget holds; the audit must have one."""
    assert audit.max_loss is not None
    low, high = 0, 1
    while loss_interval(high, 0.0, audit.confidence)[1] > audit.max_loss:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if loss_interval(middle, 0.0, audit.confidence)[1] > audit.max_loss:
            low = middle
        else:
            high = middle
    return high
