"""Keeps the state of logits processors per slot: biases, patterns and forced tokens of requests, and their texts."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from decoding.processors import ANY_TOKEN, Features, RowProcessors
from decoding.types import Sampling
from models.kv.lanes import SlotBatch

ALWAYS = 1 << 40
"""Output index after every token."""
TEXT_STEP = 64
"""The table of texts grows in steps of this number of tokens."""


@dataclass(frozen=True)
class Pattern:
    """Tokens, the last of which gets `value` added where the others precede it, at the output indices from `since` to
    before `until`."""

    tokens: tuple[int, ...]
    value: float = -torch.inf
    since: int = 0
    until: int = ALWAYS


@dataclass(frozen=True)
class Uses:
    """Processors of one request: `bias` of single tokens, patterns up to the output index `until`, n-grams of `ngram`
    tokens, `forced` tokens."""

    bias: bool = False
    until: int = 0
    ngram: int = 0
    forced: bool = False


class ProcessorTables:
    """State of the logits processors of S slots; `position` (S,) is the output index of each slot's next token, a
    tensor of the slot table that is updated in place. `eos_ids` are the tokens that end a text.

    `_bias` (S, V) is added to all logits. Of M patterns, `_before` (S, M, K) are the tokens before the last one in
    reverse order; `_last`, `_value`, `_since` and `_until` (S, M) are as in `Pattern`. `_ngram` (S,) is the size of
    n-grams, `_text` (S, C) are prompt and output, `_prompt_length` (S,) is the number of prompt tokens, `_forced_at`
    and `_forced` (S, F) are pairs of an output index and a token. A table has no columns until a request needs it.
    """

    def __init__(self, vocab_size: int, position: Tensor, eos_ids: frozenset[int]) -> None:
        self._vocab_size = vocab_size
        self._position = position
        self._eos_ids = eos_ids
        self._uses = [Uses()] * position.shape[0]
        self._ngram, self._prompt_length = torch.zeros_like(position), torch.zeros_like(position)
        integers = position.new_zeros(position.shape[0], 0)
        self._bias = self._value = integers.float()
        self._last = self._since = self._until = self._text = self._forced_at = self._forced = integers
        self._before = position.new_zeros(position.shape[0], 0, 0)
        self._kept: tuple[tuple[Any, ...], tuple[Tensor, Tensor]] | None = None

    def occupy(self, slot: int, sampling: Sampling, prompt: Tensor) -> None:
        """Set the processors of a new request in `slot`, whose prompt has the tokens `prompt` (L,)."""
        length = prompt.shape[0]
        tokens, values = self._single(sampling)
        patterns, forced = list(self._patterns(sampling, length)), list(self._forced_tokens(sampling, length))
        until = max((pattern.until for pattern in patterns), default=0)
        self._uses[slot] = Uses(len(tokens) > 0, until, sampling.no_repeat_ngram_size, bool(forced))
        self._ngram[slot] = sampling.no_repeat_ngram_size
        if len(tokens) or self._bias.shape[1]:
            self._bias = _widened(self._bias, self._vocab_size)
            self._bias[slot] = 0.0
            self._bias[slot, tokens] = values
        self._set_patterns(slot, patterns)
        if forced or self._forced.shape[1]:
            self._forced = _widened(self._forced, len(forced))
            self._forced_at = _widened(self._forced_at, len(forced), fill=-1)
            self._forced_at[slot] = -1
            self._forced_at[slot, : len(forced)] = self._tensor(index for index, _ in forced)
            self._forced[slot, : len(forced)] = self._tensor(token for _, token in forced)
        if sampling.no_repeat_ngram_size or any(len(pattern.tokens) > 1 for pattern in patterns):
            num_tokens = length + sampling.max_new_tokens + 1
            self._text = _widened(self._text, -(-num_tokens // TEXT_STEP) * TEXT_STEP)
            self._text[slot, :length] = prompt
        self._prompt_length[slot] = length

    def _set_patterns(self, slot: int, patterns: Sequence[Pattern]) -> None:
        if not (patterns or self._last.shape[1]):
            return
        number, longest = len(patterns), max((len(pattern.tokens) - 1 for pattern in patterns), default=0)
        width = 1 << (number - 1).bit_length() if number else 0
        for name in ("_last", "_value", "_since", "_until"):
            setattr(self, name, _widened(getattr(self, name), width))
        self._before = _widened(self._before, self._last.shape[1], longest, fill=ANY_TOKEN)
        before = [pattern.tokens[-2::-1] if len(pattern.tokens) > 1 else () for pattern in patterns]
        num_before = self._before.shape[2]
        padded = [(*tokens, *[ANY_TOKEN] * (num_before - len(tokens))) for tokens in before]
        self._until[slot] = 0
        self._before[slot, :number] = self._tensor(padded).view(number, num_before)
        self._last[slot, :number] = self._tensor(pattern.tokens[-1] for pattern in patterns)
        self._since[slot, :number] = self._tensor(pattern.since for pattern in patterns)
        self._until[slot, :number] = self._tensor(pattern.until for pattern in patterns)
        self._value[slot, :number] = torch.tensor([pattern.value for pattern in patterns], device=self._value.device)

    def _tensor(self, values: Iterable[Any]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.long, device=self._position.device)

    def _single(self, sampling: Sampling) -> tuple[Tensor, Tensor]:
        """Return the tokens (n,) with a bias of their own, and their biases (n,), −inf for removed tokens. They are
        kept for the next request, because lists may be long, and the requests of a job share them."""
        source = (sampling.sequence_bias, sampling.bad_words_ids, sampling.suppress_tokens, sampling.ignore_eos)
        if self._kept is None or any(value is not other for value, other in zip(self._kept[0], source, strict=True)):
            bias = {tokens[0]: value for tokens, value in dict(sampling.sequence_bias).items() if len(tokens) == 1}
            removed = [words[0] for words in self._bad_words(sampling) if len(words) == 1]
            bias |= dict.fromkeys((*removed, *sampling.suppress_tokens), -torch.inf)
            bias = {token: value for token, value in bias.items() if 0 <= token < self._vocab_size}
            values = torch.tensor(list(bias.values()), dtype=torch.float32, device=self._bias.device)
            self._kept = source, (self._tensor(bias), values)
        return self._kept[1]

    def _ends(self, sampling: Sampling) -> frozenset[int]:
        return frozenset() if sampling.ignore_eos else self._eos_ids

    def _bad_words(self, sampling: Sampling) -> Iterator[tuple[int, ...]]:
        """Yield the bad words other than EOS tokens, which transformers leaves out."""
        ends = self._ends(sampling)
        return (words for words in sampling.bad_words_ids if not (len(words) == 1 and words[0] in ends))

    def _patterns(self, sampling: Sampling, prompt_length: int) -> Iterator[Pattern]:
        """Yield the sequences of several tokens, and the tokens that are removed at some output indices only."""
        for tokens, value in dict(sampling.sequence_bias).items():
            if len(tokens) > 1:
                yield Pattern(tokens, value)
        for tokens in self._bad_words(sampling):
            if len(tokens) > 1:
                yield Pattern(tokens)
        if (least := sampling.min_new_tokens or sampling.min_length - prompt_length) > 0:
            yield from (Pattern((token,), until=least) for token in self._known(sorted(self._ends(sampling))))
        begin = self._begin(sampling, prompt_length)
        for token in self._known(sampling.begin_suppress_tokens):
            yield Pattern((token,), since=begin, until=begin + 1)

    def _known(self, tokens: Iterable[int]) -> list[int]:
        return [token for token in tokens if 0 <= token < self._vocab_size]

    @staticmethod
    def _begin(sampling: Sampling, prompt_length: int) -> int:
        """Return the output index at which `begin_suppress_tokens` are removed: that after a forced first token."""
        return 0 if prompt_length > 1 or sampling.forced_bos_token_id is None else 1

    def _forced_tokens(self, sampling: Sampling, prompt_length: int) -> Iterator[tuple[int, int]]:
        """Yield output indices with their forced tokens; one after the vocabulary if all of them are suppressed."""
        at: dict[int, tuple[int, ...]] = {}
        if sampling.forced_bos_token_id is not None and prompt_length == 1:
            at[0] = (sampling.forced_bos_token_id,)
        if sampling.forced_eos_token_id:
            at[sampling.max_new_tokens - 1] = sampling.forced_eos_token_id
        for index, tokens in at.items():
            is_begin = index == self._begin(sampling, prompt_length)
            removed = {*sampling.suppress_tokens, *(sampling.begin_suppress_tokens if is_begin else ())}
            for token in set(tokens) - removed or {self._vocab_size}:
                yield index, token

    def features(self, slots: SlotBatch, num_generated: Sequence[int]) -> Features | None:
        """Return the features of the batch, None if no row has a processor; its rows have at least `num_generated`
        tokens."""
        uses = [self._uses[slot] for slot in slots.ids]
        features = Features(
            any(use.bias for use in uses),
            any(use.until > number for use, number in zip(uses, num_generated, strict=True)),
            max(use.ngram for use in uses),
            any(use.forced for use in uses),
        )
        return features if features != Features(False, False, 0, False) else None

    def read(self, slots: SlotBatch, features: Features) -> RowProcessors:
        """Return the processors of the batch, of which the tables are read anew."""
        of, index = slots.of, slots.of(self._position)
        reads_text = features.ngram > 0 or (features.patterns and self._before.shape[2] > 0)

        def used(table: Tensor, is_used: bool = features.patterns) -> Tensor:
            return of(table if is_used else table[:, :0])

        return RowProcessors(
            features,
            index,
            index + of(self._prompt_length),
            bias=used(self._bias, features.bias),
            before=of(self._before if features.patterns else self._before[:, :, :0]),
            last=used(self._last),
            value=used(self._value),
            since=used(self._since),
            until=used(self._until),
            ngram=of(self._ngram),
            text=used(self._text, reads_text),
            forced_at=used(self._forced_at, features.forced),
            forced=used(self._forced, features.forced),
        )

    def replay_key(self) -> Hashable:
        """Return the widths of the tables, which are replaced when they grow."""
        tables = (self._bias, self._before, self._last, self._text, self._forced)
        return tuple(tuple(table.shape) for table in tables)

    def advance(self, slots: SlotBatch, tokens: Tensor, count: Tensor) -> None:
        """Append the first `count` (b,) tokens of `tokens` (b, P) to the texts; `position` is that of the first."""
        if not (width := self._text.shape[1]):
            return
        offset = torch.arange(tokens.shape[1], device=tokens.device)
        start = slots.of(self._prompt_length) + slots.of(self._position)
        # Tokens beyond the count are written to the last column, which no text reaches.
        columns = torch.where(offset < count[:, None], start[:, None] + offset, width - 1).clamp_max(width - 1)
        self._text.index_put_((slots.index[:, None].expand_as(columns), columns), tokens)


def _widened(table: Tensor, *sizes: int, fill: int = 0) -> Tensor:
    """Return a table (S, …) with at least `sizes` entries in its other axes; new entries are `fill`."""
    missing = [max(0, size - have) for size, have in zip(sizes, table.shape[1:], strict=True)]
    pads = [pad for number in reversed(missing) for pad in (0, number)]
    return F.pad(table, pads, value=fill) if any(missing) else table
