"""Measures how far the output of a lossy method is from plain decoding of the same row: losses in [0, 1].

A metric is `exact` (0 if the outputs are equal, else 1), `edit` (edit distance over the longer output's length), or a
user's Python function `module:function`, which receives both texts. Retention is 1 − loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from configs.load import ConfigError
from files.external_code import ExternalCodeError, load


class MetricError(RuntimeError):
    """Raised if a user's metric raises, or returns no number in [0, 1]."""


@dataclass(frozen=True)
class Output:
    """The output of one row: its text, and its tokens if they are known."""

    text: str
    token_ids: tuple[int, ...] | None = None


Loss = Callable[[Output, Output], float]
"""Maps a row's own output and its plain output to a loss in [0, 1]; raises MetricError."""


def loss_of(metric: str, where: str) -> Loss:
    """Return the loss of a metric; `where` names its setting in a ConfigError if a function cannot be imported."""
    if metric == "exact":
        return lambda output, plain: float(_units(output, plain)[0] != _units(output, plain)[1])
    if metric == "edit":
        return lambda output, plain: relative_distance(*_units(output, plain))
    return _imported(metric, where)


def _units(output: Output, plain: Output) -> tuple[Sequence[Hashable], Sequence[Hashable]]:
    """Return the tokens of both outputs, or their characters if tokens of one are unknown."""
    if output.token_ids is None or plain.token_ids is None:
        return output.text, plain.text
    return output.token_ids, plain.token_ids


def _imported(metric: str, where: str) -> Loss:
    try:
        function = load(metric)
    except ExternalCodeError as error:
        raise ConfigError(f"{where}: {metric}: {error}") from None
    if not callable(function):
        raise ConfigError(f"{where}: {metric} is no function but {type(function).__name__}")

    def loss(output: Output, plain: Output) -> float:
        try:
            value = float(function(output.text, plain.text))
        except Exception as error:  # a user's function raises any error
            raise MetricError(f"the metric {metric} raised {type(error).__name__}: {error}") from None
        if not (math.isfinite(value) and 0.0 <= value <= 1.0):
            raise MetricError(f"the metric {metric} returned {value!r}, and a loss is a number from 0 to 1")
        return value

    return loss


def relative_distance(sequence: Sequence[Hashable], other: Sequence[Hashable]) -> float:
    """Return the edit distance (insertions, deletions, substitutions) over the length of the longer sequence."""
    longest = max(len(sequence), len(other))
    return edit_distance(sequence, other) / longest if longest else 0.0


def edit_distance(sequence: Sequence[Hashable], other: Sequence[Hashable]) -> int:
    """Return the Levenshtein distance.

    Bit-parallel: `plus` and `minus` hold the differences of +1 and −1 along a column of the matrix of distances (Myers
    1999, "A fast bit-vector algorithm for approximate string matching", in the form of Hyyrö 2003).
    """
    if not sequence:
        return len(other)
    masks: dict[Hashable, int] = {}
    for index, item in enumerate(sequence):
        masks[item] = masks.get(item, 0) | 1 << index
    full, last = (1 << len(sequence)) - 1, 1 << (len(sequence) - 1)
    plus, minus, distance = full, 0, len(sequence)
    for item in other:
        match = masks.get(item, 0)
        diagonal = ((((match & plus) + plus) ^ plus) | match | minus) & full
        up, down = minus | (full & ~(diagonal | plus)), plus & diagonal
        distance += bool(up & last) - bool(down & last)
        up = up << 1 | 1
        plus = ((down << 1) | ~(diagonal | up)) & full
        minus = up & diagonal & full
    return distance
