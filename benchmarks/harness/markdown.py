"""Renders Markdown tables and the numbers in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

GIB = 2**30
Results = dict[str, Any]


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


def left_out(places: Iterable[tuple[str, str]]) -> str:
    """Render (missing resource, configuration) pairs that were not measured as sentences."""
    return "".join(f" Left out for lack of {missing}: {place}." for missing, place in places)


def inflated(results: Results) -> str:
    """Render the shapes and the dtype of the inflated text pair, and the number of threads."""
    return (
        f"`text_target` inflated to {results['target_shape']}, drafter `text_drafter` inflated to "
        f"{results['drafter_shape']}, {results['dtype']}, {results['threads']} threads"
    )
