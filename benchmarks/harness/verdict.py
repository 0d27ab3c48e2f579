"""Runs contenders in turn and compares their outputs with the target's: no speed without equal outputs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.harness.process import Outcome

FRACTION_BITS = {"float32": 23, "float16": 10, "bfloat16": 7}
SMALLEST = 2.0**-14
"""The smallest normal number of the narrowest dtype, which replaces zero."""
TOLERANCE_ULPS = 4
"""Largest gap between the reference's two best logits, in ulps of the contender's dtype, at which a different token
counts as rounding."""


def turns(names: Sequence[str], num_rounds: int) -> Iterator[list[str]]:
    """Yield the order of each round: a rotation of `names`, with evenly spaced starting points."""
    for number in range(num_rounds):
        start = number * len(names) // num_rounds
        yield [*names[start:], *names[:start]]


@dataclass(frozen=True)
class Verdict:
    """Comparison of the outputs of one or more passes with the reference.

    `num_close` sequences first differ where the gap between the reference's two best logits is within the tolerance;
    `num_different` sequences differ at a wider gap or in length. `worst` is the widest gap, in tolerances.
    """

    num_sequences: int
    num_equal: int
    num_close: int
    num_different: int
    worst: float

    @property
    def holds(self) -> bool:
        """Whether all differences are within rounding."""
        return self.num_different == 0


def ulp(value: float, dtype: str) -> float:
    """Return the distance between neighbouring numbers of `dtype` near `value`."""
    return math.ldexp(1.0, math.frexp(abs(value) or SMALLEST)[1] - 1 - FRACTION_BITS[dtype])


def first_difference(first: Sequence[int], second: Sequence[int]) -> int | None:
    """Return the first index at which two sequences differ, possibly the end of the shorter; None if they are equal."""
    for index, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return index
    return None if len(first) == len(second) else min(len(first), len(second))


def judge(outputs: Sequence[Sequence[int]], reference: Sequence[Mapping[str, Any]], dtype: str) -> Verdict:
    """Compare the outputs of one pass with the reference of the same prompts; raise ValueError if numbers differ."""
    if len(outputs) != len(reference):
        raise ValueError(f"{len(outputs)} outputs for {len(reference)} sequences of the reference")
    num_equal = num_close = num_different = 0
    worst = 0.0
    for output, expected in zip(outputs, reference, strict=True):
        index = first_difference(output, expected["tokens"])
        if index is None:
            num_equal += 1
        elif index == min(len(output), len(expected["tokens"])):
            num_different += 1
        else:
            share = expected["gap"][index] / (TOLERANCE_ULPS * ulp(expected["top"][index], dtype))
            worst = max(worst, share)
            num_close += share <= 1.0
            num_different += share > 1.0
    return Verdict(len(outputs), num_equal, num_close, num_different, worst)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median and range; the range of n values holds the true median with probability 1 − 2^(1 − n)."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def ratio_error(above: Sequence[float], below: Sequence[float]) -> float:
    """Return the standard error of Σ above / Σ below over independent samples."""
    total = sum(below)
    if not total:
        return 0.0
    ratio = sum(above) / total
    return math.sqrt(sum((a - ratio * b) ** 2 for a, b in zip(above, below, strict=True))) / total


def relative_speeds(row: Mapping[str, Any], base: Mapping[str, Any], tokens: str = "num_tokens") -> float:
    """Return the median over the rounds of tokens per second of `row` over those of `base` in the same round."""
    rounds = zip(row[tokens], row["seconds"], base[tokens], base["seconds"], strict=True)
    return float(statistics.median(num / spent * base_s / base_num for num, spent, base_num, base_s in rounds))


def make_row(
    passes: Sequence[Outcome], reference: Sequence[Mapping[str, Any]], dtype: str, peak_bytes: int
) -> dict[str, Any]:
    """Summarise the timed passes of one contender at one batch size.

    `tokens_per_s` and `samples_per_s` are None, with the reason in `withheld`, if an output differs beyond rounding.
    Raises ValueError if there are no passes, or outputs are missing.
    """
    if not passes:
        raise ValueError("no pass was timed")
    verdict = judge([output for outcome in passes for output in outcome.outputs], [*reference] * len(passes), dtype)
    steps, accepted = sum(outcome.num_steps for outcome in passes), sum(outcome.num_accepted for outcome in passes)
    seconds = [outcome.seconds for outcome in passes]
    num_tokens = [sum(map(len, outcome.outputs)) for outcome in passes]
    row: dict[str, Any] = {
        "seconds": seconds,
        "num_requests": len(reference),
        "num_tokens": num_tokens,
        "verdict": asdict(verdict),
        "acceptance_length": 1.0 + accepted / steps if steps else None,
        "peak_bytes": peak_bytes,
        "tokens_per_s": None,
        "samples_per_s": None,
        "withheld": "",
    }
    if verdict.holds:
        row["tokens_per_s"] = spread([count / spent for count, spent in zip(num_tokens, seconds, strict=True)])
        row["samples_per_s"] = spread([len(reference) / spent for spent in seconds])
    else:
        row["withheld"] = f"{verdict.num_different} of {verdict.num_sequences} outputs differ from the target's own"
    return row
