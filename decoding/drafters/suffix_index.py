"""Indexes the suffixes of finished outputs, so that a device finds the usual continuation of n-grams by one search.

Host code, NumPy only. Oliaro et al. 2024, "SuffixDecoding" (arXiv 2411.04975), build a suffix tree and descend from the
match to the most frequent child, again and again. Here the suffixes are sorted, a node of the tree is a run of suffixes
with equal first tokens, and the descents of all nodes are computed when the index is built. Every descent ends at a
suffix that contains it, so the drafts after an n-gram are a slice of the text.

Example: the outputs  a b c x,  a b d  and  a b c y, searched with the n-gram  a b

    c follows twice and d once, so the drafts begin with c; after it, x and y follow once each, and the latest output
    wins: the n-gram is indexed with the occurrence in  a b c y,  and its drafts are  c y
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SEPARATOR = -1
"""Ends every output in the text; no n-gram and no continuation contains it."""
REBUILD_SHARE = 8
"""The index is rebuilt when a new part of 1 / `REBUILD_SHARE` of the text has come since the last time."""
NO_KEY = np.iinfo(np.int64).max
"""Padding behind the keys of an order; larger than all keys."""
_MULTIPLIER = 0x9E3779B97F4A7C15
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class SuffixIndex:
    """The n-grams of a text of finished outputs, by n = 1, …, M, with room for C tokens.

    `keys` (M, C) are the ascending keys of the n-grams that are followed by a token, padded with `NO_KEY`; `starts`
    (M, C) are the positions in `text` (C,) at which the drafts after them start. `text` is padded with `SEPARATOR`.
    """

    text: Ints
    keys: Ints
    starts: Ints


class Corpus:
    """The latest finished outputs, at most `max_tokens` tokens with a separator after each output.

    Of a longer output, the last tokens are kept. The contents depend only on the sequence of outputs.
    """

    def __init__(self, max_tokens: int = 65_536) -> None:
        assert max_tokens >= 2, max_tokens
        self.max_tokens = max_tokens
        self._outputs: deque[Ints] = deque()
        self._num_tokens = 0
        self._num_new = 0

    def add(self, token_ids: Sequence[int]) -> bool:
        """Add an output and drop the oldest ones beyond the limit; return whether the index is due."""
        output = np.array([*token_ids[-(self.max_tokens - 1) :], SEPARATOR], dtype=np.int64)
        self._outputs.append(output)
        self._num_tokens += len(output)
        self._num_new += len(output)
        while self._num_tokens > self.max_tokens:
            self._num_tokens -= len(self._outputs.popleft())
        return self._num_new * REBUILD_SHARE >= self._num_tokens

    def build(self, max_ngram_tokens: int, num_drafts: int) -> SuffixIndex:
        """Index the outputs; see `build_index`."""
        self._num_new = 0
        text = np.concatenate([*self._outputs, np.empty(0, dtype=np.int64)])
        return build_index(text, max_ngram_tokens, num_drafts, self.max_tokens)


def key_factors(max_ngram_tokens: int) -> Ints:
    """Return the factors (M,) of an n-gram's tokens in its key, for its last token first.

    The key of the tokens t_1 … t_n is Σ_k factors[k] · (t_{n − k} + 1), k = 0, …, n − 1, in 64-bit arithmetic. N-grams
    of one length with equal keys, of which no pair is known, would share their drafts, which costs only acceptance.
    """
    powers = [pow(_MULTIPLIER, n, 1 << 64) for n in range(1, max_ngram_tokens + 1)]
    return np.array(powers, dtype=np.uint64).view(np.int64)


def build_index(text: Ints, max_ngram_tokens: int, num_drafts: int, capacity: int) -> SuffixIndex:
    """Index a `text` of outputs, each with a `SEPARATOR` at its end, for n-grams of up to `max_ngram_tokens` tokens.

    The first `num_drafts` tokens after an n-gram are, one after the other, the most frequent next token after all
    tokens before it; of equally frequent tokens the one that occurred last. Arrays are padded to `capacity` tokens.
    """
    assert len(text) <= capacity, (len(text), capacity)
    padded = np.full(capacity, SEPARATOR)
    padded[: len(text)] = text
    keys = np.full((max_ngram_tokens, capacity), NO_KEY)
    starts = np.zeros((max_ngram_tokens, capacity), dtype=np.int64)
    factors, depth = key_factors(max_ngram_tokens), max_ngram_tokens + num_drafts
    for length, chosen in _usual_suffixes(text, depth):
        if length <= max_ngram_tokens:
            tokens = text[chosen[:, None] + length - 1 - np.arange(length)]
            key = ((tokens + 1) * factors[:length]).sum(axis=1)
            order = key.argsort()
            keys[length - 1, : len(key)] = key[order]
            starts[length - 1, : len(key)] = chosen[order] + length
    return SuffixIndex(padded, keys, starts)


def _usual_suffixes(text: Ints, depth: int) -> Iterator[tuple[int, Ints]]:
    """Yield each length from `depth` − 1 down to 1, with the positions of one suffix for every n-gram of that length
    that is followed by a token: the suffix that follows the most frequent next tokens up to `depth` tokens."""
    if len(text) == 0:
        return
    order = _sort_suffixes(text, depth)
    common, room = _shared_tokens(text, order, depth), _tokens_to_separator(text)[order]
    # Runs of sorted suffixes with equal first tokens: the place of the first suffix, and of the chosen one.
    begins = chosen = np.arange(len(text))
    for length in range(depth, 0, -1):
        sizes = np.diff(begins, append=len(text))
        latest = np.maximum.reduceat(order, begins)
        # Continuations come before the end of an output; frequent ones before rare ones, and late before early ones.
        worth = np.where(room[begins] > length, sizes, 0) * len(text) + latest
        begins, previous = np.flatnonzero(common < length), begins
        first = np.searchsorted(previous, begins)
        best = np.maximum.reduceat(worth, first)
        chosen = chosen[worth == np.repeat(best, np.diff(first, append=len(previous)))]
        if length < depth:
            yield length, order[chosen[room[chosen] > length]]


def _sort_suffixes(text: Ints, depth: int) -> Ints:
    """Return the positions of all suffixes, sorted by their first `depth` tokens or more, by prefix doubling."""
    rank, width = np.unique(text, return_inverse=True)[1], 1
    while width < depth:
        behind = np.zeros_like(rank)
        behind[:-width] = rank[width:] + 1
        rank = np.unique(rank * (len(text) + 1) + behind, return_inverse=True)[1]
        width *= 2
    return rank.argsort(kind="stable")


def _shared_tokens(text: Ints, order: Ints, depth: int) -> Ints:
    """Return for every sorted suffix how many first tokens it shares with the suffix before it, at most `depth`; a
    separator is not shared."""
    padded = np.concatenate([text, np.full(depth, SEPARATOR)])
    shared, alive = np.zeros_like(order), np.arange(1, len(order))
    for ahead in range(depth):
        token = padded[order[alive] + ahead]
        alive = alive[(token == padded[order[alive - 1] + ahead]) & (token != SEPARATOR)]
        shared[alive] += 1
    return shared


def _tokens_to_separator(text: Ints) -> Ints:
    """Return the number of tokens from each position to the next separator; 0 at a separator."""
    ends = np.flatnonzero(text == SEPARATOR)
    positions = np.arange(len(text))
    return ends[np.searchsorted(ends, positions)] - positions
