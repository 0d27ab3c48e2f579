"""P-EAGLE: an EAGLE-3 network that drafts all levels of a tree in one forward over mask tokens.

Mask d is the pair (`mask_hidden`, mask token) in the d-th scratch position, and attends to all committed pairs and to
the masks before it. Level 0 is the output at the pending token, level d that at mask d, whatever the drafts above it,
so chains, static and dynamic trees are made of the same logits. Committed pairs are those of EAGLE-3. Network and
training are those of the package speculators (`speculators_model_type: peagle`).
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from decoding.contracts import EngineSpec
from decoding.drafters.eagle import EagleDrafter
from decoding.tree import Frontier
from models.heads.eagle3 import Eagle3Network
from models.kv.lanes import SlotBatch


class ParallelEagleDrafter(EagleDrafter):
    """Drafter with a P-EAGLE network; state per slot as of `EagleDrafter`, per step `_logits` (b, R, L, V)."""

    def open(self, spec: EngineSpec) -> None:
        super().open(spec)
        network = cast(Eagle3Network, self.network)
        num_masks, device = max(0, spec.max_levels - 1), network.fc.weight.device
        token = network.shape.mask_token_id
        assert token is not None, "P-EAGLE heads have a mask token"
        self._tokens = torch.full((1, num_masks), token, device=device)
        with torch.no_grad():
            self._features = network.project(network.mask_hidden[:, None]).expand(1, self.num_lanes, num_masks, -1)
        self._places = torch.arange(num_masks, device=device)
        self._causal = self._places[:, None] >= self._places

    def draft(self, slots: SlotBatch, frontier: Frontier) -> Tensor:
        if frontier.depth == 0:
            self._logits = self._draft_all(slots)
        level = self._logits[:, :, frontier.depth, None].expand(-1, -1, frontier.tokens.shape[1], -1)
        return self.merge.merge(slots, level, frontier.depth)

    def _draft_all(self, slots: SlotBatch) -> Tensor:
        """Run all masks; return the logits (b, R, L, V) of all levels."""
        self._encode_missed(slots)
        outputs = self._output[slots.index][:, :, None]
        b, num_masks = len(outputs), len(self._places)
        if num_masks:
            tokens, features = self._tokens.expand(b, -1), self._features.expand(b, -1, -1, -1)
            sees = self._causal.expand(b, -1, -1)
            masks = self._run(slots, tokens, features, self._places.expand(b, -1), sees, 0)
            outputs = torch.cat([outputs, masks], dim=2)
        logits: Tensor = self.head(outputs.to(next(self.head.parameters()).dtype))
        return logits.float()
