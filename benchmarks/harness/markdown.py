"""Renders results as Markdown tables whose rows and columns are data."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

GIB = 2**30
Results = dict[str, Any]
LENGTH = "{mean_acceptance_length:.2f} ± {acceptance_length_se:.2f}"


class Cells(string.Formatter):
    """`str.format` whose values may be percentages (`{share:.1%}` is `12.5 %`), medians with a range, which the format
    applies to each of, verdicts on outputs, and None for withheld figures."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if value is None:
            return "withheld"
        if isinstance(value, Mapping):
            if "num_equal" in value:
                return equality(dict(value))
            middle, low, high = (format(value[name], format_spec) for name in ("median", "low", "high"))
            return f"{middle} ({low}–{high})"
        text = str(super().format_field(value, format_spec))
        return f"{text[:-1]} %" if format_spec.endswith("%") else text


@dataclass(frozen=True)
class Table:
    """A table as data: titles, and the template of a row, both separated by ` | `.

    `rows` is a path into the results (`pairs.*.rows.*`, where `*` is every entry), or a function of them. The
    template reads the keys of the path by position (`{0}`), and the fields of a row and those that `derive` computes
    from it by name. A field that a row lacks is `absent`, an error without it.
    """

    titles: str
    cells: str
    rows: str | Callable[[Results], Iterable[Results]] = "rows.*"
    derive: Callable[[Results], Results] = lambda _: {}
    absent: str | None = None

    def __call__(self, results: Results) -> str:
        if callable(self.rows):
            found: Iterable[tuple[tuple[Any, ...], Any]] = (((), row) for row in self.rows(results))
        else:
            found = select(results, self.rows.split("."))
        return table(self.titles, [self.line(keys, row) for keys, row in found])

    def line(self, keys: Sequence[Any], row: Results) -> list[str]:
        """Return the cells of one row that was found under `keys`."""
        fields, line = {**row, **self.derive(row)}, []
        for cell in self.cells.split(" | "):
            try:
                line.append(Cells().vformat(cell, keys, fields))
            except KeyError:
                if self.absent is None:
                    raise
                line.append(self.absent)
        return line


def text(template: str) -> Callable[[Results], str]:
    """Return a function that renders a paragraph from the fields of results."""
    return lambda results: Cells().vformat(template, (), results)


def select(found: Any, path: Sequence[str]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield every entry at a path with the keys for its `*`."""
    if not path:
        yield (), found
    elif path[0] != "*":
        yield from select(found[path[0]], path[1:])
    else:
        for key, entry in found.items() if isinstance(found, Mapping) else enumerate(found):
            yield from (((key, *keys), one) for keys, one in select(entry, path[1:]))


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
