"""MTP: drafts with the multi-token-prediction layer of the target's checkpoint, used once per level.

The layer runs as an EAGLE network: committed pairs have the target's last hidden states after the final norm, deeper
levels the layer's own outputs, and paused steps are buffered. DeepSeek-AI 2024 (arXiv 2412.19437), section 2.2. Rotary
positions are those of the pair's token, the one after its state. Of several layers, which the paper uses one per level,
the first drafts all levels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from decoding.drafters.eagle import EagleDrafter
from models.inputs.prefix import Prefix


class MtpDrafter(EagleDrafter):
    """Drafter with an MTP layer as `network`, and the target's output layer as `head`; see `EagleDrafter` for state."""

    name = "mtp"

    def _positions(self, prefix: Prefix) -> Tensor:
        """Return the rotary positions of the tokens after each position, the first generated token included."""
        first, axes = prefix.next_position, prefix.axis_offsets
        last = first[None] if axes is None else (first + axes)[:, None]
        return torch.cat([prefix.positions[..., 1:], last], dim=-1)
