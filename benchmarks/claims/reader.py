"""Reads figures of results by key: means over cells, and gaps between two keys with their intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.claims.verdict import GapEstimate, Ratio, mean_of, paired_gap
from benchmarks.harness.markdown import Results

LENGTH = "mean_acceptance_length"
"""Tokens per step, with the bonus token: the convention of TABED and LANTERN."""
DRAFTS = "mean_accepted_drafts"
"""Accepted drafts per step, without the bonus token: the convention of SpecVLM, LVSpec (Eq. 2) and SAGE."""
RATIOS: dict[str, tuple[str, str]] = {
    LENGTH: ("num_accepted", "num_steps"),
    DRAFTS: ("num_accepted", "num_steps"),
    "accuracy": ("num_right", "num_stated"),
    "attributes": ("num_right", "num_stated"),
    "attribute_f1": ("words_shared", "words_total"),
}
"""Metric → columns of the samples; lengths are the ratio plus one."""
Samples = Mapping[str, Mapping[str, Any]]
"""Sample → its counts."""


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
    if metric in (LENGTH, DRAFTS):
        error = cell.get("acceptance_length_se")
        return steps_error(cell["acceptance_histogram"]) if error is None else float(error)
    return float(cell[f"{metric}_se"])


def value_of(cell: Results, metric: str) -> float:
    return float(cell[LENGTH]) - 1.0 if metric == DRAFTS else float(cell[metric])


def samples_of(cell: Results) -> int:
    return int(cell["num_cases"] if "num_cases" in cell else cell["num_images"])


@dataclass(frozen=True)
class Reader:
    """Reads figures of results by key.

    `cells` returns the cells of a key, whose mean counts; `samples` returns the samples of each of them, none for cells
    that were measured without.
    """

    results: Results
    cells: Callable[[Results, str], list[Results]]
    samples: Callable[[str], list[Samples]] = lambda _: []

    def mean(self, key: str, metric: str) -> float:
        cells = self.cells(self.results, key)
        return sum(value_of(cell, metric) for cell in cells) / len(cells)

    def value(self, key: str, metric: str) -> GapEstimate:
        """Return the mean over the cells of a key, with its error over samples."""
        cells = self.cells(self.results, key)
        error = math.sqrt(sum(error_of(cell, metric) ** 2 for cell in cells)) / len(cells)
        return GapEstimate(self.mean(key, metric), error, sum(map(samples_of, cells)))

    def gap(self, key: str, other: str, metric: str, factor: float = 1.0) -> GapEstimate:
        """Return the mean of `key` less `factor` times that of `other`, paired where both have samples."""
        pairs = self._pairs(key, other, metric)
        if pairs:
            offset = 1.0 if metric == LENGTH else 0.0
            return mean_of([paired_gap(own, rival, factor, offset) for own, rival in pairs])
        own, rival = self.value(key, metric), self.value(other, metric)
        gap = own.gap - factor * rival.gap
        folds = self._folds(key, metric), self._folds(other, metric)
        if folds[0] and len(folds[0]) == len(folds[1]):
            return GapEstimate(gap, _fold_error(*folds, factor), min(own.num, rival.num), True)
        return GapEstimate(gap, math.hypot(own.error, factor * rival.error), min(own.num, rival.num))

    def is_constant(self, keys: Sequence[str], metric: str) -> bool:
        """Return whether all keys have the same counts in every sample; False without samples."""
        sides = [self._ratios(key, metric) for key in keys]
        return all(sides) and all(side == sides[0] for side in sides)

    def full_share(self, key: str) -> float:
        """Return the share of steps that accepted as many drafts as any step of the key: the depth of the tree.

        0 for cells without a histogram, and for plain decoding.
        """
        histograms = [cell.get("acceptance_histogram", ()) for cell in self.cells(self.results, key)]
        deepest = max(map(len, histograms))
        if deepest < 2:
            return 0.0
        full = sum(histogram[-1] for histogram in histograms if len(histogram) == deepest)
        return float(full / max(1, sum(map(sum, histograms))))

    def _pairs(self, key: str, other: str, metric: str) -> list[tuple[dict[str, Ratio], dict[str, Ratio]]]:
        own, rival = self._ratios(key, metric), self._ratios(other, metric)
        return list(zip(own, rival, strict=True)) if own and rival else []

    def _ratios(self, key: str, metric: str) -> list[dict[str, Ratio]]:
        """Return the ratios of the samples of each cell; an empty list if a cell has none."""
        if metric not in RATIOS:
            return []
        above, below = RATIOS[metric]
        sides = [
            {name: (row[above], row[below]) for name, row in samples.items() if row[above] is not None}
            for samples in self.samples(key)
        ]
        return sides if all(sides) else []

    def _folds(self, key: str, metric: str) -> list[float]:
        (cell, *more) = self.cells(self.results, key)
        return [] if more else cell.get(f"{metric}_folds", [])


def _fold_error(own: Sequence[float], other: Sequence[float], factor: float) -> float:
    """Return the jackknife error of own − factor · other from estimates without one fold each."""
    gaps = [a - factor * b for a, b in zip(own, other, strict=True)]
    mean, count = sum(gaps) / len(gaps), len(gaps)
    return math.sqrt((count - 1) / count * sum((gap - mean) ** 2 for gap in gaps))
