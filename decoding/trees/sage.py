"""SAGE: plans the next tree of each row from the drafter's confidence at the last step.

The formulas are in `decoding.trees.confidence`, the planning in `decoding.trees.index_tree`. A plan contains ranks,
which become tokens when the tree is grown; its shape is fixed in advance, which keeps rejection sampling unbiased.

The drafter runs `max_expanded` nodes per row and level, for the levels of the deepest tree in the batch; the target
verifies `max_nodes` + 1 nodes per row, padding included. With the cumulative threshold and the paper's parameters, no
plan with more than 22 nodes was found.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from decoding.contracts import DraftLogits, EngineSpec, TreePolicy, VerificationOutput
from decoding.sampling import perturb
from decoding.tree import AcceptanceResult, DraftTree, Frontier
from decoding.trees.confidence import SageSettings, bounded_depth, confidence
from decoding.trees.index_tree import IndexTree, frontier_widths, plan_tree
from decoding.trees.static import SPECVLM_PATHS
from models.kv.lanes import SlotBatch


class Confidence:
    """SAGE's state per slot: α (S,), D_max (S,), the last accepted lengths (S, window), and for telemetry the sums
    (S, 4) over steps of 1, α, tree depth and tree width."""

    def __init__(self, settings: SageSettings, spec: EngineSpec) -> None:
        self.settings = settings
        num_slots, device = spec.num_slots, spec.device
        self.alpha = torch.full((num_slots,), settings.initial_confidence, device=device)
        self.max_depth = torch.full((num_slots,), settings.max_depth, dtype=torch.long, device=device)
        self._recent = torch.zeros(num_slots, max(settings.history_window, 1), device=device)
        self._num_steps = torch.zeros(num_slots, dtype=torch.long, device=device)
        self._sums = torch.zeros(num_slots, 4, device=device)

    def reset(self, slots: SlotBatch) -> None:
        self.alpha[slots.index] = self.settings.initial_confidence
        self.max_depth[slots.index] = self.settings.max_depth
        self._num_steps[slots.index] = 0
        self._sums[slots.index] = 0.0

    def learn(self, slots: SlotBatch, alpha: Tensor, result: AcceptanceResult) -> Tensor:
        """Update from a step's confidence `alpha` (b,) and accepted length; return D_max (b,) of the next tree."""
        settings, index = self.settings, slots.index
        self.alpha[index] = alpha
        max_depth = self.max_depth[index]
        if settings.history_window > 0:
            num_steps = self._num_steps[index]
            self._recent[index, num_steps % settings.history_window] = (result.n - 1).float()
            mean = self._recent[index].mean(dim=1)
            max_depth = bounded_depth(max_depth, mean, num_steps + 1 >= settings.history_window, settings)
            self.max_depth[index] = max_depth
            self._num_steps[index] = num_steps + 1
        return max_depth

    def count(self, slots: SlotBatch, alpha: Tensor, tree: DraftTree) -> None:
        """Add a step's α (b,) and the depth and width of its verified tree to the telemetry."""
        depth = torch.where(tree.valid, tree.depth, 0)
        shape = [torch.ones_like(alpha), alpha, depth.amax(dim=1).float(), (depth == 1).sum(dim=1).float()]
        self._sums[slots.index] += torch.stack(shape, dim=1)

    def extras(self, slot: int) -> dict[str, Any]:
        """Return telemetry: means over the sample's steps, and the last confidence."""
        steps, alpha, depth, width = self._sums[slot].tolist()
        many = max(steps, 1.0)
        means = {"tree_depth_mean": depth / many, "tree_width_mean": width / many, "confidence_mean": alpha / many}
        return means | {"confidence_last": float(self.alpha[slot])}


class SagePolicy(TreePolicy):
    """Base class of SAGE's policies: settings and per-slot confidence."""

    max_siblings: int

    def __init__(self, settings: SageSettings | None) -> None:
        self.settings = settings or SageSettings()

    def open(self, spec: EngineSpec) -> None:
        assert self.max_siblings <= spec.vocab_size, (self.max_siblings, spec.vocab_size)
        self._learned = Confidence(self.settings, spec)

    def reset(self, slots: SlotBatch) -> None:
        self._learned.reset(slots)

    def extras(self, slot: int) -> dict[str, Any]:
        return self._learned.extras(slot)


