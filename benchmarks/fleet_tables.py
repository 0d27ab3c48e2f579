"""Tables of how a job uses many actors, and what the graph costs them."""

from __future__ import annotations

from typing import Any


def scheduling_table(results: dict[str, Any]) -> str:
    """Shares of the actors' time, from `benchmarks.scheduling`."""
    lines = [
        "| actors | rows per second | share of ideal | sleeps that took too long | without a row |",
        "|---|---|---|---|---|",
    ]
    for num_actors, cell in results["cells"].items():
        shares = (cell[name] for name in ("share_of_ideal", "late_share", "without_row_share"))
        told = " | ".join(f"{100 * share:.1f} %" for share in shares)
        lines.append(f"| {num_actors} | {cell['rows_per_s']:.1f} | {told} |")
    return "\n".join(lines)


def autoscaling_table(results: dict[str, Any]) -> str:
    """How many nodes and actors a job had, from the test of autoscaling; a line for each change."""
    lines = ["| seconds | worker nodes | actors |  |", "|---|---|---|---|"]
    done_s = results["job_done_at_s"]
    seen_end = False
    for moment in results["time_line"]:
        told = "the job has ended" if moment["at_s"] >= done_s and not seen_end else ""
        seen_end = seen_end or bool(told)
        lines.append(f"| {moment['at_s']:.1f} | {moment['num_nodes']} | {moment['num_actors']} | {told} |")
    return "\n".join(lines)


TABLES = {"scheduling": scheduling_table, "autoscaling": autoscaling_table}
