"""Classifier-free guidance: two lanes of one sample, with and without its condition, become one distribution.

Merged logits are u + s · (c − u), of which lane 0 is c and lane 1 is u; Ho & Salimans 2022 (arXiv 2207.12598), in the
form of LlamaGen's sampler. Target and drafters are merged by the same object. Knows no models and no drafts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from decoding.types import Sampling
from models.kv.lanes import SlotBatch

ALWAYS = torch.iinfo(torch.long).max


class Guidance:
    """Scale (S,) and last guided token (S,) of all slots; others keep `position` (S,), the next token's index."""

    def __init__(self, position: Tensor) -> None:
        self._position = position
        self._scale = torch.ones(position.shape[0], dtype=torch.float32, device=position.device)
        self._last = torch.full_like(position, ALWAYS)

    def occupy(self, slot: int, sampling: Sampling) -> None:
        """Take a fresh sample's parameters."""
        self._scale[slot] = sampling.guidance_scale
        # The public sampler counts decode steps: step i produces token i + 1, and i = interval is still guided.
        self._last[slot] = ALWAYS if sampling.guidance_interval < 0 else sampling.guidance_interval + 1

    def merge(self, slots: SlotBatch, logits: Tensor, depth: Tensor) -> Tensor:
        """Lane logits (b, R, N, V) at nodes of `depth` (b, N) → logits (b, N, V); one lane is itself.

        A scale of 1 or less, or a token beyond the interval, takes the conditional logits as they are.
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
