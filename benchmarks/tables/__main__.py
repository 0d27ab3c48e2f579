"""Renders tables and plots from committed results into the documents.

    python -m benchmarks.tables      # rewrites the generated parts of README.md and docs, and the plots

A generated part is between `<!-- table: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import sys

from benchmarks.tables.parts import DOCUMENTS, fill, read_all
from benchmarks.tables.plots import draw_changed


def main() -> int:
    results = read_all()
    for path in DOCUMENTS:
        path.write_text(fill(path.read_text(), results))
    draw_changed(results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
