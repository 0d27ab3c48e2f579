"""Tables made from committed results, and the places in the documents where they stand.

    python -m benchmarks.tables      # rewrites the generated parts of README.md and of pages in docs, and the pictures

A generated part stands between `<!-- table: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import (
    auto_tables,
    deciding,
    decode_tables,
    engine_tables,
    fleet_tables,
    gpu_tables,
    headline_tables,
    lantern_tables,
    peer_tables,
    pipeline_tables,
    speed_plots,
    synthetic_tables,
)
from benchmarks.claims import length_error
from benchmarks.scenarios import IN_DISTRIBUTION, OUT_OF_DISTRIBUTION, VIDEO

RESULTS = Path(__file__).parent / "results"
DOCUMENTS = (
    Path("README.md"),
    Path("docs/methods/index.md"),
    Path("docs/results/methods.md"),
    Path("docs/results/lantern.md"),
    Path("docs/results/performance.md"),
    Path("docs/design/log.md"),
)
TRADE_OFF = Path("docs/results") / "lantern_trade_off.svg"
MARK = re.compile(r"(<!-- table: (?P<name>[a-z_]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def acceptance_table(results: dict[str, Any]) -> str:
    """Mean acceptance length (bonus included) of every method in every scenario."""
    keys = (*IN_DISTRIBUTION, *OUT_OF_DISTRIBUTION)
    lines = ["| method | " + " | ".join(key.replace("_", " ") for key in keys) + " |", "|---" * (len(keys) + 1) + "|"]
    for name, result in results["methods"].items():
        found = [result["scenarios"].get(key) for key in keys]
        cells = ["–" if cell is None else f"{cell['mean_acceptance_length']:.2f}" for cell in found]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def cost_table(results: dict[str, Any]) -> str:
    """Cost and quality on single images."""
    lines = [
        "| method | mode | acceptance length | drafted per step | target forwards per token | relaxed "
        "| attributes right | retention | attribute words F1 | equal to plain |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    base = results["methods"]["plain"]["scenarios"]["single"]["accuracy"]
    for name, result in results["methods"].items():
        cell = result["scenarios"]["single"]
        lines.append(
            f"| {name} | {result['verify_mode']} | {cell['mean_acceptance_length']:.2f} "
            f"| {cell['drafted_per_step']:.1f} | {cell['target_forwards_per_token']:.3f} "
            f"| {100 * cell['relaxed_share']:.0f} % | {cell['accuracy']:.3f} "
            f"| {cell['accuracy'] / base if base else 0.0:.3f} | {cell['attribute_f1']:.3f} "
            f"| {100 * cell['equal_share']:.0f} % |"
        )
    return "\n".join(lines)


def claims_table(results: dict[str, Any]) -> str:
    """The papers' claims and whether they hold here."""
    return deciding.claims_table(results.get("claims", []))


def video_table(results: dict[str, Any]) -> str:
    """Acceptance length, nodes and attributes of every method on the video pair, by question."""
    columns = "".join(f" {key}: length | attributes right |" for key in VIDEO)
    lines = [f"| method | mode | drafted per step |{columns} equal to plain |"]
    lines.append("|---" * (4 + 2 * len(VIDEO)) + "|")
    for name, result in results["video"]["methods"].items():
        cells = [result["scenarios"][key] for key in VIDEO]
        told = "".join(
            f" {cell['mean_acceptance_length']:.2f} ± {cell['acceptance_length_se']:.2f} "
            f"| {cell['accuracy']:.3f} ± {cell['accuracy_se']:.3f} |"
            for cell in cells
        )
        equal = 100 * sum(cell["equal_share"] for cell in cells) / len(cells)
        lines.append(f"| {name} | {result['verify_mode']} | {cells[0]['drafted_per_step']:.1f} |{told} {equal:.0f} % |")
    return "\n".join(lines)


def pruning_table(results: dict[str, Any]) -> str:
    """Guided against uniform pruning: acceptance length, and the share of the pictures' cells that the drafter sees."""
    lines = ["| scenario | guided | uniform | cells seen, guided | uniform |", "|---|---|---|---|---|"]
    for key in (*IN_DISTRIBUTION, *OUT_OF_DISTRIBUTION):
        names = ("specvlm", "specvlm_uniform")
        cells = [results["methods"][name]["scenarios"][key] for name in names]
        lengths = [f"{cell['mean_acceptance_length']:.2f} ± {length_error(cell):.2f}" for cell in cells]
        seen = [results["pruning"][name].get(key) for name in names]
        shares = ["–" if share is None else f"{share:.2f}" for share in seen]
        lines.append(f"| {key.replace('_', ' ')} | {' | '.join((*lengths, *shares))} |")
    return "\n".join(lines)


METHOD_TABLES = {
    "acceptance": acceptance_table,
    "cost": cost_table,
    "claims": claims_table,
    "video_methods": video_table,
    "pruning": pruning_table,
}
TABLES: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    **{name: ("methods", make) for name, make in METHOD_TABLES.items()},
    **{name: ("methods", make) for name, make in headline_tables.TABLES.items()},
    **{name: ("lantern", make) for name, make in {**lantern_tables.TABLES, **lantern_tables.LINES}.items()},
    **{name: ("decode", make) for name, make in decode_tables.TABLES.items()},
    **{name: (name, make) for name, make in fleet_tables.TABLES.items()},
    **{name: ("peers", make) for name, make in peer_tables.TABLES.items()},
    **{name: ("engine", make) for name, make in engine_tables.TABLES.items()},
    **{name: ("gpu", make) for name, make in gpu_tables.TABLES.items()},
    **{name: ("pipeline", make) for name, make in pipeline_tables.TABLES.items()},
    **{name: ("auto", make) for name, make in auto_tables.TABLES.items()},
    **{name: ("synthetic", make) for name, make in synthetic_tables.TABLES.items()},
    **speed_plots.TABLES,
}
"""Name → the results that the table is made from, and how."""
UNMADE = {"gpu": gpu_tables.UNMEASURED}
"""What stands in the place of a table without results; for the others, which command was not run."""


def print_tables(results: dict[str, Any]) -> None:
    """All tables of the methods, to standard output."""
    for make in METHOD_TABLES.values():
        print(make(results), end="\n\n")


def read_results() -> dict[str, dict[str, Any]]:
    """The committed results by the name of their file; a benchmark that was not run yet has none."""
    files = {source: RESULTS / f"{source}.json" for source, _ in TABLES.values()}
    return {name: json.loads(file.read_text()) for name, file in sorted(files.items()) if file.exists()}


def fill(text: str, results: dict[str, dict[str, Any]]) -> str:
    """`text` with every generated part made anew; one without results says so."""

    def make(found: re.Match[str]) -> str:
        source, table = TABLES[found["name"]]
        missing = UNMADE.get(source, f"`python -m benchmarks.{source}` was not run yet.")
        made = table(results[source]) if source in results else missing
        return found[1] + made + "\n" + found[3]

    return MARK.sub(make, text)


def main() -> int:
    """Rewrite the documents and their pictures."""
    results = read_results()
    for path in DOCUMENTS:
        path.write_text(fill(path.read_text(), results))
    TRADE_OFF.write_text(lantern_tables.draw_trade_off(results["lantern"]))
    for path, picture in speed_plots.draw_all(results).items():
        path.write_text(picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
