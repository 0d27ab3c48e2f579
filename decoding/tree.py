"""What flows between drafter, tree policy, target and acceptance: frontier, draft tree, verdict.

Plain tensors with fixed meanings. Shapes: b active slots, F frontier nodes, N tree nodes, D levels, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from models.backends.attention import ancestors


@dataclass(frozen=True)
class Frontier:
    """Nodes whose children are wanted: all of depth `depth`, the root alone at first.

    `nodes` (b, F) are indices among the grown nodes, `parents` (b, F) those of their parents (−1 for the root),
    `tokens` (b, F). `line` holds the drafted tokens from depth 1 down to the node itself, (b, F, depth), or level by
    level, each (b, F), where there is one node on each; see `path`.
    """

    depth: int
    nodes: Tensor
    parents: Tensor
    tokens: Tensor
    line: Tensor | tuple[Tensor, ...]

    @property
    def path(self) -> Tensor:
        """The drafted tokens (b, F, depth) from depth 1 down to each node."""
        if isinstance(self.line, Tensor):
            return self.line
        return torch.stack(self.line, dim=-1) if self.line else self.tokens[:, :, None][:, :, :0]

    @staticmethod
    def at_root(tokens: Tensor) -> Frontier:
        """The first frontier: `tokens` (b,) are the pending tokens."""
        zeros = torch.zeros_like(tokens)[:, None]
        return Frontier(0, zeros, zeros - 1, tokens[:, None], ())


@dataclass(frozen=True)
class DraftTree:
    """A tree of drafts for every slot; a chain is a tree.

    `tokens`, `parents`, `depth`, `valid`, `origin` (b, N): column 0 is the root (the pending token, which no cache
    holds yet), parents are topological (−1 for the root), siblings stand in draw order, invalid nodes are padding, and
    `origin` names the grown node behind each kept one. `draft_probs` (b, N, V) holds at i the distribution from which
    node i's children were drawn, or None where drafts are judged as certain. `failed` (b,) marks rows of which the
    drafter gave no numbers, None where nothing was drafted. `num_levels` D is the deepest depth,
    `max_siblings` the most children that any node has. `is_chain` says that every node's child is the next one, in the
    order in which they were grown. `num_drafted` (b,) counts the valid drafts once all that a row has no use for are
    invalid; see `within`. `ancestry` (b, N, N) is what `visible` gives, where the policy has it at hand.
    """

    tokens: Tensor
    parents: Tensor
    depth: Tensor
    valid: Tensor
    origin: Tensor
    num_levels: int
    max_siblings: int = 1
    draft_probs: Tensor | None = None
    is_chain: bool = False
    failed: Tensor | None = None
    num_drafted: Tensor | None = None
    ancestry: Tensor | None = None
    # What `visible` has computed, as several ask.
    _visible: list[Tensor] = field(default_factory=list, init=False, repr=False, compare=False)

    @staticmethod
    def root_only(tokens: Tensor) -> DraftTree:
        """Nothing drafted: `tokens` (b,) are the pending tokens."""
        zeros = torch.zeros_like(tokens)[:, None]
        valid = zeros == 0
        return DraftTree(
            tokens=tokens[:, None],
            parents=zeros - 1,
            depth=zeros,
            valid=valid,
            origin=zeros,
            num_levels=0,
            is_chain=True,
            num_drafted=zeros[:, 0],
            ancestry=valid[:, None],
        )

    @property
    def num_nodes(self) -> int:
        return int(self.tokens.shape[1])

    def visible(self) -> Tensor:
        """Ancestors-or-self (b, N, N); an invalid node is seen by nobody and sees its own line only."""
        if self.ancestry is not None:
            return self.ancestry
        if not self._visible:
            self._visible.append(ancestors(self.parents))
        return self._visible[0]

    def sibling_rank(self) -> Tensor:
        """How many earlier nodes share each node's parent, (b, N)."""
        same = self.parents[:, :, None] == self.parents[:, None, :]
        return same.tril(-1).sum(-1)

    def has_drafts(self) -> Tensor:
        """Which nodes have a valid child, (b, N): what a row was offered, however deep the batch's tree is."""
        children = self.valid.long() * (self.parents >= 0)
        return torch.zeros_like(children).scatter_add(1, self.parents.clamp_min(0), children) > 0

    def within(self, max_depth: Tensor) -> DraftTree:
        """The same tree with nodes deeper than `max_depth` (b,) marked invalid, and the valid drafts counted; the tree
        itself where they are counted already, as its policy has seen to both."""
        if self.num_drafted is not None:
            return self
        valid = self.valid & (self.depth <= max_depth[:, None])
        return replace(self, valid=valid, num_drafted=valid.sum(dim=1) - 1)


@dataclass(frozen=True)
class Verdict:
    """What the target takes: `path` (b, D + 1) nodes from the root on, `n` (b,) how many of them (root included),
    `next` (b,) the target's own token after the last, `relaxed` (b, D + 1) which were taken against its choice. A rule
    that came by them on the way also gives the tokens `said` after each node of the path and their `logprobs`, both
    (b, D + 1), under the target's raw logits; what stands behind the n-th is junk."""

    path: Tensor
    n: Tensor
    next: Tensor
    relaxed: Tensor
    said: Tensor | None = None
    logprobs: Tensor | None = None

    def produced(self, tree: DraftTree) -> Tensor:
        """Tokens of one step (b, D + 1): the accepted drafts, then the target's own; places beyond `n` are junk."""
        if self.said is not None:
            return self.said
        own = self.next[:, None]
        # The nodes of a chain are its path as far as that goes.
        tokens = tree.tokens if tree.is_chain else tree.tokens.gather(1, self.path)
        return torch.cat([tokens[:, 1:], own], dim=1).scatter_(1, (self.n - 1)[:, None], own)
