"""Decides the claims of all benchmarks by one rule.

A claim holds or fails only if enough samples were measured and the gap exceeds its confidence interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.markdown import table

Holds = bool | None
"""True, False, or None for not decided."""
Finding = tuple[Holds, str]
"""Whether a claim holds, and the numbers behind it."""
MIN_SAMPLES = 30
SURE = 2.0
"""Standard errors by which a gap must exceed zero."""
WORDS: dict[Holds, str] = {True: "yes", False: "**no**", None: "not decided"}


def decide(gap: float, error: float, num_samples: int) -> Holds:
    """Return whether `gap` is above zero; None if its interval contains zero or there are too few samples."""
    if num_samples < MIN_SAMPLES or abs(gap) <= SURE * error:
        return None
    return gap > 0


def enough(holds: bool, num_samples: int) -> Holds:
    """Return the verdict on a fact without interval: False with any number of samples, True from `MIN_SAMPLES` on."""
    return False if not holds else True if num_samples >= MIN_SAMPLES else None


def all_of(parts: Iterable[Holds]) -> Holds:
    """Return False if any part is False, True if all are True, else None; None for no parts."""
    found = list(parts)
    return False if False in found else None if None in found or not found else True


def any_of(parts: Iterable[Holds]) -> Holds:
    """Return True if any part is True, False if all are False, else None; None for no parts."""
    found = list(parts)
    return True if True in found else None if None in found or not found else False


@dataclass(frozen=True)
class Measured:
    """A number with its standard error and the number of samples behind it."""

    value: float
    error: float
    num: int

    def above(self, other: Measured, factor: float = 1.0, slack: float = 0.0) -> Holds:
        """Return whether this value is more than `factor` times `other`, less `slack`."""
        gap = self.value - factor * other.value + slack
        return decide(gap, math.hypot(self.error, factor * other.error), min(self.num, other.num))


TIE = 0.005
"""Acceptance lengths that differ by less are equal."""


def never_third(lengths: Sequence[Measured], label: str) -> Finding:
    """Return whether the last of three methods accepts at least as much as one of the others, up to `TIE`."""
    *others, own = lengths
    holds = any_of(own.above(other, slack=TIE) for other in others)
    return holds, f"{label} " + " / ".join(f"{one.value:.2f}" for one in lengths)


def ratio_error(above: Sequence[float], below: Sequence[float]) -> float:
    """Return the standard error of Σ above / Σ below over independent samples."""
    total = sum(below)
    if not total:
        return 0.0
    ratio = sum(above) / total
    return math.sqrt(sum((a - ratio * b) ** 2 for a, b in zip(above, below, strict=True))) / total


def steps_error(histogram: Sequence[int]) -> float:
    """Return the standard error of the mean number of accepted drafts per step; `histogram[i]` steps accepted i.

    Assumes independent steps; on the zoo it is within a third of the error over samples.
    """
    num = sum(histogram)
    if not num:
        return 0.0
    mean = sum(accepted * count for accepted, count in enumerate(histogram)) / num
    return math.sqrt(sum(count * (accepted - mean) ** 2 for accepted, count in enumerate(histogram))) / num


def combine(parts: Iterable[Finding], prefix: str = "", between: str = "; ") -> Finding:
    """Combine findings into one that holds if all parts hold."""
    found = list(parts)
    return all_of(holds for holds, _ in found), prefix + between.join(numbers for _, numbers in found)


def all_equal(cells: dict[str, dict[str, Any]], num_samples: str, suffix: str) -> Finding:
    """Return whether all outputs equal plain decoding's; `num_samples` is the key of a result's sample count."""
    unequal = [name for name, cell in cells.items() if cell["equal_share"] < 1.0]
    num = min((cell[num_samples] for cell in cells.values()), default=0)
    return enough(not unequal, num), ", ".join(unequal) or f"all equal in {len(cells)} {suffix.format(num)}"


Check = Callable[[dict[str, Any]], Finding]
"""Checks one claim on the results; the text of the claim is the function's docstring."""


def claim(text: str, check: Check) -> Check:
    """Set the claim's text as the docstring of `check`."""
    check.__doc__ = text
    return check


def check_all(checks: Iterable[Check], results: dict[str, Any]) -> list[dict[str, Any]]:
    """Check every claim; a claim whose results are missing (KeyError) is undecided and marked as not run."""
    found = []
    for check in checks:
        try:
            holds, numbers = check(results)
        except KeyError as missing:
            holds, numbers = None, f"not run: {missing} is missing"
        text = " ".join((check.__doc__ or "").split())
        found.append({"claim": text, "holds": holds, "numbers": numbers})
    return found


def claims_table(results: dict[str, Any]) -> str:
    rows = [(one["claim"], WORDS[one["holds"]], one["numbers"]) for one in results.get("claims", [])]
    return table("claim | holds here | numbers", rows)
