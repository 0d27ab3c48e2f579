"""Decides claims about results, `data/claims/*.yaml`, by one rule, and renders them.

A claim holds or fails only if enough samples were measured and the gap exceeds its confidence interval. An entry has
the text (`claim`) and its `checks`, which are repeated for all combinations of the values in `each`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import yaml

from benchmarks.harness.markdown import Results, table
from benchmarks.tables.specs import DATA

Holds = bool | None
"""True, False, or None for not decided."""
Finding = tuple[Holds, str]
"""Whether a claim holds, and the numbers behind it."""
MIN_SAMPLES = 30
SURE = 2.0
"""Standard errors by which a gap must exceed zero."""
TIE = 0.005
"""Acceptance lengths that differ by less are equal."""
WORDS: dict[Holds, str] = {True: "yes", False: "**no**", None: "not decided"}
TOKENS = "mean_acceptance_length"


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
    values = list(parts)
    return False if False in values else None if None in values or not values else True


def any_of(parts: Iterable[Holds]) -> Holds:
    """Return True if any part is True, False if all are False, else None; None for no parts."""
    values = list(parts)
    return True if True in values else None if None in values or not values else False


def steps_error(histogram: Sequence[int]) -> float:
    """Return the standard error of the mean number of accepted drafts per step; `histogram[i]` steps accepted i.

    Assumes independent steps; on the zoo it is within a third of the error over samples.
    """
    num = sum(histogram)
    if not num:
        return 0.0
    mean = sum(accepted * count for accepted, count in enumerate(histogram)) / num
    return math.sqrt(sum(count * (accepted - mean) ** 2 for accepted, count in enumerate(histogram))) / num


def error_of(cell: Results, metric: str) -> float:
    """Return the standard error of a metric over samples; of acceptance lengths without it, over steps."""
    error = cell.get("acceptance_length_se" if metric == TOKENS else f"{metric}_se")
    return steps_error(cell["acceptance_histogram"]) if error is None else float(error)


def samples_of(cell: Results) -> int:
    return int(cell["num_cases"] if "num_cases" in cell else cell["num_images"])


@dataclass(frozen=True)
class Measured:
    """A number with its standard error and the number of samples behind it."""

    value: float
    error: float
    num: int


@dataclass(frozen=True)
class Reader:
    """Reads figures of results by key; `cells` returns the cells of a key, whose mean counts."""

    results: Results
    cells: Callable[[Results, str], list[Results]]

    def measured(self, key: str, metric: str = TOKENS) -> Measured:
        cells = self.cells(self.results, key)
        error = math.sqrt(sum(error_of(cell, metric) ** 2 for cell in cells)) / len(cells)
        return Measured(self.mean(key, metric), error, min(map(samples_of, cells)))

    def mean(self, key: str, name: str) -> float:
        cells = self.cells(self.results, key)
        return sum(float(cell[name]) for cell in cells) / len(cells)


Check = Callable[[Reader], Finding]


@dataclass(frozen=True)
class Compare:
    """Whether `key` is above `factor` times all `others` (label → key), less `slack`; or below it, plus `slack`.

    With `one_is_enough` one of the others counts.
    """

    key: str
    others: Mapping[str, str]
    label: str = ""
    metric: str = TOKENS
    factor: float = 1.0
    slack: float = 0.0
    below: bool = False
    one_is_enough: bool = False

    def __call__(self, read: Reader) -> Finding:
        measured = read.measured(self.key, self.metric)
        rivals = {name: read.measured(key, self.metric) for name, key in self.others.items()}
        parts = [self._decide(measured, rival) for rival in rivals.values()]
        digits = 3 if self.metric in ("accuracy", "attributes", "attribute_f1") else 2
        against = ", ".join(f"{name} {rival.value:.{digits}f}".strip() for name, rival in rivals.items())
        numbers = f"{measured.value:.{digits}f} against {against}"
        if self.factor != 1.0 and len(rivals) == 1:
            numbers += f", {measured.value / next(iter(rivals.values())).value:.2f} times as much"
        if parts == [None]:
            numbers += self._samples_to_decide(measured, *rivals.values())
        prefix = f"{self.label}: " if self.label else ""
        return (any_of if self.one_is_enough else all_of)(parts), prefix + numbers

    def _decide(self, measured: Measured, other: Measured) -> Holds:
        gap = measured.value - self.factor * other.value
        error = math.hypot(measured.error, self.factor * other.error)
        return decide((-gap if self.below else gap) + self.slack, error, min(measured.num, other.num))

    def _samples_to_decide(self, measured: Measured, other: Measured) -> str:
        """Return the number of samples with which the present gap would exceed `SURE` standard errors, as text."""
        gap = abs(measured.value - self.factor * other.value)
        error = math.hypot(measured.error, self.factor * other.error)
        num = math.ceil(min(measured.num, other.num) * (SURE * error / gap) ** 2) if gap else 0
        return f" ({num:,} samples would decide)" if num and not self.slack else ""


@dataclass(frozen=True)
class Equal:
    """Whether all outputs equal those of plain decoding; `cells` returns cells by name, `of` describes them."""

    cells: Callable[[Results], Mapping[str, Results]]
    of: str

    def __call__(self, read: Reader) -> Finding:
        cells = self.cells(read.results)
        unequal = [name for name, cell in cells.items() if cell["equal_share"] < 1.0]
        num = min(map(samples_of, cells.values()), default=0)
        return enough(not unequal, num), ", ".join(unequal) or f"all equal in {len(cells)} {self.of.format(num)}"


Claim = tuple[str, list[Check]]
"""A text and the checks that must all hold."""


def load_claims(name: str, special: Mapping[str, Check]) -> list[Claim]:
    """Load the claims of a file; `special` are the checks that it names."""
    entries = yaml.safe_load((DATA / "claims" / f"{name}.yaml").read_text(encoding="utf-8"))
    return [(entry["claim"], list(_checks(entry, special))) for entry in entries]


def _checks(entry: dict[str, Any], special: Mapping[str, Check]) -> Iterator[Check]:
    each = entry.get("each", {})
    for values in product(*each.values()):
        named = dict(zip(each, values, strict=True))
        for spec in entry["checks"]:
            yield from _parse(_filled(spec, named), special)


def _filled(spec: Any, named: Mapping[str, Any]) -> Any:
    """Return a specification with the names in its strings replaced."""
    if isinstance(spec, dict):
        return {key: _filled(entry, named) for key, entry in spec.items()}
    if isinstance(spec, list):
        return [_filled(entry, named) for entry in spec]
    return spec.format_map(named) if isinstance(spec, str) else spec


def _parse(spec: dict[str, Any], special: Mapping[str, Check]) -> Iterator[Check]:
    if "check" in spec:
        yield special[spec["check"]]
    elif "nodes" in spec:
        yield nodes(spec["nodes"])
    elif "more_nodes" in spec:
        yield nodes(spec["more_nodes"], more=True)
    elif "random_loses" in spec:
        yield random_loses(*spec["random_loses"])
    elif "as_good" in spec:
        yield from as_good(spec["as_good"], spec["label"])
    else:
        (word,) = spec.keys() & {"above", "above_one_of", "below"}
        others = spec[word] if isinstance(spec[word], dict) else {"": spec[word]}
        options = {key: value for key, value in spec.items() if key not in ("own", word)}
        yield Compare(spec["own"], others, below=word == "below", one_is_enough=word == "above_one_of", **options)


def decide_claim(checks: Iterable[Check], read: Reader) -> Finding:
    """Return whether all checks hold; undecided if results are missing."""
    try:
        return combine([check(read) for check in checks])
    except KeyError as missing:
        return None, f"not run: {missing} is missing"


def combine(parts: Iterable[Finding]) -> Finding:
    """Combine findings into one that holds if all parts hold."""
    findings = list(parts)
    return all_of(holds for holds, _ in findings), "; ".join(numbers for _, numbers in findings)


def claims_table(claims: Iterable[Claim], read: Reader) -> str:
    rows = [(claim, *decide_claim(checks, read)) for claim, checks in claims]
    return table("claim | holds here | numbers", [(claim, WORDS[holds], numbers) for claim, holds, numbers in rows])


def as_good(pair: Sequence[str], label: str) -> list[Check]:
    """Return checks that the first images have at most 0.05 less of the attributes than the second, and a distance that
    is larger by a tenth at most."""
    first, second = pair
    return [
        Compare(first, {"": second}, f"{label}, attributes", "attributes", slack=0.05),
        Compare(first, {"": second}, f"{label}, distance", "frechet_real", 1.1, below=True),
    ]


def nodes(pair: Sequence[str], more: bool = False) -> Check:
    """Return a check that the first method drafts at most as many nodes per step as the second, or more."""

    def check(read: Reader) -> Finding:
        mine, rival = (read.mean(key, "drafted_per_step") for key in pair)
        holds = mine > rival if more else mine <= rival + 0.5
        return holds, f"{mine:.1f} and {rival:.1f} nodes a step"

    return check


def random_loses(method: str, control: str) -> Check:
    """Return a check that a method is right more often than its control, random relaxation of as much acceptance."""

    def check(read: Reader) -> Finding:
        right = [read.measured(key, "accuracy") for key in (method, control)]
        mine, other = (read.mean(key, TOKENS) for key in (method, control))
        numbers = f"accuracy {right[0].value:.3f} at length {mine:.2f} against {right[1].value:.3f} at {other:.2f}"
        if abs(mine - other) > 0.15 * mine:
            # A control that accepts more and is right more often refutes the claim at any length.
            beaten = other > mine and Compare(control, {"": method}, metric="accuracy")(read)[0]
            return False if beaten else None, f"{numbers}; the lengths are not equal"
        return Compare(method, {"": control}, metric="accuracy")(read)[0], numbers

    return check
