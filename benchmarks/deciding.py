"""When a claim is decided: one rule for every benchmark's claims.

A claim compares measured numbers. It holds or fails only if enough samples were measured and the gap is larger than
chance explains; otherwise it is not decided. Owns the rule and its words; knows no claims.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

Holds = bool | None
"""True, False, or None: not decided."""
MIN_SAMPLES = 30
"""Samples below which no claim is decided, whatever its interval."""
SURE = 2.0
"""Standard errors that tell two numbers apart."""
WORDS: dict[Holds, str] = {True: "yes", False: "**no**", None: "not decided"}


def decide(gap: float, error: float, num_samples: int) -> Holds:
    """Whether a gap is above zero: True or False if its interval of `SURE` standard errors leaves zero out.

    Without an error (`error` 0) the gap's sign decides, and a gap of exactly 0 is not decided.
    """
    if num_samples < MIN_SAMPLES or abs(gap) <= SURE * error:
        return None
    return gap > 0


def enough(holds: bool, num_samples: int) -> Holds:
    """A fact that has no interval, such as the equality of all outputs: False with any number of samples, True with at
    least `MIN_SAMPLES`."""
    return False if not holds else True if num_samples >= MIN_SAMPLES else None


def all_of(parts: Iterable[Holds]) -> Holds:
    """False if any part is, True if all are, else not decided."""
    found = list(parts)
    return False if False in found else None if None in found or not found else True


def any_of(parts: Iterable[Holds]) -> Holds:
    """True if any part is, False if all are, else not decided."""
    found = list(parts)
    return True if True in found else None if None in found or not found else False


def ratio_error(above: Sequence[float], below: Sequence[float]) -> float:
    """Standard error of Σ above / Σ below over samples that are drawn independently."""
    total = sum(below)
    if not total:
        return 0.0
    ratio = sum(above) / total
    return math.sqrt(sum((a - ratio * b) ** 2 for a, b in zip(above, below, strict=True))) / total


def steps_error(histogram: Sequence[int]) -> float:
    """Standard error of the mean number of accepted drafts from how many steps took 0, 1, … of them.

    Takes steps as independent; on the zoo it is within a third of the error over samples. For results without that one.
    """
    num = sum(histogram)
    if not num:
        return 0.0
    mean = sum(taken * count for taken, count in enumerate(histogram)) / num
    return math.sqrt(sum(count * (taken - mean) ** 2 for taken, count in enumerate(histogram))) / num


def claim(text: str, holds: Holds, numbers: str) -> dict[str, Any]:
    """One claim as the results hold it; `holds` is null where it is not decided."""
    return {"claim": " ".join(text.split()), "holds": holds, "numbers": numbers}


def claims_table(claims: Iterable[dict[str, Any]]) -> str:
    """Claims as a Markdown table."""
    lines = ["| claim | holds here | numbers |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {one['claim']} | {WORDS[one['holds']]} | {one['numbers']} |" for one in claims)])
