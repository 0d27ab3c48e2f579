"""Classifier-free guidance: merges the logits of the conditional and the unconditional lane of a sample.

The merged logits are u + s · (c − u), with c from lane 0, u from lane 1 and scale s: Ho & Salimans 2022 (arXiv
2207.12598), in the form of LlamaGen's sampler. The target and its drafter use the same `Guidance` object.
"""

from __future__ import annotations

import torch
from torch import Tensor

from decoding.types import Sampling
from models.kv.lanes import SlotBatch

ALWAYS = torch.iinfo(torch.long).max


class Guidance:
    """Scale and output index of the last guided token for each of S slots; `position` (S,) is the output index of each
    slot's next token, a tensor of the slot table that is updated in place."""

    def __init__(self, position: Tensor) -> None:
        self._position = position
        self._scale = torch.ones(position.shape[0], dtype=torch.float32, device=position.device)
        self._last = torch.full_like(position, ALWAYS)

    def occupy(self, slot: int, sampling: Sampling) -> None:
        """Set the guidance parameters of a new sample in `slot`."""
        self._scale[slot] = sampling.guidance_scale
        # LlamaGen's sampler counts decode steps: step i produces token i + 1; step `interval` is the last guided step.
        self._last[slot] = ALWAYS if sampling.guidance_interval < 0 else sampling.guidance_interval + 1

    def merge(self, slots: SlotBatch, logits: Tensor, depth: Tensor) -> Tensor:
        """Merge lane logits (b, R, N, V) at nodes of `depth` (b, N) into logits (b, N, V).

        Return the conditional logits if there is one lane, the scale is at most 1, or the token is not guided.
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
