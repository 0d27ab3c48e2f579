"""Describes the Ray that a job would start on this machine, as Ray detects it; starts nothing."""

from __future__ import annotations

import os
import sys

from configs.load import ConfigError
from configs.pool import JobSectionConfig
from pipeline.resources.capacity import Capacity, Node
from pipeline.storage import access

TORCH_CUDA_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Variables of the GPUs that torch calls CUDA devices. Ray counts GPUs of Apple and Intel too."""


def this_machine(num_cpus: int) -> Capacity:
    """Return what a local Ray with this number of CPUs has; GPUs that `CUDA_VISIBLE_DEVICES` hides do not count.

    CUDA is not initialised. Raises ConfigError if Ray cannot start here.
    """
    from ray._private.accelerators import get_accelerator_manager_for_resource
    from ray._private.resource_and_label_spec import ResourceAndLabelSpec

    try:
        spec = ResourceAndLabelSpec(num_cpus, memory=1, object_store_memory=1)
        spec.resolve(is_head=True, node_ip_address="127.0.0.1")
        manager = get_accelerator_manager_for_resource("GPU")
    except Exception as error:  # drivers of GPUs raise errors of their own
        raise ConfigError(f"job.ray_address: a local Ray cannot start: {access.reason_of(error)}") from None
    variable = manager.get_visible_accelerator_ids_env_var()
    listed = os.environ.get(variable) if variable else None
    gpus = spec.num_gpus if listed is None else min(spec.num_gpus, num_listed(listed))
    node = Node({**spec.resources, "CPU": spec.num_cpus, "GPU": gpus}, spec.labels)
    return Capacity("this machine", (node,), is_private=True, has_cuda=variable in TORCH_CUDA_VARIABLES)


def local_cpus(job: JobSectionConfig) -> int:
    """Return the logical CPUs of a local Ray."""
    return job.num_cpus or max(2, available_cpus())


def available_cpus() -> int:
    """Return the number of cores that this process may use, which may be fewer than the machine has."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def memory_bytes() -> int:
    """Return the memory of this machine, or of the container that this process runs in."""
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in _CGROUP_LIMITS:
        try:
            with open(path, encoding="ascii") as file:
                there = min(there, int(file.read()))
        except (OSError, ValueError):  # no such limit, or `max`
            continue
    return there


def gpu_memory_bytes() -> list[int]:
    """Return the memory of each visible NVIDIA GPU, without starting CUDA; empty if the driver does not report it."""
    from ray._private.thirdparty import pynvml

    try:
        pynvml.nvmlInit()
        try:
            handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
            return [int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) for handle in handles]
        finally:
            pynvml.nvmlShutdown()
    except Exception:  # no driver, or one without this interface
        return []


def num_listed(ids: str) -> int:
    """Return the number of devices in a list such as `0,1`; CUDA ignores a negative one and all that follow it."""
    number = 0
    for device in (part.strip() for part in ids.split(",")):
        if device in ("", "NoDevFiles") or device.startswith("-"):
            break
        number += 1
    return number
