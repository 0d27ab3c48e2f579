"""Measures the time that a user waits for a command: from its start, imports included, to its last line."""

from __future__ import annotations

import os
import time
from pathlib import Path


def command_start(is_command_line: bool) -> float:
    """Return the time (`time.monotonic`) at which the command began: the start of this process if it is the process's
    command line and the system has the time of its start, else now."""
    now = time.monotonic()
    if not is_command_line:
        return now
    try:
        ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
        uptime_s = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):  # no Linux
        return now
    return now - max(0.0, uptime_s - ticks / os.sysconf("SC_CLK_TCK"))
