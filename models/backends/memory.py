"""Measure free memory of the machine, from /proc and cgroup files, and release unused memory of CUDA devices."""

from __future__ import annotations

import os
from pathlib import Path

import torch

MEMINFO = Path("/proc/meminfo")
CONTROL_GROUP = Path("/sys/fs/cgroup")


def free_bytes(meminfo: Path = MEMINFO, control_group: Path = CONTROL_GROUP) -> int:
    """Return the available bytes of host memory: the smaller of the machine's and the container's (cgroup).

    Inactive file pages of the container count as available.
    """
    lines = meminfo.read_text().splitlines() if meminfo.exists() else []
    available = [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    free = available[0] if available else os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit, current, stat = (control_group / f"memory.{name}" for name in ("max", "current", "stat"))
    if not limit.exists() or limit.read_text().strip() == "max":
        return free
    inactive = [int(line.split()[1]) for line in stat.read_text().splitlines() if line.startswith("inactive_file ")]
    return min(free, int(limit.read_text()) - int(current.read_text()) + sum(inactive))


def release_unused() -> None:
    """Release unused blocks of the CUDA caching allocator to the devices; no-op if CUDA is not initialized."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
