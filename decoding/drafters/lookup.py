"""Prompt lookup: copies the tokens that followed an earlier occurrence of the last few tokens.

Saxena 2023, "Prompt lookup decoding". Logits are 0 at the copied token and −inf elsewhere; all −inf without a match.

Example with `max_ngram_tokens` 2, text  a b c d a b  (b is pending):

    last two tokens  a b   occur at positions 0, 1; copying starts at position 2
    drafts           c d a b c d …   the copy continues beyond the end of the text, with a period of 4
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from decoding.contracts import Drafter, EngineSpec, PrefillOutput, VerificationOutput
from decoding.drafters.line import follow_line
from decoding.tree import NO_TOKEN, AcceptanceResult, Frontier
from models.kv.lanes import SlotBatch


class LookupDrafter(Drafter):
    """Drafter that copies tokens from prompt and output.

    A match has `min_ngram_tokens` to `max_ngram_tokens` tokens. The longest match wins; of equally long matches, the
    `latest` or the `first` in the text. State per slot: the text's tokens `_text` (S, L) and `_length` (S,).
    """

    name = "lookup"

    def __init__(
        self, min_ngram_tokens: int = 1, max_ngram_tokens: int = 3, match: Literal["latest", "first"] = "latest"
    ) -> None:
        assert 1 <= min_ngram_tokens <= max_ngram_tokens, (min_ngram_tokens, max_ngram_tokens)
        self.min_ngram_tokens = min_ngram_tokens
        self.max_ngram_tokens = max_ngram_tokens
        self.match = match

    def open(self, spec: EngineSpec) -> None:
        self._vocab_size = spec.vocab_size
        self._max_levels = spec.max_levels
        # Each step writes all its positions, also those after the end of the text.
        capacity = spec.max_context_tokens + spec.max_levels + 2
        self._text = torch.full((spec.num_slots, capacity), NO_TOKEN, dtype=torch.long, device=spec.device)
        self._length = torch.zeros(spec.num_slots, dtype=torch.long, device=spec.device)
        # (S, 3): number of steps, of steps with a match, and of matched tokens.
        self._counts = torch.zeros(spec.num_slots, 3, dtype=torch.long, device=spec.device)

    def admit(self, slots: SlotBatch, first: Tensor, prefill_outputs: Sequence[PrefillOutput]) -> None:
        for slot, prefill_output in zip(slots.ids, prefill_outputs, strict=True):
            prompt = prefill_output.prefix
            self._text[slot] = NO_TOKEN
            self._text[slot, : prompt.length] = torch.where(prompt.visual, NO_TOKEN, prompt.token_ids)
            self._length[slot] = prompt.length
        self._text[slots.index, self._length[slots.index]] = first
        self._length[slots.index] += 1
        self._counts[slots.index] = 0

    def replay_key(self, slots: SlotBatch, num_levels: int) -> Hashable | None:
        return ()

    def draft(self, slots: SlotBatch, frontier: Frontier) -> Tensor:
        if frontier.depth == 0:
            self._line, matched = self._find(slots)
            counted = torch.stack([torch.ones_like(matched), (matched > 0).long(), matched], dim=1)
            self._counts[slots.index] += counted
        return follow_line(frontier, self._line, self._vocab_size)

    def _find(self, slots: SlotBatch) -> tuple[Tensor, Tensor]:
        """Return the drafts (b, D) of each slot, `NO_TOKEN` where there are none, and the length (b,) of its match."""
        text, length = self._text[slots.index], self._length[slots.index]
        start, matched = find_match(text, length, self.min_ngram_tokens, self.max_ngram_tokens, self.match == "latest")
        period = (length - start).clamp_min(1)
        ahead = torch.arange(self._max_levels, device=text.device)
        copied = text.gather(1, start[:, None] + ahead % period[:, None])
        return torch.where(matched[:, None] > 0, copied, NO_TOKEN), matched

    def commit(self, verification: VerificationOutput, result: AcceptanceResult) -> None:
        tree, index = verification.tree, verification.slots.index
        tokens = result.produced(tree)
        offset = torch.arange(tokens.shape[1], device=tokens.device)
        # Positions beyond the count are set to NO_TOKEN.
        tokens = torch.where(offset < result.n[:, None], tokens, NO_TOKEN)
        length = self._length[index]
        self._text[index[:, None], length[:, None] + offset] = tokens
        verification.slots.add(self._length, result.n)

    def extras(self, slot: int) -> dict[str, Any]:
        num_steps, num_found, num_matched = self._counts[slot].tolist()
        return {
            f"{self.name}_match_rate": num_found / max(num_steps, 1),
            f"{self.name}_match_tokens_mean": num_matched / max(num_found, 1),
        }


def find_match(text: Tensor, length: Tensor, min_tokens: int, max_tokens: int, latest: bool) -> tuple[Tensor, Tensor]:
    """Find the longest match in `text` (b, L) of `length` (b,): return the index (b,) after it and its length (b,).

    Both are 0 if no match has at least `min_tokens` tokens and a token after it.
    """
    num_positions = text.shape[1]
    position = torch.arange(num_positions, device=text.device).expand_as(text)
    last = (length - 1)[:, None]
    # Whether a match can end at `position`: it is followed by a token.
    alive = (position < last) & (text.roll(-1, dims=1) >= 0)
    matched = torch.zeros_like(text)
    for back in range(max_tokens):
        suffix = text.gather(1, (last - back).clamp_min(0))
        equal = (text == suffix) & (suffix >= 0)
        alive = alive & F.pad(equal, (back, 0))[:, :num_positions]
        matched += alive
    nearness = position if latest else num_positions - 1 - position
    score = torch.where(matched >= min_tokens, matched * num_positions + nearness, -1)
    best = score.max(dim=1)
    has_match = best.values >= 0
    return torch.where(has_match, best.indices + 1, 0), torch.where(has_match, best.values // num_positions, 0)