class SageTree(SagePolicy):
    """Policy of the paper's Algorithm 1: plans a tree of ranks from the last step and fills in tokens at the next step.

    `first_paths` is the first tree of every sample. Each slot has an `IndexTree` of N nodes. The grown nodes of a step
    are these N nodes and F spare nodes for the frontier entries that a row does not need.
    """

    def __init__(
        self, settings: SageSettings | None = None, first_paths: Sequence[tuple[int, ...]] = SPECVLM_PATHS
    ) -> None:
        super().__init__(settings)
        self.max_levels = max(self.settings.depth_cap, max(len(path) for path in first_paths))
        self.max_nodes = 1 + max(self.settings.max_nodes, len(set(first_paths)))
        widest = max(sum(path[:-1] == parent for path in first_paths) for parent in {path[:-1] for path in first_paths})
        self.max_siblings = max(self.settings.top_k, widest)
        first = IndexTree.of_paths(first_paths, self.max_nodes, torch.device("cpu"))
        num_expanded = torch.where(first.expanded, first.frontier_index, 0).amax().item() + 1
        widths = frontier_widths(self.max_levels, self.settings)
        self._widths = [1, *(max(width, int(num_expanded)) for width in widths[1:])]
        self.max_frontier_nodes = sum(self._widths[1:])
        self.max_grown_nodes = self.max_nodes + max(self._widths)
        self._first_paths = tuple(first_paths)

    def open(self, spec: EngineSpec) -> None:
        super().open(spec)
        self._first = _pack(IndexTree.of_paths(self._first_paths, self.max_nodes, spec.device))
        # (S, 6, N): the packed planned trees of all slots.
        self._plans = self._first.expand(spec.num_slots, -1, -1).clone()

    def reset(self, slots: SlotBatch) -> None:
        super().reset(slots)
        self._plans[slots.index] = self._first

    def start(self, slots: SlotBatch, root: Tensor, num_levels: int, keep_probs: bool) -> Frontier:
        self._num_levels = min(num_levels, self.max_levels)
        self._plan = _unpack(self._plans[slots.index])
        self._keep_probs = keep_probs
        self._tokens = torch.where(self._plan.depth == 0, root[:, None], 0)
        self._valid = self._plan.valid
        self._probs: list[tuple[Tensor, Tensor]] = []
        # Top-k probabilities (b, G, k) of the children of every run node; −1 if it was not run or has no candidates.
        self._ranked = torch.full(
            (root.shape[0], self.max_grown_nodes, self.settings.top_k), -1.0, device=root.device, dtype=torch.float32
        )
        self._frontier = Frontier.at_root(root)
        return self._frontier

    def grow(self, draft_logits: DraftLogits) -> Frontier | None:
        frontier, plan = self._frontier, self._plan
        nodes, logits = frontier.nodes, draft_logits.logits
        best = perturb(logits, draft_logits.noise, draft_logits.rows).topk(self.max_siblings, dim=-1)
        likely = (best if draft_logits.noise is None else logits.topk(self.settings.top_k, dim=-1)).values
        likely = likely[..., : self.settings.top_k].float()
        has_any = likely[..., :1] > -torch.inf
        ranked = torch.where(has_any, likely.softmax(dim=-1), -1.0)
        self._ranked = self._ranked.scatter(1, nodes[:, :, None].expand_as(ranked), ranked)
        if self._keep_probs:
            self._probs.append((nodes, torch.where(has_any, logits.softmax(dim=-1), 0.0)))
        # Every node reads its token from its parent's ranking; nodes of other levels are masked out.
        parents = plan.parents.clamp_min(0)
        choice = (plan.frontier_index.gather(1, parents) * self.max_siblings + plan.ranks).clamp_max(
            best.values[0].numel() - 1
        )
        here = plan.depth == frontier.depth + 1
        drawable = best.values.flatten(1).gather(1, choice) > -torch.inf
        self._tokens = torch.where(here, best.indices.flatten(1).gather(1, choice), self._tokens)
        self._valid = self._valid & (~here | (drawable & self._valid.gather(1, parents)))
        if frontier.depth + 1 >= self._num_levels:
            return None
        self._frontier = self._next_frontier(frontier)
        return self._frontier

    def _next_frontier(self, frontier: Frontier) -> Frontier:
        plan, depth = self._plan, frontier.depth + 1
        width, num_nodes = self._widths[depth], plan.parents.shape[1]
        b, device = plan.parents.shape[0], plan.parents.device
        spare = (0, self.max_grown_nodes - num_nodes)
        target = torch.where(plan.expanded & (plan.depth == depth), plan.frontier_index, width)
        # Nodes that are not in this frontier are written to one extra entry.
        nodes = torch.arange(num_nodes, num_nodes + width + 1, device=device).expand(b, -1)
        nodes = nodes.scatter(1, target, torch.arange(num_nodes, device=device).expand(b, -1))[:, :width]
        parents = torch.nn.functional.pad(plan.parents.clamp_min(0), spare).gather(1, nodes)
        tokens = torch.nn.functional.pad(self._tokens, spare).gather(1, nodes)
        return frontier.below(nodes, parents, tokens, plan.frontier_index.gather(1, parents))

    def finish(self) -> DraftTree:
        plan = self._plan
        # Nodes are in level order, so a tree of fewer levels is a prefix of the nodes.
        most = 1 + sum(width * self.max_siblings for width in self._widths[: self._num_levels])
        num_nodes = min(self.max_nodes, most)
        valid = self._valid & (plan.depth <= self._num_levels)
        probs = None
        if self._keep_probs:
            b, _, vocab_size = self._probs[0][1].shape
            probs = self._probs[0][1].new_zeros(b, self.max_grown_nodes, vocab_size)
            for nodes, values in self._probs:
                probs = probs.scatter(1, nodes[:, :, None].expand_as(values), values)
            probs = probs[:, :num_nodes]
        return DraftTree(
            tokens=self._tokens[:, :num_nodes],
            parents=torch.where(valid, plan.parents, -1)[:, :num_nodes],
            depth=torch.where(valid, plan.depth, 0)[:, :num_nodes],
            valid=valid[:, :num_nodes],
            origin=torch.arange(num_nodes, device=valid.device).expand_as(valid[:, :num_nodes]),
            num_levels=self._num_levels,
            max_siblings=self.max_siblings,
            draft_probs=probs,
        )

    def commit(self, verification: VerificationOutput, result: AcceptanceResult) -> Tensor | None:
        slots, tree = verification.slots, verification.tree
        if tree.num_levels == 0:
            return None
        probs, alpha, is_known = self._observe(tree, result)
        alpha = torch.where(is_known, alpha, self._learned.alpha[slots.index])
        self._learned.count(slots, alpha, tree)
        max_depth = self._learned.learn(slots, alpha, result)
        plan = _pack(plan_tree(probs, alpha, max_depth, self.settings))
        plan = torch.nn.functional.pad(plan, (0, self.max_nodes - plan.shape[2]))
        # If the drafter has no candidate after the root (lookup), the tree stays the same.
        self._plans[slots.index] = torch.where(is_known[:, None, None], plan, self._plans[slots.index])
        return _unpack(self._plans[slots.index]).levels()

    def _observe(self, tree: DraftTree, result: AcceptanceResult) -> tuple[Tensor, Tensor, Tensor]:
        """Return P̃ (b, k), α (b,) and a mask (b,) of rows with candidates, from the nodes that `source` selects."""
        ranked = self._ranked[:, : tree.num_nodes]
        root = ranked[:, 0]
        is_known = root[:, 0] >= 0
        if self.settings.source == "root":
            return root, confidence(root.clamp_min(0.0)), is_known
        # Use only nodes that have children in this row's tree; other run nodes depend on the rest of the batch.
        has_child = tree.has_drafts()
        if self.settings.source == "accepted_leaf":
            last = result.path.gather(1, (result.n - 1)[:, None])
            before = result.path.gather(1, (result.n - 2).clamp_min(0)[:, None])
            node = torch.where(has_child.gather(1, last), last, before)
            chosen = ranked.gather(1, node[:, :, None].expand(-1, -1, ranked.shape[2]))[:, 0]
            return chosen, confidence(chosen.clamp_min(0.0)), is_known
        weight = has_child.float()
        weight = weight / weight.sum(dim=1, keepdim=True).clamp_min(1.0)
        probs = (ranked.clamp_min(0.0) * weight[:, :, None]).sum(dim=1)
        alphas = confidence(ranked.clamp_min(0.0))
        return probs, (alphas * weight).sum(dim=1), is_known & has_child.any(dim=1)


def _pack(tree: IndexTree) -> Tensor:
    """Return the tree's six fields as one tensor (b, 6, N)."""
    fields = (tree.parents, tree.ranks, tree.depth, tree.valid.long(), tree.expanded.long(), tree.frontier_index)
    return torch.stack(fields, dim=1)


def _unpack(packed: Tensor) -> IndexTree:
    parents, ranks, depth, valid, expanded, frontier_index = packed.unbind(dim=1)
    return IndexTree(parents, ranks, depth, valid > 0, expanded > 0, frontier_index)
