"""Renders results by specifications, `data/*.yaml`: which rows and which columns a table has.

A file maps results to `command`, to `commit` if that code was deleted since, and to `parts` by name. A part is a table
(`Table`), a paragraph (`text`, a template of `Cells`), a plot (`plot`, its caption), or the output of a `function`. A
table may read a part of the results (`at`, a path) or several (`of`), and have a paragraph `before` it; what was
`left_out` follows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from benchmarks.harness.markdown import Cells, Results, table

DATA = Path(__file__).parent / "data"
Function = Callable[..., Any]
Render = Callable[[Results], str]


@dataclass(frozen=True)
class Table:
    """A table as data: titles, and the template of a row, both separated by ` | `.

    `rows` is a path into the results (`pairs.*.rows.*`, where `*` is every entry), or a function of them. The template
    reads the keys of the path by position (`{0}`), and the fields of a row and those that `derive` computes from it by
    name. A field that a row lacks is `absent`, an error without it.
    """

    titles: str
    cells: str
    rows: str | Callable[[Results], Iterable[Results]] = "rows.*"
    derive: Callable[[Results], Results] = lambda _: {}
    absent: str | None = None

    def __call__(self, results: Results) -> str:
        if callable(self.rows):
            rows: Iterable[tuple[tuple[Any, ...], Any]] = (((), row) for row in self.rows(results))
        else:
            rows = select(results, self.rows.split("."))
        return table(self.titles, [self.line(keys, row) for keys, row in rows])

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


def select(results: Any, path: Sequence[str]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield every entry at a path with the keys for its `*`."""
    if not path:
        yield (), results
    elif path[0] != "*":
        yield from select(results[path[0]], path[1:])
    else:
        for key, entry in results.items() if isinstance(results, Mapping) else enumerate(results):
            yield from (((key, *keys), leaf) for keys, leaf in select(entry, path[1:]))


@dataclass(frozen=True)
class Part:
    """A generated part of the documents: its results, the command that writes them, and its rendering."""

    source: str
    command: str
    render: Render


def load(functions: Mapping[str, Function], folder: Path = DATA) -> dict[str, Part]:
    """Load all parts by name; `functions` are those that the files name."""
    parts: dict[str, Part] = {}
    for path in sorted(folder.glob("*.yaml")):
        for source, group in yaml.safe_load(path.read_text(encoding="utf-8")).items():
            for name, spec in group["parts"].items():
                render = _render_of(name, spec, functions)
                parts[name] = Part(source.split("/")[0], group["command"], _noted(render, group))
    return parts


def _render_of(name: str, spec: dict[str, Any], functions: Mapping[str, Function]) -> Render:
    if "function" in spec:
        return functions[spec["function"]]
    if "text" in spec:
        return lambda results: Cells().vformat(" ".join(spec["text"].split()), (), results)
    if "plot" in spec:
        return lambda _: f"![{spec['plot']}]({name}.svg)"
    rows = spec.get("rows", "rows.*")
    derive = functions[spec["derive"]] if "derive" in spec else lambda _: {}
    layout = Table(spec["titles"].strip(), spec["cells"].strip(), functions.get(rows, rows), derive, spec.get("absent"))
    return partial(_render_table, layout, spec)


def _render_table(layout: Table, spec: dict[str, Any], results: Results) -> str:
    """Render a table with its surroundings, or why there are no figures."""
    path, sections = spec.get("at", ""), spec.get("of", ())
    figures = results
    for key in path.split(".") if path else ():
        figures = figures.get(key, {})
    if not figures or (sections and not any(name in results for name in sections)):
        name = path or sections[0]
        reason = {**results.get("failed", {}), **results.get("skipped", {})}.get(name)
        return f"*{name}*: no figures, {reason}." if reason else "Not measured yet."
    parts = [Cells().vformat(spec["before"].strip(), (), results)] if "before" in spec else []
    parts.append(layout(figures))
    groups = [results[name] for name in sections if name in results] or ([figures] if spec.get("left_out") else [])
    if left_out := [entry for group in groups for entry in group["left_out"]]:
        parts.append(f"Left out: {'; '.join(left_out)}.")
    return "\n\n".join(parts)


def _noted(render: Render, group: dict[str, Any]) -> Render:
    """Return a rendering with commit and command below it if the code was deleted."""
    if "commit" not in group:
        return render
    note = f"Measured at commit `{group['commit']}` by `{group['command']}`; that code was deleted since."
    return lambda results: f"{render(results)}\n\n{note}"
