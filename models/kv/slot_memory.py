"""What one column of a decoder's memory takes on each device, and how much of a device is free.

The size of a column is measured: two columns are written and looked at, whatever the family. Knows no slots in use,
drafters or methods.
"""

from __future__ import annotations

import torch
from torch import nn

from models.inputs.prefix import Prefix
from models.kv.free_memory import free_bytes
from models.kv.lanes import LaneModel, SlotBatch


@torch.inference_mode()
def column_bytes(decoder: nn.Module, hidden_size: int) -> dict[torch.device, int]:
    """Bytes of keys and values that one token of one row takes, by the device that they lie on."""
    weight = next(decoder.parameters())
    length, device = 2, weight.device
    lanes = LaneModel(decoder, nn.Identity(), 1, 1, length)
    numbers = torch.arange(length, device=device)
    embeds = torch.zeros(length, hidden_size, dtype=weight.dtype, device=device)
    first = SlotBatch(numbers[:1], (0,), (0,))
    lanes.admit(first, [[Prefix(numbers, embeds, numbers, numbers < 0)]])
    sizes: dict[torch.device, int] = {}
    for memory in (*lanes.cache.keys, *lanes.cache.values):
        assert memory is not None, "a layer of the decoder has written nothing"
        num_bytes = memory.shape[1] * memory.shape[3] * memory.element_size()
        sizes[memory.device] = sizes.get(memory.device, 0) + num_bytes
    return sizes


def free_device_bytes(device: torch.device) -> int:
    """Bytes that this process may still take of a device; what its own allocator keeps for later is among them."""
    if device.type != "cuda":
        return free_bytes()
    free, _ = torch.cuda.mem_get_info(device)
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free + kept)


def total_device_bytes(device: torch.device) -> int:
    """Bytes of a CUDA device, whoever holds them."""
    return int(torch.cuda.mem_get_info(device)[1])


def allocated_bytes(device: torch.device) -> int:
    """Bytes of a CUDA device that this process's tensors hold."""
    return int(torch.cuda.memory_allocated(device))
