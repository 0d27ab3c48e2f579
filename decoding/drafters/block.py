"""Block drafter (DFlash): one forward over the pending token and mask tokens drafts all levels of a tree.

Its KV cache has keys and values of the target's projected features at all committed positions, and no tokens. The block
runs in scratch positions behind them. Level d is the output at mask d + 1, whatever the drafts above it, so chains,
static and dynamic trees are made of the same logits. Rotary positions count the tokens, in one dimension. Chen et al.
2026 (arXiv 2602.06036).

While drafting is paused, projected features are buffered; a full buffer or the next draft encodes them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from decoding.contracts import EngineSpec, PrefillOutput, VerificationOutput
from decoding.drafters.missed import FeatureDrafter, MissedTokens
from decoding.tree import AcceptanceResult, Frontier
from models.backends.attention import DecoderRunner
from models.heads.block import BlockNetwork
from models.inputs.prefix import Prefix
from models.kv.lanes import LaneModel, SlotBatch


class BlockDrafter(FeatureDrafter):
    """Drafter with a block `network`, a token embedding `embed`, and an output layer `head` over its outputs.

    State per slot: buffered features, and probes until prefill. State per step: `_logits` (b, L, V) of all levels.
    """

    name = "block"

    def __init__(self, network: BlockNetwork, embed: nn.Module, head: nn.Module) -> None:
        self.network = network
        self.feature_layers = network.feature_layers
        self.embed = embed
        self.head = head

    def open(self, spec: EngineSpec) -> None:
        shape, weight = self.network.shape, self.network.fc.weight
        assert spec.num_lanes == 1, "a block drafter has one lane"
        assert spec.max_levels <= shape.max_levels, (spec.max_levels, shape.max_levels)
        self._num_levels = spec.max_levels
        self._missed = MissedTokens(spec.num_slots, spec.max_missed_tokens, weight.new_zeros(shape.hidden_size))
        scratch = max(shape.block_size, spec.max_levels + 1, self._missed.width)
        self.lanes = LaneModel(self.network.context, self.head, spec.num_slots, 1, spec.max_context_tokens + scratch)
        self._runner = DecoderRunner(self.network)
        self._max_prefill_tokens = spec.max_prefill_tokens
        self._places = torch.arange(scratch, device=weight.device)
        self._masks = torch.full((1, shape.block_size - 1), shape.mask_token_id, device=weight.device)
        self._causal = self._places[:, None] >= self._places
        self._prompts = {}

    def _encode_prompts(self, unread: SlotBatch, prompts: Sequence[tuple[PrefillOutput, Tensor]]) -> None:
        features = [[self._prompt(prefill_output)] for prefill_output, _ in prompts]
        self.lanes.admit(unread, features, keep_hidden=False, max_tokens=self._max_prefill_tokens)

    def _prompt(self, prefill_output: PrefillOutput) -> Prefix:
        """Return the projected features of a prompt; position t has the features of token t."""
        assert prefill_output.features is not None, "a block drafter needs hidden states of the target's prefill"
        projected = self.network.project(prefill_output.features[0])
        tokens = prefill_output.prefix.token_ids
        # Samples with equal prompts share their prefill output.
        positions = torch.arange(tokens.shape[0], device=projected.device)
        return Prefix(tokens, projected, positions, torch.zeros_like(prefill_output.prefix.visual)).of(
            (id(prefill_output),)
        )

    def draft(self, slots: SlotBatch, frontier: Frontier) -> Tensor:
        if frontier.depth == 0:
            self._logits = self._run_block(slots, frontier.tokens)
        return self._logits[:, frontier.depth, None].float().expand(-1, frontier.tokens.shape[1], -1)

    def _run_block(self, slots: SlotBatch, root: Tensor) -> Tensor:
        """Run the pending tokens `root` (b, 1) and the masks; return the logits (b, L, V) of all levels."""
        self._encode_missed(slots)
        b, size = root.shape[0], self.network.shape.block_size
        embeds = self.embed(torch.cat([root, self._masks.expand(b, -1)], dim=1)).to(self.network.fc.weight.dtype)
        depth, everything = self._places[:size].expand(b, -1), self._causal[-1:, :size].expand(b, size, -1)
        hidden = self.lanes.forward_embeds(slots, embeds, depth, everything, 0, self._runner)
        self.num_forwards += 1
        # As one matrix: a linear layer over a view with gaps copies its weights for every row.
        drafted = hidden[:, 0, 1 : 1 + self._num_levels].flatten(0, 1)
        logits: Tensor = self.head(drafted.to(next(self.head.parameters()).dtype))
        return logits.view(b, self._num_levels, -1)

    def commit(self, verification: VerificationOutput, result: AcceptanceResult) -> None:
        """Encode the features (b, 1, N, F) of the root and the accepted drafts."""
        slots, features = verification.slots, verification.features[:, 0]
        if verification.tree.num_levels == 0:
            self._add_missed(slots, self.network.project(features[:, 0]))
            return
        taken = features.gather(1, result.path[:, :, None].expand(-1, -1, features.shape[2]))
        self._encode(slots, self.network.project(taken), result.n)

    def _encode(self, slots: SlotBatch, states: Tensor, count: Tensor) -> None:
        """Write keys and values of projected features (b, N, D); commit the first `count` (b,) of each row."""
        b, width = states.shape[:2]
        causal = self._causal[:width, :width].expand(b, -1, -1)
        self.lanes.forward_embeds(slots, states, self._places[:width].expand(b, -1), causal)
        # Features beyond `count` leave invalid entries after the row's end, which the next write replaces.
        self.lanes.commit(slots, self._places[None, :0].expand(b, -1), count)

    def _encode_missed(self, slots: SlotBatch) -> None:
        if (missed := self._missed.take(slots)) is not None:
            self._encode(slots, *missed)
