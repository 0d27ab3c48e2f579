"""EAGLE-2's dynamic tree: grows a tree by beam search and keeps the best of all grown nodes.

Li et al. 2024 (arXiv 2406.16858), section 4: the `top_k` children of every beam node are scored by the product of
probabilities along their path; the `top_k` best of a level are the next beam; finally the best nodes of all levels are
verified.
"""

from __future__ import annotations

import torch
from torch import Tensor

from decoding.contracts import DraftLogits, EngineSpec, TreePolicy
from decoding.sampling import perturb
from decoding.tree import DraftTree, Frontier
from decoding.trees.pool import NodePool, best_of
from models.kv.lanes import SlotBatch


class DynamicTree(TreePolicy):
    """Policy with beams of `top_k` nodes over `depth` + 1 levels; verifies `total_tokens` nodes, the root included.

    Scores are cumulative log-probabilities. With shared-noise sampling, the probability of a child is softmax(log q +
    g), with the noise g of the target's own sample: the probability that this child is the target's token if the
    target's log-probabilities differ from the drafter's by Gumbel noise. With rejection sampling, g is not the
    target's noise, so children are selected by log q as in EAGLE-2 and judged as certain drafts.
    """

    def __init__(self, top_k: int = 10, depth: int = 5, total_tokens: int = 60) -> None:
        assert top_k >= 1, top_k
        assert depth >= 0, depth
        num_grown = top_k + depth * top_k**2
        assert 2 <= total_tokens <= num_grown + 1, (total_tokens, num_grown)
        self.top_k = top_k
        self.max_levels = depth + 1
        self.max_nodes = total_tokens
        self.max_frontier_nodes = depth * top_k
        self.max_grown_nodes = 1 + num_grown

    def open(self, spec: EngineSpec) -> None:
        assert self.top_k <= spec.vocab_size, f"top_k {self.top_k} is more than the vocabulary's {spec.vocab_size}"

    def start(self, slots: SlotBatch, root: Tensor, num_levels: int, keep_probs: bool) -> Frontier:
        self._pool = NodePool(root)
        self._num_levels = min(num_levels, self.max_levels)
        self._shares_noise = not keep_probs
        self._beam_scores = torch.zeros_like(root, dtype=torch.float32)[:, None]
        self._frontier = Frontier.at_root(root)
        return self._frontier

    def grow(self, draft_logits: DraftLogits) -> Frontier | None:
        frontier, k = self._frontier, self.top_k
        depth = frontier.depth + 1
        best = self._log_probs(draft_logits).topk(k, dim=-1)  # (b, F, k)
        values = best.values
        if draft_logits.max_depth is not None:
            values = values.masked_fill((draft_logits.max_depth < depth)[:, None, None], -torch.inf)
        scores = (self._beam_scores[:, :, None] + values).flatten(1)  # (b, F · k)
        tokens = best.indices.flatten(1)
        first = self._pool.add(tokens, (frontier.nodes - 1).repeat_interleave(k, dim=1), scores)
        if depth >= self._num_levels:
            return None
        self._beam_scores, index = best_of(scores, k)
        above = index // k
        parents = frontier.nodes.gather(1, above)
        self._frontier = frontier.below(index + first + 1, parents, tokens.gather(1, index), above)
        return self._frontier

    def _log_probs(self, draft_logits: DraftLogits) -> Tensor:
        """Return the log-probabilities (b, F, V) of children, at most 0."""
        scores = perturb(draft_logits.logits, draft_logits.noise if self._shares_noise else None, draft_logits.rows)
        return scores.log_softmax(dim=-1).clamp_max(0.0)

    def finish(self) -> DraftTree:
        return self._pool.tree(min(self.max_nodes - 1, self._pool.size), self.top_k)
