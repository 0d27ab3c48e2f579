"""Applies the logits processors of transformers' `generate` to the logits of tree nodes, per row.

The text before a node is the prompt, the output with the pending token, and the drafts on the path to the node.
transformers applies, in this order: sequence bias, repetition penalty, n-grams, bad words, minimum length, forced
tokens, suppressed tokens. A score of −inf stays −inf under bias and penalty, so tokens are removed first
(`RowProcessors.adjust`); the penalty follows (`decoding.sampling`), and forced tokens replace the scores at last
(`RowProcessors.force`). Suppressed tokens are left out of the forced ones at admission.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from decoding.tree import NO_TOKEN

ANY_TOKEN = -2
"""Placeholder in a pattern that matches every token."""
CHUNK_ENTRIES = 1 << 24
"""Maximum number of entries (row, node, token of the text) that are compared at once; bounds the memory of n-grams."""


@dataclass(frozen=True)
class Features:
    """Host values on which the kernels of a batch depend: processors that any row uses, and the longest n-gram."""

    bias: bool
    patterns: bool
    ngram: int
    forced: bool


@dataclass(frozen=True)
class RowProcessors:
    """Processors of the b active rows: the tables of `ProcessorTables`, without the slots that are not active.

    `index` (b,) is the output index of the token after the root, `length` (b,) the number of tokens up to the root.
    Tables that `features` does not use are empty.
    """

    features: Features
    index: Tensor
    length: Tensor
    bias: Tensor
    before: Tensor
    last: Tensor
    value: Tensor
    since: Tensor
    until: Tensor
    ngram: Tensor
    text: Tensor
    forced_at: Tensor
    forced: Tensor

    def adjust(self, logits: Tensor, path: Tensor) -> Tensor:
        """Add biases to fp32 logits (b, N, V), and −inf at tokens that may not follow; `path` (b, N, P) are the drafts
        up to each node, `NO_TOKEN` after them."""
        if self.features.bias:
            logits = logits + self.bias[:, None]
        if not (self.features.patterns or self.features.ngram):
            return logits
        depth = (path != NO_TOKEN).sum(dim=-1)
        width = max(self.before.shape[2], self.features.ngram - 1)
        ending = torch.cat([self._recent(width)[:, None].expand(-1, path.shape[1], -1), path], dim=-1)
        back = torch.arange(width, device=path.device)
        tail = ending.gather(2, width - 1 + depth[:, :, None] - back)  # (b, N, width), the last token first
        if self.features.patterns:
            logits = self._add_patterns(logits, self.index[:, None] + depth, tail)
        if self.features.ngram:
            logits = self._remove_ngrams(logits, path, depth, ending, tail)
        return logits

    def _recent(self, width: int) -> Tensor:
        """Return the last tokens (b, width) up to the root, `NO_TOKEN` before the first one."""
        positions = self.length[:, None] - width + torch.arange(width, device=self.length.device)
        if not width:
            return positions
        # Texts of rows that read none may be longer than the table.
        tokens = self.text.gather(1, positions.clamp(0, self.text.shape[1] - 1))
        return torch.where(positions >= 0, tokens, NO_TOKEN)

    def _add_patterns(self, logits: Tensor, index: Tensor, tail: Tensor) -> Tensor:
        index = index[:, :, None]
        applies = (index >= self.since[:, None]) & (index < self.until[:, None])  # (b, N, M)
        for back in range(self.before.shape[2]):
            token = self.before[:, None, :, back]
            applies = applies & ((token == ANY_TOKEN) | (token == tail[:, :, back, None]))
        value = torch.where(applies, self.value[:, None], 0.0)
        return logits.scatter_add(2, self.last[:, None].expand_as(value), value)

    def _remove_ngrams(self, logits: Tensor, path: Tensor, depth: Tensor, ending: Tensor, tail: Tensor) -> Tensor:
        """Remove the tokens that would complete an n-gram of the text: of each n-gram whose first n − 1 tokens are the
        last ones before the node, the last token."""
        logits = logits.clone()
        size, longest, length = self.ngram[:, None, None], self.features.ngram, self.length[:, None, None]
        (b, num_nodes, num_drafts), width = path.shape, tail.shape[2]

        def ends(position: Tensor, earlier: Sequence[Tensor]) -> Tensor:
            is_match = (size > 0) & (position >= size - 1)
            for back, token in enumerate(earlier):
                is_match = is_match & ((token == tail[:, :, back, None]) | (back + 1 >= size))
            return is_match

        # N-grams that end in drafts.
        position = torch.arange(num_drafts, device=path.device)
        windows = [ending[:, :, width - back : width - back + num_drafts] for back in range(1, longest)]
        _remove(logits, path, ends(length + position, windows) & (position < depth[:, :, None]))
        # N-grams that end in the text before them.
        text = F.pad(self.text, (longest - 1, 0), value=NO_TOKEN)[:, None]
        step = max(1, CHUNK_ENTRIES // (b * num_nodes))
        for start in range(longest - 1, text.shape[2], step):
            stop = min(start + step, text.shape[2])
            position = torch.arange(start, stop, device=path.device) - (longest - 1)
            windows = [text[:, :, start - back : stop - back] for back in range(1, longest)]
            is_match = ends(position, windows) & (position < length)
            _remove(logits, text[:, :, start:stop], is_match.expand(-1, num_nodes, -1))
        return logits

    def force(self, scores: Tensor, path: Tensor) -> Tensor:
        """Return scores (b, N, V), with 0 at forced tokens and −inf elsewhere at nodes before a forced token."""
        if not self.features.forced:
            return scores
        index = self.index[:, None] + (path != NO_TOKEN).sum(dim=-1)
        applies = self.forced_at[:, None] == index[:, :, None]  # (b, N, F)
        # Rows without a token write to one column after the vocabulary.
        columns = torch.where(applies, self.forced[:, None], scores.shape[2])
        wide = scores.new_full((*scores.shape[:2], scores.shape[2] + 1), -torch.inf)
        only = wide.scatter_(2, columns, 0.0)[:, :, :-1]
        return torch.where(applies.any(dim=-1, keepdim=True), only, scores)


def _remove(logits: Tensor, tokens: Tensor, where: Tensor) -> None:
    """Add −inf in place to logits (b, N, V) at `tokens` (b, N or 1, J), where `where` (b, N, J) is set."""
    vocab_size = logits.shape[2]
    value = torch.where(where & (tokens < vocab_size), -torch.inf, 0.0)
    logits.scatter_add_(2, tokens.clamp(0, vocab_size - 1).expand_as(value), value)
