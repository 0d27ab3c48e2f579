"""Measure free memory of the machine, from /proc and cgroup files, and release unused memory of CUDA devices."""

from __future__ import annotations

import os
from pathlib import Path

import torch

MEMINFO = Path("/proc/meminfo")
CONTROL_GROUP = Path("/sys/fs/cgroup")


def free_bytes(meminfo: Path = MEMINFO, control_group: Path = CONTROL_GROUP) -> int:
    """Return the available bytes of host memory: the smaller of the machine's and the container's."""
    return min([_of_machine(meminfo), *_of_group(control_group)])


def release_unused() -> None:
    """Release unused blocks of the CUDA caching allocator to the devices; no-op if CUDA is not initialized."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def _of_machine(meminfo: Path) -> int:
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _of_group(folder: Path) -> list[int]:
    """Return the free bytes of the container (cgroup), inactive file pages included; empty if it has no limit."""
    limit, current, stat = (folder / f"memory.{name}" for name in ("max", "current", "stat"))
    if not limit.exists() or limit.read_text().strip() == "max":
        return []
    inactive = [int(line.split()[1]) for line in stat.read_text().splitlines() if line.startswith("inactive_file ")]
    return [int(limit.read_text()) - int(current.read_text()) + sum(inactive)]
