"""Whether a peer said what the target says, and what its passes come to as one row.

Pure functions of lists of tokens and of times. A row whose outputs differ by more than rounding has no speed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.peer_process import Outcome

FRACTION_BITS = {"float32": 23, "float16": 10, "bfloat16": 7}
SMALLEST = 2.0**-14
"""A zero is held to be this large: the smallest normal number of the narrowest type."""
TOLERANCE_ULPS = 4
"""How far apart the reference's two best logits may be where a peer chose the other, in units in the last place of
the peer's type."""


@dataclass(frozen=True)
class Verdict:
    """Outputs of one or more passes against the reference.

    `num_close` sequences first differ where the reference's two best logits lie within the tolerance, `num_different`
    where they do not, or where one goes on and the other has ended. `worst` is the widest such gap, in tolerances.
    """

    num_sequences: int
    num_equal: int
    num_close: int
    num_different: int
    worst: float

    @property
    def holds(self) -> bool:
        """Whether nothing differs but by rounding."""
        return self.num_different == 0

    def __add__(self, other: Verdict) -> Verdict:
        return Verdict(
            self.num_sequences + other.num_sequences,
            self.num_equal + other.num_equal,
            self.num_close + other.num_close,
            self.num_different + other.num_different,
            max(self.worst, other.worst),
        )


def ulp(value: float, dtype: str) -> float:
    """The distance between numbers of this type near `value`."""
    return math.ldexp(1.0, math.frexp(abs(value) or SMALLEST)[1] - 1 - FRACTION_BITS[dtype])


def first_difference(said: Sequence[int], meant: Sequence[int]) -> int | None:
    """The first place where two sequences part, which may be the end of the shorter; None where they are equal."""
    for place, (one, other) in enumerate(zip(said, meant, strict=False)):
        if one != other:
            return place
    return None if len(said) == len(meant) else min(len(said), len(meant))


def judge(outputs: Sequence[Sequence[int]], reference: Sequence[Mapping[str, Any]], dtype: str) -> Verdict:
    """Hold the outputs of one pass against the reference of the same prompts.

    Raises:
        ValueError: there is not exactly one output for every sequence of the reference.
    """
    if len(outputs) != len(reference):
        raise ValueError(f"{len(outputs)} outputs for {len(reference)} sequences of the reference")
    num_equal = num_close = num_different = 0
    worst = 0.0
    for said, meant in zip(outputs, reference, strict=True):
        place = first_difference(said, meant["tokens"])
        if place is None:
            num_equal += 1
            continue
        if place == min(len(said), len(meant["tokens"])):
            num_different += 1
            continue
        share = meant["gap"][place] / (TOLERANCE_ULPS * ulp(meant["top"][place], dtype))
        worst = max(worst, share)
        if share <= 1.0:
            num_close += 1
        else:
            num_different += 1
    return Verdict(len(outputs), num_equal, num_close, num_different, worst)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, lowest and highest; the true median lies between the two with probability 1 − 2^(1 − n) of n values."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def make_row(
    passes: Sequence[Outcome], reference: Sequence[Mapping[str, Any]], dtype: str, peak_bytes: int
) -> dict[str, Any]:
    """The timed passes of one peer at one batch size as a row.

    `tokens_per_s` and `samples_per_s` are None, and `withheld` says why, where an output differs by more than rounding.

    Raises:
        ValueError: there are no passes, or not all outputs.
    """
    if not passes:
        raise ValueError("no pass was timed")
    verdicts = [judge(one.outputs, reference, dtype) for one in passes]
    verdict = sum(verdicts[1:], verdicts[0])
    steps, accepted = sum(one.num_steps for one in passes), sum(one.num_accepted for one in passes)
    row: dict[str, Any] = {
        "seconds": [one.seconds for one in passes],
        "num_requests": len(passes[0].outputs),
        "num_tokens": [sum(map(len, one.outputs)) for one in passes],
        "verdict": asdict(verdict),
        "acceptance_length": 1.0 + accepted / steps if steps else None,
        "peak_bytes": peak_bytes,
        "tokens_per_s": None,
        "samples_per_s": None,
        "withheld": "",
    }
    if verdict.holds:
        row["tokens_per_s"] = spread([sum(map(len, one.outputs)) / one.seconds for one in passes])
        row["samples_per_s"] = spread([len(one.outputs) / one.seconds for one in passes])
    else:
        row["withheld"] = f"{verdict.num_different} of {verdict.num_sequences} outputs differ from the target's own"
    return row
