"""Measures the size of the source tree: files, lines, fullest folder.

`python -m docgen.size` stores the numbers of this checkout in `docgen/size.json` and rewrites docs/design/size.md.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from docgen.markdown import page, table

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "size.json"
SUFFIXES = (".py", ".cpp", ".h")
SKIPPED = {"tests", "out", "build", "dist", "node_modules"}
ROWS = {
    "files": "source files outside tests",
    "lines": "source lines outside tests",
    "median_lines": "median lines of a file",
    "files_over_300": "files of more than 300 lines",
    "fullest_folder": "fullest folder",
    "fullest_folder_modules": "modules in the fullest folder",
    "readme_lines": "README lines",
}


def measure(root: Path) -> dict[str, Any]:
    """Count Python and C++ files and lines of a checkout; empty files and files below `tests` are left out."""
    lines = {path.relative_to(root): count_lines(path) for path in sources(root)}
    folders = Counter(path.parent for path in lines if path.name != "__init__.py")
    folder, modules = min(folders.items(), key=lambda item: (-item[1], item[0]))
    return {
        "files": len(lines),
        "lines": sum(lines.values()),
        "median_lines": int(statistics.median(lines.values())),
        "files_over_300": sum(count > 300 for count in lines.values()),
        "fullest_folder": folder.as_posix(),
        "fullest_folder_modules": modules,
        "readme_lines": count_lines(root / "README.md"),
    }


def sources(root: Path) -> list[Path]:
    """Return the source files of a checkout that are not empty."""
    tops = [path for path in root.iterdir() if path.name not in SKIPPED and not path.name.startswith(".")]
    found = [path for top in tops if top.is_dir() for path in top.rglob("*")] + tops
    return sorted(path for path in found if path.is_file() and path.suffix in SUFFIXES and path.stat().st_size)


def count_lines(path: Path) -> int:
    """Return the number of lines of a text file."""
    return len(path.read_text(encoding="utf-8").splitlines())


def size_page() -> str:
    """Render the page from the committed numbers."""
    results = json.loads(RESULTS.read_text())
    rows = []
    for key, meaning in ROWS.items():
        values = [results[column][key] for column in ("before", "after")]
        rows.append([meaning, *(f"{value:,}" if isinstance(value, int) else f"`{value}`" for value in values)])
    return page(
        "Size of the source tree",
        "Before (commit 7fbe96c) and after the modules were sorted into rooms. Measured by `python -m docgen.size`. "
        "Source files are Python and C++ files.",
        table(("", "before", "after"), rows),
    )


def main() -> int:
    """Measure the checkout, store the numbers, and rewrite the page."""
    results = {**json.loads(RESULTS.read_text()), "after": measure(ROOT)}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    (ROOT / "docs/design/size.md").write_text(size_page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
