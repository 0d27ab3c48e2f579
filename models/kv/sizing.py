"""Measure the bytes of a decoder's KV cache."""

from __future__ import annotations

import torch
from torch import nn

from models.inputs.prefix import Prefix
from models.kv.lanes import LaneModel, SlotBatch


@torch.inference_mode()
def position_bytes(decoder: nn.Module, hidden_size: int) -> dict[torch.device, int]:
    """Return the bytes of keys and values of one position of one row, summed over layers, by device.

    They are measured by a prefill of two positions, for any decoder architecture.
    """
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
