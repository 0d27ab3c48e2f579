"""How much memory of the machine a process may still take. Knows Linux; elsewhere it says what the system says."""

from __future__ import annotations

import os
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CONTROL_GROUP = Path("/sys/fs/cgroup")


def free_bytes(meminfo: Path = MEMINFO, control_group: Path = CONTROL_GROUP) -> int:
    """Bytes that are free or would be freed on demand: the machine's, or the container's where that has fewer."""
    return min([_of_machine(meminfo), *_of_group(control_group)])


def _of_machine(meminfo: Path) -> int:
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _of_group(folder: Path) -> list[int]:
    """Nothing where there is no limit; files that the kernel keeps for later are given up on demand."""
    limit, current, stat = (folder / f"memory.{name}" for name in ("max", "current", "stat"))
    if not limit.exists() or limit.read_text().strip() == "max":
        return []
    kept = [int(line.split()[1]) for line in stat.read_text().splitlines() if line.startswith("inactive_file ")]
    return [int(limit.read_text()) - int(current.read_text()) + sum(kept)]
