"""Measures the size of the source tree: files, lines, fullest folder, hot path.

    python -m docgen.size                       # measures this checkout and rewrites docs/design/size.md
    python -m docgen.size --hot-path FILE --drafts-path FILE    # also hot paths, from lists of docgen.hot_path
    python -m docgen.size --column before --root OTHER_CHECKOUT

Numbers are stored in `docgen/size.json`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
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
    "hot_path_files": "files on the hot path",
    "hot_path_lines": "lines of these files",
    "hot_path_functions": "functions called on the hot path",
    "drafts_path_files": "files on the hot path with drafts",
    "drafts_path_lines": "lines of these files",
    "drafts_path_functions": "functions called on the hot path with drafts",
}
PATHS = ("hot_path", "drafts_path")


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


def hot_path(root: Path, listing: Path, name: str) -> dict[str, int]:
    """Count the files, lines and functions in a listing with one `path:function` per line."""
    called = set(listing.read_text().split())
    files = {entry.split(":")[0] for entry in called}
    return {
        f"{name}_files": len(files),
        f"{name}_lines": sum(count_lines(root / file) for file in files),
        f"{name}_functions": len(called),
    }


def sources(root: Path) -> list[Path]:
    """Return the source files of a checkout that are not empty."""
    tops = [path for path in root.iterdir() if path.name not in SKIPPED and not path.name.startswith(".")]
    paths = [path for top in tops if top.is_dir() for path in top.rglob("*")] + tops
    return sorted(path for path in paths if path.is_file() and path.suffix in SUFFIXES and path.stat().st_size)


def count_lines(path: Path) -> int:
    """Return the number of lines of a text file."""
    return len(path.read_text(encoding="utf-8").splitlines())


def size_page() -> str:
    """Render the page from the committed numbers."""
    results = json.loads(RESULTS.read_text())
    rows = [
        [meaning, *(_shown(results[column].get(key)) for column in ("before", "after"))]
        for key, meaning in ROWS.items()
    ]
    return page(
        "Size of the source tree",
        "Before (commit fe2a2ed9) and now. Measured by `python -m docgen.size`. Source files are Python and C++ files. "
        "The hot path is every function of the project that runs in any process of `python -m jobs.caption` on four "
        "images: `configs/jobs/zoo_caption_plain.yaml`, and with drafts `configs/jobs/zoo_caption.yaml`. "
        "`python -m docgen.hot_path` records it.",
        table(("", "before", "after"), rows),
    )


def _shown(value: int | str | None) -> str:
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"`{value}`"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the checkout, store the numbers, and rewrite the page."""
    parser = argparse.ArgumentParser(prog="python -m docgen.size", description="Measure the size of a checkout.")
    parser.add_argument("--column", choices=("before", "after"), default="after", help="the column to replace")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout to measure")
    parser.add_argument("--hot-path", type=Path, metavar="FILE", help="the listing of docgen.hot_path")
    parser.add_argument("--drafts-path", type=Path, metavar="FILE", help="the listing of a job with drafts")
    arguments = parser.parse_args(argv)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"before": {}, "after": {}}
    measured = {key: value for key, value in results[arguments.column].items() if key.startswith(PATHS)}
    for name in PATHS:
        if listing := getattr(arguments, name):
            measured |= hot_path(arguments.root, listing, name)
    results[arguments.column] = {**measure(arguments.root), **measured}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    (ROOT / "docs/design/size.md").write_text(size_page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
