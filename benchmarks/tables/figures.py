"""Renders figures in prose from committed results.

A figure is followed by a comment with its key: `3.44<!-- = methods > methods > sd_chain > … : .2f -->`. The key is the
results file and a path in it, separated by ` > `; a list's entry is an index. After ` : ` come the format, and before
it, after ` / `, a second path of the same file to divide by. `python -m benchmarks.tables` writes the figures again.
"""

from __future__ import annotations

import re
from typing import Any

from benchmarks.harness.markdown import Cells, Results

FIGURE = re.compile(r"(?P<figure>[-−+]?\d[\d,.]*(?: %)?)<!-- = (?P<key>[^\n]*?) : (?P<format>[^ \n]+) -->")
PRINTED = re.compile(r"\d[\d,.]*(?: %)?<!-- paper -->")
"""A figure that a paper prints."""
UNKEYED = re.compile(r"(?<![\w.=/`-])(?<!= )(?<!guidance )(?<!guidance of )\d+\.\d+(?!\d|\.\d)")
"""A decimal number that is no setting (`δ = 0.1`)."""


def value_of(key: str, results: dict[str, Results]) -> float:
    """Return the value of a key; raise KeyError if the results lack it."""
    path, _, below = key.partition(" / ")
    source, *steps = path.split(" > ")
    value = _at(results[source], steps)
    return value / _at(results[source], below.split(" > ")) if below else value


def _at(results: Any, steps: list[str]) -> float:
    for step in steps:
        results = results[int(step) if isinstance(results, list) else step]
    return float(results)


def refresh(text: str, results: dict[str, Results]) -> str:
    """Render every figure of `text` again."""

    def render(match: re.Match[str]) -> str:
        value = Cells().format_field(value_of(match["key"], results), match["format"])
        return f"{value}<!-- = {match['key']} : {match['format']} -->"

    return FIGURE.sub(render, text)


def unkeyed(text: str) -> list[str]:
    """Return the decimal numbers of a text that are neither keyed nor a paper's; tables and code are left out."""
    prose = re.sub(r"```.*?```|`[^`\n]*`|<!-- table: .*?<!-- end -->|^\|.*?$", "", text, flags=re.DOTALL | re.MULTILINE)
    return UNKEYED.findall(PRINTED.sub("", FIGURE.sub("", prose)))
