"""Values of one step: frontier, draft tree and verdict.

Shapes: b active slots, F frontier nodes, N tree nodes, D levels, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from models.backends.attention import ancestors


@dataclass(frozen=True)
class Frontier:
    """Nodes of one depth that are expanded next; at first the root.

    `nodes` and `parents` (b, F) index the grown nodes (−1: no parent), `tokens` (b, F). `line` holds the drafted tokens
    from depth 1 to the node, (b, F, depth), or one (b, F) tensor per level if every level has one node; see `path`.
    """

    depth: int
    nodes: Tensor
    parents: Tensor
    tokens: Tensor
    line: Tensor | tuple[Tensor, ...]

    @property
    def path(self) -> Tensor:
        """Drafted tokens (b, F, depth) from depth 1 to each node."""
        if isinstance(self.line, Tensor):
            return self.line
        return torch.stack(self.line, dim=-1) if self.line else self.tokens[:, :, None][:, :, :0]

    def below(self, nodes: Tensor, parents: Tensor, tokens: Tensor, above: Tensor) -> Frontier:
        """The next frontier; `above` (b, F') are the places of the nodes' parents in this one."""
        path = self.path.gather(1, above[:, :, None].expand(-1, -1, self.depth))
        return Frontier(self.depth + 1, nodes, parents, tokens, torch.cat([path, tokens[:, :, None]], dim=-1))

    @staticmethod
    def at_root(tokens: Tensor) -> Frontier:
        """The first frontier: `tokens` (b,) are the pending tokens."""
        zeros = torch.zeros_like(tokens)[:, None]
        return Frontier(0, zeros, zeros - 1, tokens[:, None], ())


@dataclass(frozen=True)
class DraftTree:
    """A draft tree for every slot.

    `tokens`, `parents`, `depth`, `valid`, `origin` (b, N): index 0 is the root, the pending token that is not in the KV
    cache; parents precede children (−1 for the root); siblings are in draw order; invalid nodes are padding; `origin`
    is the index of the grown node. `draft_probs` (b, N, V) has at i the distribution of node i's children, or None if
    drafts count as certain. `failed` (b,) marks rows with non-finite drafter logits, None without drafts.
    `num_levels` D is the largest depth, `max_siblings` the most children of a node. `is_chain`: each node's child is
    the next node. `num_drafted` (b,) counts valid drafts after `within`. `ancestry` (b, N, N) is the result of
    `visible` if the policy has computed it.
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
    # Cache of `visible`.
    _visible: list[Tensor] = field(default_factory=list, init=False, repr=False, compare=False)

    @staticmethod
    def root_only(tokens: Tensor) -> DraftTree:
        """A tree without drafts: `tokens` (b,) are the pending tokens."""
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
        """Ancestors-or-self mask (b, N, N); invalid nodes are visible to no other node."""
        if self.ancestry is not None:
            return self.ancestry
        if not self._visible:
            self._visible.append(ancestors(self.parents))
        return self._visible[0]

    def sibling_rank(self) -> Tensor:
        """Number of earlier siblings of each node, (b, N)."""
        same = self.parents[:, :, None] == self.parents[:, None, :]
        return same.tril(-1).sum(-1)

    def has_drafts(self) -> Tensor:
        """Nodes with a valid child, (b, N)."""
        children = self.valid.long() * (self.parents >= 0)
        return torch.zeros_like(children).scatter_add(1, self.parents.clamp_min(0), children) > 0

    def within(self, max_depth: Tensor) -> DraftTree:
        """The tree with nodes deeper than `max_depth` (b,) marked invalid and `num_drafted` set; the tree itself if its
        policy has done both."""
        if self.num_drafted is not None:
            return self
        valid = self.valid & (self.depth <= max_depth[:, None])
        return replace(self, valid=valid, num_drafted=valid.sum(dim=1) - 1)


@dataclass(frozen=True)
class Verdict:
    """The result of acceptance: `path` (b, D + 1) nodes from the root, `n` (b,) accepted nodes with the root, `next`
    (b,) the target's next token, `relaxed` (b, D + 1) nodes that differ from the target's token."""

    path: Tensor
    n: Tensor
    next: Tensor
    relaxed: Tensor

    def produced(self, tree: DraftTree) -> Tensor:
        """Tokens of one step (b, D + 1): accepted drafts, then the target's next token; undefined beyond `n`."""
        last = self.next[:, None]
        # The accepted nodes of a chain are its first ones.
        tokens = tree.tokens if tree.is_chain else tree.tokens.gather(1, self.path)
        return torch.cat([tokens[:, 1:], last], dim=1).scatter_(1, (self.n - 1)[:, None], last)
