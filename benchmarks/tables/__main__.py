"""Renders tables and plots from committed results into the documents.

    python -m benchmarks.tables      # rewrites the generated parts of README.md and docs, and the plots

A generated part is between `<!-- table: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from benchmarks import (
    ablations,
    decode,
    speed_plots,
)
from benchmarks.engine import tables as engine_tables
from benchmarks.gpu import tables as gpu_tables
from benchmarks.guarantees import audit, estimate, verification
from benchmarks.harness import results as files
from benchmarks.harness.markdown import Results
from benchmarks.lantern import tables as lantern_tables
from benchmarks.methods import tables as method_tables
from benchmarks.peers import tables as peer_tables
from benchmarks.real import heads as real_heads
from benchmarks.real import peers as real_peers
from benchmarks.real import speed_tables as real_speed
from benchmarks.real import text as real_text
from benchmarks.real import vision as real_vision
from benchmarks.scale import tables as scale_tables
from benchmarks.tables.archive import ARCHIVED
from benchmarks.tables.scale import AUTOSCALING

TRADE_OFF = Path("docs/results") / "lantern_trade_off.svg"
LOSSY_TRADE_OFF = Path("docs/results") / "lossy_trade_off.svg"
MARK = re.compile(r"(<!-- table: (?P<name>[a-z_]+) -->\n).*?(<!-- end -->)", re.DOTALL)
DOCUMENTS = [path for path in (Path("README.md"), *sorted(Path("docs").rglob("*.md"))) if MARK.search(path.read_text())]
SOURCES: dict[str, Mapping[str, Callable[[Results], str]]] = {
    "methods": method_tables.TABLES,
    "lantern": {**lantern_tables.TABLES, **lantern_tables.LINES},
    "ablations": {"ablations": ablations.ablations_tables},
    "decode": decode.TABLES,
    "autoscaling": {"autoscaling": AUTOSCALING},
    "peers": peer_tables.TABLES,
    "engine": engine_tables.TABLES,
    "gpu": gpu_tables.TABLES,
    "scale": scale_tables.TABLES,
    "real": {
        "real_equality": real_text.equality_table,
        "real_head_training": real_heads.training_table,
        "real_heads": partial(real_text.equality_table, part="heads"),
        "real_peers": real_peers.engines_table,
        "real_peers_line": real_peers.engines_line,
    },
    "real_speed": real_speed.TABLES,
    "real_vision": {
        **real_vision.TABLES,
        "real_vision_peers": real_peers.engines_table,
        "real_vision_peers_line": real_peers.engines_line,
    },
    "real_vision_clips": real_vision.CLIP_TABLES,
    "verification": verification.TABLES,
    "audit": audit.TABLES,
    "estimate": estimate.TABLES,
    **{source: one.renders() for source, one in ARCHIVED.items()},
}
TABLES: dict[str, tuple[str, Callable[[Results], str]]] = {
    **{name: (source, make) for source, tables in SOURCES.items() for name, make in tables.items()},
    **speed_plots.TABLES,
}
"""Name → the results of a table, and the function that renders it."""
MODULES = {
    "audit": "guarantees.audit",
    "estimate": "guarantees.estimate",
    "real_speed": "real.speed",
    "real_vision": "real.vision",
    "real_vision_clips": "real.vision --scenario clip",
    "verification": "guarantees.verification",
}
"""Results → the module that makes them, if its name is another one."""


def read_results() -> dict[str, Results]:
    """Load the committed results by file name."""
    paths = {source: files.results_file(source) for source, _ in TABLES.values()}
    return {name: files.read_results(path) for name, path in sorted(paths.items()) if path.exists()}


def fill(text: str, results: dict[str, Results]) -> str:
    """Render every generated part of `text` again; a part without results names the command to run."""

    def render(found: re.Match[str]) -> str:
        source, table = TABLES[found["name"]]
        missing = f"`python -m benchmarks.{MODULES.get(source, source)}` was not run yet."
        return found[1] + (table(results[source]) if source in results else missing) + "\n" + found[3]

    return MARK.sub(render, text)


def main() -> int:
    results = read_results()
    for path in DOCUMENTS:
        path.write_text(fill(path.read_text(), results))
    TRADE_OFF.write_text(lantern_tables.draw_trade_off(results["lantern"]))
    LOSSY_TRADE_OFF.write_text(ablations.draw_trade_off(results["ablations"], results["methods"]))
    for path, picture in speed_plots.draw_all(results).items():
        path.write_text(picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
