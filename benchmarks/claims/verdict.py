"""The rule that decides claims: an estimate with its interval, and enough samples.

A claim holds or fails only if at least `MIN_SAMPLES` samples were measured and the 95 % interval of the gap excludes
zero. The interval is Student's, over samples; it is paired wherever both sides were measured on the same samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Holds = bool | None
"""True, False, or None for not decided."""
Finding = tuple[Holds, str]
"""Whether a claim holds, and the numbers behind it."""
MIN_SAMPLES = 30
WORDS: dict[Holds, str] = {True: "yes", False: "**no**", None: "not decided"}
Ratio = tuple[float, float]
"""Numerator and denominator of one sample."""


def quantile(num: int) -> float:
    """Return the factor of the standard error in a 95 % interval over `num` samples, Student's t."""
    # Other tables are also made on machines that have torch and transformers alone.
    from pipeline.reports.intervals import CONFIDENCE, student_quantile

    return student_quantile(CONFIDENCE, max(1, num - 1))


@dataclass(frozen=True)
class GapEstimate:
    """A gap, its standard error, the number of samples, and whether the error is that of pairs."""

    gap: float
    error: float
    num: int
    paired: bool = False

    @property
    def margin(self) -> float:
        """Half of the width of the 95 % interval."""
        return quantile(self.num) * self.error

    def plus(self, slack: float) -> GapEstimate:
        return GapEstimate(self.gap + slack, self.error, self.num, self.paired)

    def negated(self) -> GapEstimate:
        return GapEstimate(-self.gap, self.error, self.num, self.paired)

    def __str__(self) -> str:
        return f"{self.gap:+.3f} ± {self.margin:.3f}, n {self.num}, {'paired' if self.paired else 'unpaired'}"

    def samples_to_decide(self) -> int:
        """Return the number of samples with which the present gap would exceed its margin; 0 for no gap."""
        return math.ceil(self.num * (self.margin / self.gap) ** 2) if self.gap else 0


def judge(estimate: GapEstimate) -> Holds:
    """Return whether the gap is above zero; None if its interval contains zero or there are too few samples."""
    if estimate.num < MIN_SAMPLES or abs(estimate.gap) <= estimate.margin:
        return None
    return estimate.gap > 0


def paired_gap(own: Mapping[str, Ratio], other: Mapping[str, Ratio], factor: float, offset: float) -> GapEstimate:
    """Return `offset` + Σ/Σ of `own` less `factor` times that of `other`, over the samples that both have.

    The error is that of the difference of the linearised ratios, sample by sample (delta method). Raises KeyError if
    there are no common samples.
    """
    names = sorted(own.keys() & other.keys())
    if not names:
        raise KeyError("common samples")
    (first, first_residuals), (second, second_residuals) = (
        _linearised([side[name] for name in names]) for side in (own, other)
    )
    gaps = [a - factor * b for a, b in zip(first_residuals, second_residuals, strict=True)]
    num = len(names)
    error = math.sqrt(sum(gap * gap for gap in gaps) / (num * (num - 1))) if num > 1 else math.inf
    return GapEstimate(first + offset - factor * (second + offset), error, num, True)


def _linearised(pairs: Sequence[Ratio]) -> tuple[float, list[float]]:
    """Return Σ/Σ, and each sample's share of its deviation."""
    total = sum(below for _, below in pairs)
    if not total:
        return 0.0, [0.0] * len(pairs)
    ratio = sum(above for above, _ in pairs) / total
    return ratio, [(above - ratio * below) * len(pairs) / total for above, below in pairs]


def mean_of(estimates: Sequence[GapEstimate]) -> GapEstimate:
    """Return the mean of estimates over independent groups of samples; the number is that of all samples."""
    count = len(estimates)
    error = math.sqrt(sum(entry.error**2 for entry in estimates)) / count
    paired = all(entry.paired for entry in estimates)
    gap, num = sum(entry.gap for entry in estimates) / count, sum(entry.num for entry in estimates)
    return GapEstimate(gap, error, num, paired)


def enough(holds: bool, num_samples: int) -> Holds:
    """Return the verdict on a fact without interval: False with any number of samples, True from `MIN_SAMPLES` on."""
    return False if not holds else True if num_samples >= MIN_SAMPLES else None


def all_of(parts: Iterable[Holds]) -> Holds:
    """Return False if any part is False, True if all are True, else None; None for no parts."""
    values = list(parts)
    return False if False in values else None if None in values or not values else True


def any_of(parts: Iterable[Holds]) -> Holds:
    """Return True if any part is True, False if all are False, else None; None for no parts."""
    values = list(parts)
    return True if True in values else None if None in values or not values else False


def combine(parts: Iterable[Finding]) -> Finding:
    """Combine findings into one that holds if all parts hold."""
    findings = list(parts)
    return all_of(holds for holds, _ in findings), "; ".join(numbers for _, numbers in findings)
