"""All generated parts of the documents by name, and the results they show."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from benchmarks.harness.markdown import Results
from benchmarks.harness.results import read_results, results_file, write_results
from benchmarks.tables import archive, engine, gpu, jobs, lantern, methods, real
from benchmarks.tables.figures import FIGURE, refresh
from benchmarks.tables.specs import load

LINE_WIDTH = 130
"""Maximum length of a wrapped line of the README, also where it shows a paragraph of results."""
MODULES = (archive, engine, gpu, jobs, lantern, methods, real)
PARTS = load({name: function for module in MODULES for name, function in module.FUNCTIONS.items()})
MARK = re.compile(r"(<!-- table: (?P<name>[a-z_]+) -->\n).*?(<!-- end -->)", re.DOTALL)
DOCUMENTS = [
    path
    for path in (Path("README.md"), *sorted(Path("docs").rglob("*.md")))
    if MARK.search(path.read_text()) or FIGURE.search(path.read_text())
]


def read_all() -> dict[str, Results]:
    """Load the committed results by file name."""
    paths = {part.source: results_file(part.source) for part in PARTS.values()}
    return {name: read_results(path) for name, path in sorted(paths.items()) if path.exists()}


def fill(text: str, results: dict[str, Results]) -> str:
    """Render every generated part and every keyed figure of `text` again; a part without results names the command to
    run. Paragraphs are wrapped."""

    def render(match: re.Match[str]) -> str:
        part = PARTS[match["name"]]
        missing = f"`{part.command}` was not run yet."
        body = part.render(results[part.source]) if part.source in results else missing
        if "\n" not in body:
            body = textwrap.fill(body, LINE_WIDTH, break_long_words=False, break_on_hyphens=False)
        return f"{match[1]}{body}\n{match[3]}"

    return refresh(MARK.sub(render, text), results)


def show(source: str, results: Results, *names: str) -> str:
    """Return the tables of a results file, or those named."""
    return "\n\n".join(
        part.render(results) for name, part in PARTS.items() if part.source == source and (not names or name in names)
    )


def finish(path: Path, results: Results, *names: str) -> int:
    """Write results, print their tables, and return exit status 0."""
    write_results(path, results)
    print(show(path.stem, results, *names))
    return 0
