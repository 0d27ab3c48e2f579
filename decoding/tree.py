"""Defines the data of one step: frontier, draft tree and result.

Shapes: b active slots, F frontier nodes, N tree nodes, D levels, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from models.backends.attention import ancestors

NO_TOKEN = -1
"""Placeholder for visual tokens and positions without a token; it matches no token and is never proposed."""


@dataclass(frozen=True)
class Frontier:
    """Nodes of one depth that are expanded next; the first frontier contains only the root.

    `nodes` and `parents` (b, F) are indices of grown nodes (−1: no parent), `tokens` (b, F) their tokens. `line` holds
    the drafted tokens from depth 1 to each node: (b, F, depth), or a (b, 1) tensor per level of a chain; see `path`.
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
        """Return the next frontier; `above` (b, F') are the indices of the new nodes' parents in this frontier."""
        path = self.path.gather(1, above[:, :, None].expand(-1, -1, self.depth))
        return Frontier(self.depth + 1, nodes, parents, tokens, torch.cat([path, tokens[:, :, None]], dim=-1))

    @staticmethod
    def at_root(tokens: Tensor) -> Frontier:
        """Return the first frontier, which contains only the root; `tokens` (b,) are the pending tokens."""
        zeros = torch.zeros_like(tokens)[:, None]
        return Frontier(0, zeros, zeros - 1, tokens[:, None], ())


@dataclass(frozen=True)
class DraftTree:
    """The draft trees of all active slots.

    `tokens`, `parents`, `depth`, `valid` and `origin` are (b, N). Node 0 is the root: the pending token, which is not
    in the KV cache. Parents precede children (−1 for the root); siblings are in draw order; invalid nodes are padding;
    `origin` is a node's index among all grown nodes. `draft_probs[:, i]` (b, N, V) is the distribution of node i's
    children, None if drafts have probability 1. `failed` (b,) marks rows with non-finite drafter logits, None without
    drafts. `num_levels` D is the largest depth, `max_siblings` the largest number of children of a node. If `is_chain`,
    each node's child is the next node. `num_drafted` (b,) is the number of valid drafts, set by `within`. `ancestry`
    (b, N, N) is the result of `visible` if the policy has computed it.
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
    # Cache of `visible`; Dynamo does not trace cached properties.
    _visible: list[Tensor] = field(default_factory=list, init=False, repr=False, compare=False)

    @staticmethod
    def root_only(tokens: Tensor) -> DraftTree:
        """Return trees without drafts; `tokens` (b,) are the pending tokens."""
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
        """Return the attention mask (b, N, N): each node sees its ancestors and itself."""
        if self.ancestry is not None:
            return self.ancestry
        if not self._visible:
            self._visible.append(ancestors(self.parents))
        return self._visible[0]

    def paths(self) -> Tensor:
        """Return the drafts (b, N, D) on the path to each node and its own token, `NO_TOKEN` beyond its depth."""
        visible, num_levels = self.visible(), self.num_levels
        # Nodes that are not on the path are written to one depth after the last.
        index = torch.where(visible, self.depth[:, None], num_levels + 1)
        paths = self.tokens.new_full((*self.tokens.shape, num_levels + 2), NO_TOKEN)
        return paths.scatter_(2, index, self.tokens[:, None].expand_as(index))[:, :, 1:-1]

    def sibling_rank(self) -> Tensor:
        """Return the number of earlier siblings of each node, (b, N)."""
        same = self.parents[:, :, None] == self.parents[:, None, :]
        return same.tril(-1).sum(-1)

    def has_drafts(self) -> Tensor:
        """Return a mask (b, N) of the nodes with a valid child."""
        children = self.valid.long() * (self.parents >= 0)
        return torch.zeros_like(children).scatter_add(1, self.parents.clamp_min(0), children) > 0

    def within(self, max_depth: Tensor) -> DraftTree:
        """Mark nodes deeper than `max_depth` (b,) as invalid and set `num_drafted`, unless the policy has done so."""
        if self.num_drafted is not None:
            return self
        valid = self.valid & (self.depth <= max_depth[:, None])
        return replace(self, valid=valid, num_drafted=valid.sum(dim=1) - 1)


@dataclass(frozen=True)
class AcceptanceResult:
    """The result of acceptance: `path` (b, D + 1) are the accepted nodes from the root, `n` (b,) their number with the
    root, `next` (b,) the target's next token; `relaxed` (b, D + 1) marks drafts that a lossless rule would reject."""

    path: Tensor
    n: Tensor
    next: Tensor
    relaxed: Tensor

    def produced(self, tree: DraftTree) -> Tensor:
        """Return the new tokens (b, D + 1): accepted drafts, then the target's next token; undefined beyond `n`."""
        last = self.next[:, None]
        # The accepted nodes of a chain are its first nodes.
        tokens = tree.tokens if tree.is_chain else tree.tokens.gather(1, self.path)
        return torch.cat([tokens[:, 1:], last], dim=1).scatter_(1, (self.n - 1)[:, None], last)
