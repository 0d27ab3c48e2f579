"""Tables of jobs and fleets."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.harness.markdown import Results, Table


def _moments(results: Results) -> Iterator[Results]:
    end = next((one for one in results["time_line"] if one["at_s"] >= results["job_done_at_s"]), None)
    for moment in results["time_line"]:
        yield moment | {"note": "the job has ended" if moment is end else ""}


AUTOSCALING = Table("seconds | worker nodes | actors | ", "{at_s:.1f} | {num_nodes} | {num_actors} | {note}", _moments)
"""Nodes and actors of a job over time, measured by tests/cluster/test_autoscaling.py."""
