"""Checks that claims are made of: comparisons, equality, node budgets, trade-offs, printed figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.claims.reader import DRAFTS, LENGTH, Reader, samples_of
from benchmarks.claims.verdict import Finding, GapEstimate, Holds, all_of, any_of, enough, judge
from benchmarks.harness.markdown import Results

SATURATED = 0.6
"""Share of steps that accept the whole depth of a tree, above which its length is no measure of its drafts."""
SHARES = ("accuracy", "attributes", "attribute_f1")
Check = Callable[[Reader], Finding]


@dataclass(frozen=True)
class Compare:
    """Whether `key` is above `factor` times all `others` (label → key), less `slack`; or below it, plus `slack`.

    With `one_is_enough` one of the others counts. Not decided if all keys have the same counts in every sample, or, for
    lengths, if a tree is saturated.
    """

    key: str
    others: Mapping[str, str]
    label: str = ""
    metric: str = LENGTH
    factor: float = 1.0
    slack: float = 0.0
    below: bool = False
    one_is_enough: bool = False

    def __call__(self, read: Reader) -> Finding:
        gaps = {name: read.gap(self.key, key, self.metric, self.factor) for name, key in self.others.items()}
        parts = [judge((gap.negated() if self.below else gap).plus(self.slack)) for gap in gaps.values()]
        holds = (any_of if self.one_is_enough else all_of)(parts)
        numbers = self._numbers(read, gaps)
        if reason := self.unfit(read):
            return None, f"{numbers}; not judged: {reason}"
        return holds, numbers

    def unfit(self, read: Reader) -> str:
        """Return why the comparison decides nothing, or an empty string."""
        keys = [self.key, *self.others.values()]
        if read.is_constant(keys, self.metric):
            return "all sides have the same counts in every sample"
        if self.metric in (LENGTH, DRAFTS):
            full = {key: share for key in keys if (share := read.full_share(key)) > SATURATED}
            if full:
                key, share = max(full.items(), key=lambda item: item[1])
                return f"{key} accepts its whole depth in {100 * share:.0f} % of the steps"
        return ""

    def _numbers(self, read: Reader, gaps: Mapping[str, GapEstimate]) -> str:
        digits = 3 if self.metric in SHARES else 2
        own = read.mean(self.key, self.metric)
        parts = []
        for name, key in self.others.items():
            rival, gap = read.mean(key, self.metric), gaps[name]
            text = f"{name} {rival:.{digits}f}".strip()
            if self.factor != 1.0 and rival:
                text += f", {own / rival:.2f} times as much"
                if self.metric == DRAFTS:
                    with_bonus = read.mean(self.key, LENGTH) / read.mean(key, LENGTH)
                    text += f" ({with_bonus:.2f} with the bonus token)"
            text += f" [{gap}]"
            if judge(gap) is None and not self.slack and (num := gap.samples_to_decide()):
                text += f" ({num:,} samples would decide)"
            parts.append(text)
        return (f"{self.label}: " if self.label else "") + f"{own:.{digits}f} against {', '.join(parts)}"


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


@dataclass(frozen=True)
class Printed:
    """Whether the length of `key` is within `within` (a share) of the number that a paper prints."""

    key: str
    printed: float
    within: float = 0.1
    label: str = ""

    def __call__(self, read: Reader) -> Finding:
        value = read.value(self.key, LENGTH)
        distance = abs(value.gap - self.printed)
        holds = judge(GapEstimate(self.within * self.printed - distance, value.error, value.num))
        return holds, f"{self.label}: {value.gap:.2f} ± {value.margin:.2f} beside {self.printed:.2f}"


@dataclass(frozen=True)
class Frontier:
    """Whether no control keeps as much of `metric` as `key` at no less acceptance (a Pareto frontier).

    False if a control that accepts no less keeps more; True if every control that may accept as much keeps less.
    """

    key: str
    controls: Sequence[str]
    metric: str = "attribute_f1"

    def __call__(self, read: Reader) -> Finding:
        parts: list[Holds] = []
        names = []
        for control in self.controls:
            if judge(read.gap(self.key, control, DRAFTS)) is True:
                continue  # the control accepts less
            quality = read.gap(self.key, control, self.metric)
            parts.append(judge(quality))
            names.append(f"{self._place(read, control)} [{quality}]")
        own = f"{self._place(read, self.key)} accepted drafts"
        if not parts:
            return None, f"{own}; no control accepts as much"
        return all_of(parts), f"{own}; {', '.join(names)}"

    def _place(self, read: Reader, key: str) -> str:
        return f"{key} {read.mean(key, self.metric):.3f} at {read.mean(key, DRAFTS):.2f}"


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
