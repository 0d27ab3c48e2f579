"""Define the MSD network: EAGLE whose prompt has image embeddings themselves as inputs, without fusion and features.

Image tokens are decoupled from text tokens; see the public code at github.com/Lyn-Lucy/MSD. All other pairs are those
of EAGLE-1/2. Rotary positions count the pairs, also for targets with three rotary axes.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from models.heads.eagle import EagleNetwork
from models.inputs.prefix import Prefix


class MsdNetwork(EagleNetwork):
    """An EAGLE network for targets that read images."""

    def pair(self, prompt: Prefix, features: Tensor) -> tuple[Prefix, Tensor]:
        """See `FeatureStack.pair`; pairs of visual tokens are their embeddings."""
        pairs, summary = super().pair(prompt, features)
        inputs = torch.where(prompt.visual[:, None], prompt.embeds.to(pairs.embeds.dtype), pairs.embeds)
        return replace(pairs, embeds=inputs), summary
