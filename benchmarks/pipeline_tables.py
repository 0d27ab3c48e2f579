"""The table of whole jobs, from `benchmarks.pipeline`."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.peer_tables import figure
from benchmarks.peer_verdict import spread


def pipeline_table(results: dict[str, Any]) -> str:
    """Medians over the repeats, speeds with the lowest and the highest; without a speed where a text differs from plain
    decoding's, or is missing."""
    lines = [
        "| method | compiled | rows/s | tokens/s | engine at work | actor without input | acceptance length "
        "| texts equal |",
        "|---|---|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in results["rows"]:
        groups.setdefault((row["method"], row["compile"]), []).append(row)
    for (method, compiles), rows in groups.items():
        are_equal = all(row["num_equal"] == row["num_rows"] == results["num_scenes"] for row in rows)
        speeds = ["withheld"] * 2
        if are_equal:
            speeds = [
                figure(spread([row[name] / row["wall_s"] for row in rows]), 1) for name in ("num_rows", "num_tokens")
            ]
        shares = [
            f"{100 * statistics.median(values):.0f} %"
            for values in (
                [row["engine_s"] / row["wall_s"] for row in rows],
                [row["actors_waited_share"] for row in rows],
            )
        ]
        equal = sum(row["num_equal"] for row in rows), results["num_scenes"] * len(rows)
        length = statistics.median(row["acceptance_length"] for row in rows)
        lines.append(
            f"| {method} | {compiles} | {' | '.join(speeds)} | {' | '.join(shares)} | {length:.2f} "
            f"| {equal[0]} of {equal[1]} |"
        )
    return "\n".join(lines)


TABLES = {"pipeline": pipeline_table}
