"""Write every generated page, or compare the committed pages with the code.

python -m docgen            # rewrites docs/reference/* and the generated parts of other pages
python -m docgen --check    # changes nothing; exit status 1 and the names of outdated pages
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from docgen import pages

ROOT = Path(__file__).resolve().parents[1]


def outdated(root: Path) -> dict[Path, str]:
    """Path relative to `root` → new text of every generated page that differs from the committed one."""
    new = pages.generate(root)
    return {path: text for path, text in new.items() if not (root / path).exists() or (root / path).read_text() != text}


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0, or 1 if `--check` found an outdated page."""
    parser = argparse.ArgumentParser(prog="python -m docgen", description="Generate the reference pages from code.")
    parser.add_argument("--check", action="store_true", help="compare only; exit status 1 if a page is outdated")
    arguments = parser.parse_args(argv)
    found = outdated(ROOT)
    for path, text in found.items():
        print(f"{'outdated' if arguments.check else 'wrote'} {path}")
        if not arguments.check:
            (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
            (ROOT / path).write_text(text)
    return 1 if arguments.check and found else 0


if __name__ == "__main__":
    sys.exit(main())
