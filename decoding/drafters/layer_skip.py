"""Self-speculation: drafts with some of the target's layers and its output layer, over the target's own KV cache.

Zhang et al. 2023 (Draft & Verify, arXiv 2309.08168) skip layers anywhere; Elhoushi et al. 2024 (LayerSkip, arXiv
2404.16710) exit after the first layers. Drafted tokens run in scratch positions of the target's KV cache and read the
keys and values of the target at committed positions; the verification writes the same positions again, in all layers.
So the drafter has no prompt, no prefill, no KV cache and no state per slot.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from torch import Tensor, nn

from decoding.contracts import Drafter, EngineSpec
from decoding.drafters.merge import Merge, SingleLane
from decoding.drafters.scratch import ScratchNodes
from decoding.tree import Frontier
from models.kv.lanes import SlotBatch


class LayerSkipDrafter(Drafter):
    """Drafter with the target's `layers`, ascending indices; `head` replaces the target's output layer."""

    name = "layer_skip"
    shares_cache = True

    def __init__(self, layers: Sequence[int], head: nn.Module | None = None, merge: Merge | None = None) -> None:
        self.layers = tuple(layers)
        self.head = head
        self.merge = merge or SingleLane()

    def open(self, spec: EngineSpec) -> None:
        assert spec.lanes is not None, "the engine gives no KV cache of the target"
        self._lanes = spec.lanes
        self._runner = spec.lanes.of_layers(self.layers)
        self._head = spec.lanes.head if self.head is None else self._runner.output_layer(self.head)
        self._nodes = ScratchNodes(spec, spec.device, has_root=True)
        self.merge.open(spec, spec.num_lanes)

    def replay_key(self, slots: SlotBatch, num_levels: int) -> Hashable | None:
        return ()

    def draft(self, slots: SlotBatch, frontier: Frontier) -> Tensor:
        if frontier.depth == 0:
            self._nodes.clear()
        depth, sees, start = self._nodes.place(frontier)
        hidden = self._lanes.forward(slots, frontier.tokens, depth, sees, start, self._runner)
        self.num_forwards += 1
        logits: Tensor = self._head(hidden).float()
        return self.merge.merge(slots, logits, frontier.depth)
