"""EAGLE: drafts with a small network on the target's hidden states (features), with its own KV cache.

The input at KV position t is a pair (feature of token t, embedding of token t + 1). Committed pairs have the *target's*
features; tree levels run in scratch positions with the head's own outputs as features. Li et al. 2024 (arXiv
2401.15077, 2406.16858) and 2025 (arXiv 2503.01840); networks differ in their features, and in the pairs that they make
of a prompt, see `models.heads`. Rotary positions count the pairs, as in the training of the public heads, or are those
of the target's token t. The embedding of a visual token is the target's input (the image feature).

While drafting is paused, up to one forward of pairs is buffered; a full buffer or the next draft encodes them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from decoding.contracts import EngineSpec, PrefillOutput, VerificationOutput
from decoding.drafters.merge import Merge, SingleLane
from decoding.drafters.missed import FeatureDrafter, MissedTokens
from decoding.tree import AcceptanceResult, Frontier
from models.heads.eagle import FeatureStack
from models.inputs.prefix import Prefix
from models.kv.lanes import LaneModel, SlotBatch


class EagleDrafter(FeatureDrafter):
    """Drafter with an EAGLE `network` and an output layer `head` over its outputs; `num_lanes` is the target's.

    State per slot: `_output` (S, R, D), the network's output at the pending token; `_summaries` (S, R, C), the prompt's
    summary; buffered pairs; and probes until prefill. State per step: for the root and M scratch positions, `_outputs`
    (b, R, 1 + M, D) and the attention mask `_sees` (b, 1 + M, M); for G grown nodes, `_column` (b, G): the scratch
    position + 1, 0 for the root, −1 if not run.
    """

    name = "eagle"

    def __init__(self, network: FeatureStack, head: nn.Module, num_lanes: int = 1, merge: Merge | None = None) -> None:
        self.network = network
        self.feature_layers = network.feature_layers
        self.head = head
        self.num_lanes = num_lanes
        self.merge = merge or SingleLane()

    def open(self, spec: EngineSpec) -> None:
        weight, size = next(self.network.parameters()), self.network.hidden_size
        token = torch.zeros((), dtype=torch.long, device=weight.device)
        pair = token, weight.new_zeros(self.num_lanes, size)
        self._missed = MissedTokens(spec.num_slots, spec.max_missed_tokens, *pair)
        scratch = max(spec.max_frontier_nodes, spec.max_levels + 1, self._missed.width)
        self.lanes = LaneModel(
            self.network, self.head, spec.num_slots, self.num_lanes, spec.max_context_tokens + scratch
        )
        self.merge.open(spec, self.num_lanes)
        self._max_scratch = spec.max_frontier_nodes
        self._max_grown = spec.max_grown_nodes
        self._max_prefill_tokens = spec.max_prefill_tokens
        self._output = weight.new_zeros(spec.num_slots, self.num_lanes, size)
        self._summaries = weight.new_zeros(spec.num_slots, self.num_lanes, self.network.summary_size)
        self._prompts = {}

    def allocate(self) -> None:
        token, features = self._missed.count[:1, None], self._output[:1, :, None] * 0.0
        pair = self.network.fuse(
            self._embed(token)[:, None].expand_as(features), features, self._summaries[:1, :, None]
        )
        self.lanes.allocate(pair[:, 0])

    def skip(self, slots: SlotBatch) -> None:
        super().skip(slots)
        self._output[slots.index] = 0.0

    def _encode_prompts(self, unread: SlotBatch, prompts: Sequence[tuple[PrefillOutput, Tensor]]) -> None:
        by_prompt = [self._pairs(*prompt) for prompt in prompts]
        pairs = [[prefix for prefix, _ in lanes] for lanes in by_prompt]
        filled = self.lanes.admit(unread, pairs, keep_hidden=False, max_tokens=self._max_prefill_tokens)
        self._output[unread.index] = filled.last
        summaries = torch.stack([summary for lanes in by_prompt for _, summary in lanes])
        self._summaries[unread.index] = summaries.view(len(by_prompt), self.num_lanes, self.network.summary_size)
        self.num_forwards += filled.num_forwards

    def _pairs(self, prefill_output: PrefillOutput, first: Tensor) -> list[tuple[Prefix, Tensor]]:
        """Return the prompt as pairs with its summary (C,) for each lane: position t has feature t and token t + 1; the
        last token is the `first` generated one. The target's padding is included, as in the training of the public
        heads."""
        assert prefill_output.features is not None, "an EAGLE head needs hidden states of the target's prefill"
        prefix = prefill_output.prefix
        tokens = torch.cat([prefix.token_ids[1:], first])
        embeds = self._embed(tokens)
        visual = torch.cat([prefix.visual[1:], prefix.visual.new_zeros(1)])
        shifted = torch.cat([prefix.embeds[1:], prefix.embeds[:1]]).to(embeds.dtype)
        inputs = torch.where(visual[:, None], shifted, embeds)
        prompt = Prefix(tokens, inputs, self._positions(prefix), visual)
        lanes = [self.network.pair(prompt, features) for features in self.network.project(prefill_output.features)]
        # Samples with equal prompts share their prefill output, and differ only in the first generated token.
        return [(pairs.of((id(prefill_output), lane)), summary) for lane, (pairs, summary) in enumerate(lanes)]

    def _positions(self, prefix: Prefix) -> Tensor:
        """Return the rotary positions (L,) or (3, L) of a prompt's pairs."""
        return prefix.positions if self.network.takes_axes else torch.arange(prefix.length, device=prefix.embeds.device)

    def draft(self, slots: SlotBatch, frontier: Frontier) -> Tensor:
        outputs = self._begin(slots) if frontier.depth == 0 else self._extend(slots, frontier)
        logits: Tensor = self.head(outputs.to(next(self.head.parameters()).dtype)).float()
        return self.merge.merge(slots, logits, frontier.depth)

    def _begin(self, slots: SlotBatch) -> Tensor:
        """Start new trees; return the outputs (b, R, 1, D) at the root, after encoding the buffered pairs."""
        self._encode_missed(slots)
        root = self._output[slots.index][:, :, None]
        b, device = root.shape[0], root.device
        self._num_scratch = 0
        self._outputs = torch.cat([root, root.new_zeros(b, root.shape[1], self._max_scratch, root.shape[3])], dim=2)
        self._sees = torch.zeros(b, 1 + self._max_scratch, self._max_scratch, dtype=torch.bool, device=device)
        self._column = torch.full((b, self._max_grown), -1, dtype=torch.long, device=device)
        self._column[:, 0].fill_(0)
        return root

    def _extend(self, slots: SlotBatch, frontier: Frontier) -> Tensor:
        """Run the frontier in scratch positions, with its parents' outputs as features; return outputs (b, R, F, D)."""
        b, width = frontier.nodes.shape
        start, end = self._num_scratch, self._num_scratch + frontier.nodes.shape[1]
        columns = torch.arange(start + 1, end + 1, device=frontier.nodes.device)
        parents = self._column.gather(1, frontier.parents)
        self._column.scatter_(1, frontier.nodes, columns.expand(b, -1))
        self._sees[:, start + 1 : end + 1] = self._sees.gather(1, parents[:, :, None].expand(-1, -1, self._max_scratch))
        # Every node sees itself.
        self._sees[:, start + 1 : end + 1, start:end].diagonal(dim1=1, dim2=2).fill_(True)
        num_lanes, size = self._outputs.shape[1], self._outputs.shape[3]
        features = self._outputs.gather(2, parents[:, None, :, None].expand(-1, num_lanes, -1, size))
        # The root is already encoded, so a node of depth 1 has the row's next position.
        depth = torch.full_like(frontier.tokens, frontier.depth - 1)
        sees = self._sees[:, start + 1 : end + 1, :end]
        outputs = self._run(slots, frontier.tokens, features, depth, sees, start)
        self._outputs[:, :, start + 1 : end + 1] = outputs
        self._num_scratch += width
        return outputs

    def commit(self, verification: VerificationOutput, result: AcceptanceResult) -> None:
        """Encode the accepted tokens and the target's next token with the target's features (b, R, D + 1, F)."""
        slots, tokens = verification.slots, result.produced(verification.tree)
        if verification.tree.num_levels == 0:
            self._add_missed(slots, tokens[:, 0], self.network.project(verification.features[:, :, 0]))
            return
        _, num_lanes, _, size = verification.features.shape
        features = verification.features.gather(2, result.path[:, None, :, None].expand(-1, num_lanes, -1, size))
        self._encode(slots, tokens, self.network.project(features), result.n)

    def _encode(self, slots: SlotBatch, tokens: Tensor, features: Tensor, count: Tensor) -> None:
        """Encode pairs of `tokens` (b, N) and projected `features` (b, R, N, D); commit the first `count` (b,)."""
        b, width = tokens.shape
        index = torch.arange(width, device=tokens.device)
        causal = (index[:, None] >= index[None]).expand(b, -1, -1)
        outputs = self._run(slots, tokens, features, index.expand(b, -1), causal, 0)
        # Pairs beyond `count` leave invalid entries after the row's end, which the next write replaces.
        self.lanes.commit(slots, tokens[:, :0], count)
        last = (count - 1).clamp_min(0)[:, None, None, None].expand(-1, self.num_lanes, 1, outputs.shape[3])
        has_any = (count > 0)[:, None, None]
        self._output[slots.index] = torch.where(has_any, outputs.gather(2, last)[:, :, 0], self._output[slots.index])

    def _encode_missed(self, slots: SlotBatch) -> None:
        if (missed := self._missed.take(slots)) is not None:
            tokens, features, count = missed
            self._encode(slots, tokens, features.transpose(1, 2), count)

    def _run(
        self, slots: SlotBatch, tokens: Tensor, features: Tensor, depth: Tensor, sees: Tensor, offset: int
    ) -> Tensor:
        """Run pairs of `tokens` (b, N) and `features` (b, R, N, D); return outputs (b, R, N, D)."""
        embeds = self._embed(tokens)[:, None].expand(-1, features.shape[1], -1, -1)
        summaries = slots.of(self._summaries)[:, :, None].expand(-1, -1, features.shape[2], -1)
        self.num_forwards += 1
        pairs = self.network.fuse(embeds, features, summaries)
        return self.lanes.forward_embeds(slots, pairs.flatten(0, 1), depth, sees, offset)

    def _embed(self, tokens: Tensor) -> Tensor:
        """Return token embeddings; tokens outside the network's vocabulary become token 0."""
        embeds: Tensor = self.network.embed_tokens(torch.where(tokens < self.network.vocab_size, tokens, 0))
        return embeds
