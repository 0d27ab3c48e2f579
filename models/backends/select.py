"""Select the backend of a device, and the device of a configured name."""

from __future__ import annotations

import torch

from models.backends.base import REFERENCE, Backend
from models.backends.cpu.backend import CpuBackend
from models.backends.cuda.backend import CudaBackend

_BACKENDS: dict[str, Backend] = {"cpu": CpuBackend(), "cuda": CudaBackend()}


def backend_for(device: torch.device) -> Backend:
    """Return the backend of a device; device types other than CPU and CUDA use the reference backend."""
    return _BACKENDS.get(device.type, REFERENCE)


def resolve_device(name: str) -> torch.device:
    """Return the device of a configured name; "auto" is CUDA if available, otherwise the CPU."""
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)


def is_on(name: str, device: torch.device) -> bool:
    """Return whether the configured name of a device means `device`; a name without a number means any of its type."""
    return name == "auto" or torch.device(name) in (device, torch.device(device.type))


def cuda_devices(count: int) -> list[torch.device]:
    """Return the first `count` CUDA devices, or all if there are fewer."""
    return [torch.device("cuda", number) for number in range(min(count, torch.cuda.device_count()))]
