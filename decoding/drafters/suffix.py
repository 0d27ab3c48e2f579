"""Suffix decoding: copies the usual continuation of the last tokens in the engine's finished outputs.

Oliaro et al. 2024, "SuffixDecoding" (arXiv 2411.04975), for requests that repeat phrases of each other. The row's own
prompt and output are searched first, as by prompt lookup; a longer match in finished outputs replaces their match.
See `decoding.drafters.suffix_index` for the order of continuations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from decoding.contracts import EngineSpec, PrefillOutput
from decoding.drafters.lookup import LookupDrafter
from decoding.drafters.suffix_index import NO_KEY, SEPARATOR, Corpus, key_factors
from models.kv.lanes import SlotBatch


class SuffixDrafter(LookupDrafter):
    """Drafter that copies from the row's own text, or from the finished outputs of a corpus.

    A step sees the outputs that were passed to `finished` before the last rebuild of the index: drafts depend on the
    outputs that ended before, tokens under exact acceptance do not. `corpus` holds these outputs; an engine that
    follows another one may continue with its corpus. The index is on the device, in tensors of constant size:
    `_corpus_text` (C + D,), `_keys` and `_starts` (M, C).
    """

    name = "suffix"

    def __init__(self, min_ngram_tokens: int = 1, max_ngram_tokens: int = 8, corpus: Corpus | None = None) -> None:
        super().__init__(min_ngram_tokens, max_ngram_tokens)
        self.corpus = corpus or Corpus()

    def open(self, spec: EngineSpec) -> None:
        super().open(spec)
        capacity, device = self.corpus.max_tokens, spec.device
        shape = (self.max_ngram_tokens, capacity)
        self._corpus_text = torch.full((capacity + spec.max_levels,), SEPARATOR, dtype=torch.long, device=device)
        self._keys = torch.full(shape, NO_KEY, dtype=torch.long, device=device)
        self._starts = torch.zeros(shape, dtype=torch.long, device=device)
        self._factors = torch.from_numpy(key_factors(self.max_ngram_tokens)).to(device)
        self._sizes = torch.arange(1, self.max_ngram_tokens + 1, device=device)
        # Number of steps whose match is in finished outputs.
        self._num_shared = torch.zeros(spec.num_slots, dtype=torch.long, device=device)
        self._rebuild()

    def admit(self, slots: SlotBatch, first: Tensor, prefill_outputs: Sequence[PrefillOutput]) -> None:
        super().admit(slots, first, prefill_outputs)
        self._num_shared[slots.index] = 0

    def finished(self, token_ids: Sequence[int]) -> None:
        if self.corpus.add(token_ids):
            self._rebuild()

    def _rebuild(self) -> None:
        index = self.corpus.build(self.max_ngram_tokens, self._max_levels)
        self._corpus_text[: self.corpus.max_tokens].copy_(torch.from_numpy(index.text))
        self._keys.copy_(torch.from_numpy(index.keys))
        self._starts.copy_(torch.from_numpy(index.starts))

    def _find(self, slots: SlotBatch) -> tuple[Tensor, Tensor]:
        drafts, own_matched = super()._find(slots)
        shared, matched = self._find_shared(slots)
        is_longer = matched > own_matched
        self._num_shared[slots.index] += is_longer
        return torch.where(is_longer[:, None], shared, drafts), torch.where(is_longer, matched, own_matched)

    def _find_shared(self, slots: SlotBatch) -> tuple[Tensor, Tensor]:
        """Return the drafts (b, D) from finished outputs, and the length (b,) of the match, 0 without a match."""
        sizes = self._sizes
        positions = self._length[slots.index][:, None] - sizes
        last = self._text[slots.index].gather(1, positions.clamp_min(0))  # (b, M), the last token first
        is_text = ((positions >= 0) & (last >= 0)).cumprod(dim=1).bool()
        wanted = ((last + 1) * self._factors).cumsum(dim=1).T.contiguous()  # (M, b)
        index = torch.searchsorted(self._keys, wanted).clamp_max(self.corpus.max_tokens - 1)
        is_found = (self._keys.gather(1, index) == wanted) & is_text.T
        matched = torch.where(is_found, sizes[:, None], 0).amax(dim=0)
        matched = torch.where(matched >= self.min_ngram_tokens, matched, 0)
        start = self._starts.gather(1, index).gather(0, (matched - 1).clamp_min(0)[None])[0]
        ahead = torch.arange(self._max_levels, device=start.device)
        drafts = self._corpus_text[start[:, None] + ahead]
        return torch.where(matched[:, None] > 0, drafts, SEPARATOR), matched

    def extras(self, slot: int) -> dict[str, Any]:
        num_steps, num_shared = torch.stack([self._counts[slot, 0], self._num_shared[slot]]).tolist()
        return super().extras(slot) | {f"{self.name}_shared_match_rate": num_shared / max(num_steps, 1)}
