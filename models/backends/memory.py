"""Memory of the machine and of devices: free, total, allocated. Machine memory is read from Linux's own files."""

from __future__ import annotations

import os
from pathlib import Path

import torch

MEMINFO = Path("/proc/meminfo")
CONTROL_GROUP = Path("/sys/fs/cgroup")


def free_bytes(meminfo: Path = MEMINFO, control_group: Path = CONTROL_GROUP) -> int:
    """Bytes of machine memory that are free or can be reclaimed: the machine's or the container's, the smaller one."""
    return min([_of_machine(meminfo), *_of_group(control_group)])


def free_cuda_bytes(device: torch.device) -> int:
    """Bytes of a CUDA device that this process can still allocate, its allocator's unused blocks included."""
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free + unused)


def total_cuda_bytes(device: torch.device) -> int:
    """Bytes of a CUDA device."""
    return int(torch.cuda.mem_get_info(device)[1])


def allocated_cuda_bytes(device: torch.device) -> int:
    """Bytes of a CUDA device that this process's tensors use."""
    return int(torch.cuda.memory_allocated(device))


def release_unused() -> None:
    """Return the allocator's unused blocks to the CUDA devices that this process uses."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def _of_machine(meminfo: Path) -> int:
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _of_group(folder: Path) -> list[int]:
    """The container's limit; empty without one. Inactive file pages count as free."""
    limit, current, stat = (folder / f"memory.{name}" for name in ("max", "current", "stat"))
    if not limit.exists() or limit.read_text().strip() == "max":
        return []
    inactive = [int(line.split()[1]) for line in stat.read_text().splitlines() if line.startswith("inactive_file ")]
    return [int(limit.read_text()) - int(current.read_text()) + sum(inactive)]
