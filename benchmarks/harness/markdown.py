"""Renders Markdown tables and the numbers in them."""

from __future__ import annotations

import string
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

GIB = 2**30
Results = dict[str, Any]


class Cells(string.Formatter):
    """`str.format` for cells: `{share:.1%}` is `12.5 %`, and `{seconds:/60 .0f}` divides before it formats.

    Values may also be medians with a range, lists of values, verdicts on outputs, and None for withheld figures.
    """

    def format_field(self, value: Any, format_spec: str) -> str:
        if value is None:
            return "withheld"
        if isinstance(value, list):
            return " · ".join(self.format_field(item, format_spec) for item in value)
        if isinstance(value, Mapping):
            if "num_equal" in value:
                return equality(dict(value))
            middle, low, high = (self.format_field(value[name], format_spec) for name in ("median", "low", "high"))
            return f"{middle} ({low}–{high})"
        if format_spec.startswith("/"):
            divisor, _, format_spec = format_spec[1:].partition(" ")
            value = value / float(divisor)
        text = str(super().format_field(value, format_spec))
        return f"{text[:-1]} %" if format_spec.endswith("%") else text


def table(columns: str | Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Render a Markdown table; `columns` may be one string with the titles separated by ` | `."""
    titles = columns.split(" | ") if isinstance(columns, str) else columns
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)])


def percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f} %"


def figure(cell: dict[str, float] | None, digits: int) -> str:
    """Render a median with its range, or `withheld`."""
    if cell is None:
        return "withheld"
    return f"{cell['median']:.{digits}f} ({cell['low']:.{digits}f}–{cell['high']:.{digits}f})"


def equality(verdict: Results) -> str:
    """Render the share of outputs equal to the reference, and whether the others differ by rounding only."""
    total, equal = verdict["num_sequences"], verdict["num_equal"]
    if equal == total:
        return "all"
    if not verdict["num_different"]:
        return f"{percent(equal / total, 1)}, the others within rounding"
    return f"{percent(equal / total, 1)}, **{verdict['num_different']} beyond rounding**"


def goals_table(goals: Iterable[tuple[str, bool | None, str]]) -> str:
    """Render goals from (text, reached or None for unknown, numbers)."""
    words = {True: "yes", False: "**no**", None: "not known"}
    rows = [(text, numbers, words[holds]) for text, holds, numbers in goals]
    return table("what was to be shown | figures | reached", rows)


def left_out(pairs: Iterable[tuple[str, str]]) -> str:
    """Render (missing resource, configuration) pairs that were not measured as sentences."""
    return "".join(f" Left out for lack of {missing}: {configuration}." for missing, configuration in pairs)


def inflated(results: Results) -> str:
    """Render the shapes and the dtype of the inflated text pair, and the number of threads."""
    return (
        f"`text_target` inflated to {results['target_shape']}, drafter `text_drafter` inflated to "
        f"{results['drafter_shape']}, {results['dtype']}, {results['threads']} threads"
    )
