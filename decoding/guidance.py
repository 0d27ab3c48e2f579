"""Classifier-free guidance: merges the conditional and unconditional lane of a sample.

Logits are u + s · (c − u), c from lane 0 and u from lane 1: Ho & Salimans 2022 (arXiv 2207.12598), in the form of
LlamaGen's sampler. Target and drafters share one object.
"""

from __future__ import annotations

import torch
from torch import Tensor

from decoding.types import Sampling
from models.kv.lanes import SlotBatch

ALWAYS = torch.iinfo(torch.long).max


class Guidance:
    """Scale (S,) and last guided token (S,) of all slots; `position` (S,), the next token's index, is shared."""

    def __init__(self, position: Tensor) -> None:
        self._position = position
        self._scale = torch.ones(position.shape[0], dtype=torch.float32, device=position.device)
        self._last = torch.full_like(position, ALWAYS)

    def occupy(self, slot: int, sampling: Sampling) -> None:
        """Set a new sample's parameters."""
        self._scale[slot] = sampling.guidance_scale
        # The public sampler counts decode steps: step i produces token i + 1; step `interval` is guided.
        self._last[slot] = ALWAYS if sampling.guidance_interval < 0 else sampling.guidance_interval + 1

    def merge(self, slots: SlotBatch, logits: Tensor, depth: Tensor) -> Tensor:
        """Lane logits (b, R, N, V) at nodes of `depth` (b, N) → logits (b, N, V).

        With one lane, a scale of at most 1, or a token beyond the interval, the conditional logits are unchanged.
        """
        conditional = logits[:, 0]
        if logits.shape[1] == 1:
            return conditional
        assert logits.shape[1] == 2, f"guidance merges two lanes, not {logits.shape[1]}"
        unconditional, scale = logits[:, 1], self._scale[slots.index][:, None]
        token = self._position[slots.index][:, None] + depth
        guided = (scale > 1.0) & (token <= self._last[slots.index][:, None])
        merged = unconditional + scale[:, :, None] * (conditional - unconditional)
        return torch.where(guided[:, :, None], merged, conditional)
