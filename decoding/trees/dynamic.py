"""EAGLE-2's dynamic tree: a beam grows it, and the best of all grown nodes are verified.

Li et al. 2024 (arXiv 2406.16858), section 4: the `top_k` children of every beam node are scored by the product of
probabilities along their path; the `top_k` best of a level are the next beam; finally the best nodes of all levels are
kept.

A node scores no higher than its parent, and the sort is stable over nodes in level order, so for equal scores the
parent comes first: all ancestors of a kept node are kept, regardless of rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from decoding.contracts import EngineSpec, Level, TreePolicy
from decoding.sampling import perturb
from decoding.tree import DraftTree, Frontier
from models.kv.lanes import SlotBatch


@dataclass(frozen=True)
class _Grown:
    """One level's nodes, numbered in the order they grew (the root is 0): all (b, M)."""

    tokens: Tensor
    parents: Tensor
    scores: Tensor


class DynamicTree(TreePolicy):
    """Beams of `top_k` over `depth` + 1 levels, of which `total_tokens` nodes are verified, the root included.

    Scores are cumulative log-probabilities. With shared-noise sampling the probability of a child is softmax(log q +
    g), with the noise g that the target's own draw will use: the probability that this child is the target's token if
    the target's log-probabilities differ from the drafter's by Gumbel noise. With rejection sampling g is not the
    target's, so children are those of EAGLE-2, by log q, and are judged as certain.
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
        self._root = root
        self._num_levels = min(num_levels, self.max_levels)
        self._shares_noise = not keep_probs
        self._grown: list[_Grown] = []
        self._num_grown = 1
        self._beam_scores = torch.zeros_like(root, dtype=torch.float32)[:, None]
        self._frontier = Frontier.at_root(root)
        return self._frontier

    def grow(self, level: Level) -> Frontier | None:
        frontier, k = self._frontier, self.top_k
        depth = frontier.depth + 1
        best = self._log_probs(level).topk(k, dim=-1)  # (b, F, k)
        values = best.values
        if level.max_depth is not None:
            values = values.masked_fill((level.max_depth < depth)[:, None, None], -torch.inf)
        scores = (self._beam_scores[:, :, None] + values).flatten(1)  # (b, F · k)
        tokens = best.indices.flatten(1)
        self._grown.append(_Grown(tokens, frontier.nodes.repeat_interleave(k, dim=1), scores))
        first, self._num_grown = self._num_grown, self._num_grown + tokens.shape[1]
        if depth >= self._num_levels:
            return None
        place = _best_first(scores)[:, :k]
        self._beam_scores = scores.gather(1, place)
        above = place // k
        parents = frontier.nodes.gather(1, above)
        self._frontier = frontier.below(place + first, parents, tokens.gather(1, place), above)
        return self._frontier

    def _log_probs(self, level: Level) -> Tensor:
        """Log-probabilities of children (b, F, V), never above 0."""
        scores = perturb(level.logits, level.noise if self._shares_noise else None, level.rows)
        return scores.log_softmax(dim=-1).clamp_max(0.0)

    def finish(self) -> DraftTree:
        root, scores = self._root[:, None], torch.cat([one.scores for one in self._grown], dim=1)
        b, num_grown = scores.shape
        keep = min(self.max_nodes - 1, num_grown)
        # Back in level order: parents first, siblings in draw order.
        kept = _best_first(scores)[:, :keep].sort(dim=1).values
        depth = torch.cat([torch.full_like(one.tokens, i + 1) for i, one in enumerate(self._grown)], dim=1)
        parents = torch.cat([one.parents for one in self._grown], dim=1).gather(1, kept)
        # Position of each grown node in the tree; nodes that are left out point to the root, and only invalid nodes
        # read it.
        place = torch.zeros(b, num_grown + 1, dtype=torch.long, device=scores.device)
        place = place.scatter(1, kept + 1, torch.arange(1, keep + 1, device=scores.device).expand(b, -1))
        tokens = torch.cat([one.tokens for one in self._grown], dim=1).gather(1, kept)
        zero = torch.zeros_like(root)
        return DraftTree(
            tokens=torch.cat([root, tokens], dim=1),
            parents=torch.cat([zero - 1, place.gather(1, parents)], dim=1),
            depth=torch.cat([zero, depth.gather(1, kept)], dim=1),
            valid=torch.cat([zero == 0, scores.gather(1, kept) > -torch.inf], dim=1),
            origin=torch.cat([zero, kept + 1], dim=1),
            num_levels=len(self._grown),
            max_siblings=self.top_k,
        )


def _best_first(scores: Tensor) -> Tensor:
    """Places (b, M) by falling score; of equal scores the node that grew first comes first."""
    return scores.sort(dim=1, descending=True, stable=True).indices
