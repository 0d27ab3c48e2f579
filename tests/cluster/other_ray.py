"""Finds Ray processes of other programs; cluster tests refuse to start beside them.

Cluster tests identify a node's processes by name and end nodes, and a second Ray would slow them down.
Linux only: processes are found in /proc.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

CORE = ("/raylet/raylet", "/gcs/gcs_server")
"""Ray processes that run on each node, and those of the head node."""


def rays_running(processes: Path = Path("/proc")) -> dict[int, str]:
    """The core processes of every Ray on this machine, by their ids, with what was started."""
    sessions = {}
    for folder in processes.glob("[0-9]*"):
        try:
            started = (folder / "cmdline").read_bytes().partition(b"\0")[0].decode(errors="replace")
        except OSError:
            continue  # it has ended
        if started.endswith(CORE):
            sessions[int(folder.name)] = started
    return sessions


def refusal(foreign: Iterable[int]) -> str:
    """Why nothing is started beside these; empty where there are none."""
    ids = ", ".join(map(str, sorted(foreign)))
    return (
        f"another Ray runs on this machine (processes {ids}): the tests of clusters do not run beside it. "
        "Wait until it has ended, or end it with `ray stop` if it is yours"
        if ids
        else ""
    )
