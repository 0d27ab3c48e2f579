"""SAGE without planning: grows trees from the current step's distributions, an ablation of `sage`.

Every step runs the drafter for D_max levels. The policy does not support rejection sampling, which would be biased
because the selection of a child depends on the probability of the sampled token.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from decoding.contracts import DraftLogits, VerificationOutput
from decoding.sampling import perturb
from decoding.tree import AcceptanceResult, DraftTree, Frontier
from decoding.trees.confidence import SageSettings, confidence, real_depth
from decoding.trees.index_tree import Beam, admissible_children, frontier_widths, next_beam, priority
from decoding.trees.pool import NodePool
from decoding.trees.sage import SagePolicy
from models.kv.lanes import SlotBatch


class OnlineSageTree(SagePolicy):
    """Policy that expands the F most probable nodes of each level and keeps the most probable of all admissible nodes.

    The grown nodes are the root, then the pool of all children of expanded nodes.
    """

    def __init__(self, settings: SageSettings | None = None) -> None:
        super().__init__(settings)
        assert self.settings.source == "root", "an online tree is grown before any other distribution is known"
        self.max_levels = self.settings.depth_cap
        self.max_nodes = 1 + self.settings.max_nodes
        self.max_siblings = self.settings.top_k
        self._widths = frontier_widths(self.max_levels, self.settings)
        self.max_frontier_nodes = sum(self._widths[1:])
        self.max_grown_nodes = 1 + sum(width * self.settings.top_k for width in self._widths)

    def start(self, slots: SlotBatch, root: Tensor, num_levels: int, keep_probs: bool) -> Frontier:
        assert not keep_probs, "rejection sampling would be biased by a tree chosen from the drawn tokens"
        self._num_levels = min(num_levels, self.max_levels)
        self._pool = NodePool(root)
        self._alpha = self._learned.alpha[slots.index]
        self._max_depth = self._learned.max_depth[slots.index]
        self._depth = real_depth(self._alpha, self._max_depth, self.settings)
        self._beam = Beam.at_root(self._alpha)
        self._frontier = Frontier.at_root(root)
        return self._frontier

    def grow(self, draft_logits: DraftLogits) -> Frontier | None:
        settings, frontier, beam, logits = self.settings, self._frontier, self._beam, draft_logits.logits
        likely = logits.topk(settings.top_k, dim=-1).values.float()
        has_any = likely[..., :1] > -torch.inf
        if frontier.depth == 0:
            ranked = torch.where(has_any, likely.softmax(dim=-1), 1.0 / settings.top_k)
            self._alpha = torch.where(has_any[:, 0, 0], confidence(ranked[:, 0]), self._alpha)
            self._depth = real_depth(self._alpha, self._max_depth, settings)
        best = perturb(logits, draft_logits.noise, draft_logits.rows).topk(self.max_siblings, dim=-1)
        drawn = logits.gather(-1, best.indices).float()
        probs = torch.where(has_any, (drawn - likely.logsumexp(dim=-1, keepdim=True)).exp(), 0.0)
        children = admissible_children(beam, probs, frontier.depth + 1, self._alpha, self._depth, settings)
        # The root's best child is admissible at any probability, except if filters removed all tokens.
        exists = drawn > -torch.inf
        children = replace(children, admissible=children.admissible & exists, expandable=children.expandable & exists)
        first = priority(children)
        tokens, parents = best.indices.flatten(1), beam.node[:, :, None].expand_as(best.indices).flatten(1)
        start = self._pool.add(tokens, parents, first)
        depth = frontier.depth + 1
        if depth >= self._num_levels:
            return None
        self._beam = next_beam(children, first, self._widths[depth], start)
        inside = self._beam.node - start
        above = inside // settings.top_k
        parents = parents.gather(1, inside) + 1
        self._frontier = frontier.below(self._beam.node + 1, parents, tokens.gather(1, inside), above)
        return self._frontier

    def finish(self) -> DraftTree:
        return self._pool.tree(self.settings.max_nodes, self.max_siblings)

    def commit(self, verification: VerificationOutput, result: AcceptanceResult) -> Tensor | None:
        if verification.tree.num_levels == 0:
            return None
        self._learned.count(verification.slots, self._alpha, verification.tree)
        return self._learned.learn(verification.slots, self._alpha, result)
