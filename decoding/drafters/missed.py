"""Buffers what a drafter needs of tokens that were generated without drafts, until it encodes them in one forward."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from decoding.contracts import Drafter, PrefillOutput
from decoding.drafters.model import WIDEST, catch_up_widths
from models.inputs.prefix import Prefix
from models.kv.lanes import LaneModel, SlotBatch


class MissedTokens:
    """Buffers up to P tokens per slot, each with several values, such as its id and its features.

    `like` are values of one token, which determine shapes and types; `most_tokens` is the most that a slot can miss.
    State per slot: `values` (S, P, …), one tensor for each of `like`, and `count` (S,), with the upper bound `most` on
    the host.
    """

    def __init__(self, num_slots: int, most_tokens: int, *like: Tensor) -> None:
        # At least one, because the last step of a batch also has no drafts.
        self.limit = min(WIDEST, 1 + most_tokens)
        ((_, self.width),) = catch_up_widths(self.limit)
        self.values = [tensor.new_zeros(num_slots, self.width, *tensor.shape) for tensor in like]
        self.count = torch.zeros(num_slots, dtype=torch.long, device=like[0].device)
        self.most = [0] * num_slots
        self.skipped: set[int] = set()

    def clear(self, slots: SlotBatch) -> None:
        """Start with new samples in the slots."""
        self._set_empty(slots)
        self.skipped -= set(slots.ids)

    def skip(self, slots: SlotBatch) -> None:
        """Buffer nothing for these slots, which never draft."""
        self._set_empty(slots)
        self.skipped |= set(slots.ids)

    def add(self, slots: SlotBatch, *values: Tensor) -> bool:
        """Append one token per slot with `values` (b, …); return whether a slot that can miss several is full."""
        if self.skipped.intersection(slots.ids):
            indices = [index for index, slot in enumerate(slots.ids) if slot not in self.skipped]
            if not indices:
                return False
            rows = torch.tensor(indices, dtype=torch.long, device=self.count.device)
            slots, values = slots.some([slots.ids[i] for i in indices]), tuple(value[rows] for value in values)
        count = self.count[slots.index]
        for memory, value in zip(self.values, values, strict=True):
            memory[slots.index, count] = value.to(memory.dtype)
        slots.add(self.count, torch.ones_like(count))
        self.note(slots)
        return self._most(slots) >= self.limit > 1

    def note(self, slots: SlotBatch) -> None:
        """Count a token of each slot that was appended on the device."""
        for slot in slots.ids:
            self.most[slot] += 1

    def take(self, slots: SlotBatch) -> tuple[Tensor, ...] | None:
        """Remove the tokens of the slots; return their values (b, N, …) and numbers (b,), or None if there are none."""
        most = self._most(slots)
        if most == 0:
            return None
        ((_, width),) = catch_up_widths(most)
        taken = (*(memory[slots.index][:, :width] for memory in self.values), self.count[slots.index])
        self._set_empty(slots)
        return taken

    def _most(self, slots: SlotBatch) -> int:
        return max([self.most[slot] for slot in slots.ids] or [0])

    def _set_empty(self, slots: SlotBatch) -> None:
        self.count.index_fill_(0, slots.index, 0)
        for slot in slots.ids:
            self.most[slot] = 0


class FeatureDrafter(Drafter):
    """Base of drafters that encode the target's features into an own KV cache: `open` makes `lanes` and `_missed`.

    State per slot: buffered tokens, and until prefill the prompt's prefill output with the first generated token (1,).
    """

    lanes: LaneModel
    _missed: MissedTokens
    _prompts: dict[int, tuple[PrefillOutput, Tensor]]

    @abstractmethod
    def _encode_prompts(self, unread: SlotBatch, prompts: Sequence[tuple[PrefillOutput, Tensor]]) -> None:
        """Encode prompts into the KV cache."""

    @abstractmethod
    def _encode_missed(self, slots: SlotBatch) -> None:
        """Encode and remove the buffered tokens."""

    def allocate(self) -> None:
        self.lanes.allocate()

    def admit(self, slots: SlotBatch, first: Tensor, prefill_outputs: Sequence[PrefillOutput]) -> None:
        self._prompts.update({slot: (prefill_outputs[i], first[i : i + 1]) for i, slot in enumerate(slots.ids)})
        self._missed.clear(slots)

    def prefill(self, slots: SlotBatch, prefixes: Sequence[list[Prefix]]) -> None:
        self._read(slots)

    def skip(self, slots: SlotBatch) -> None:
        self.lanes.empty(slots)
        self._missed.skip(slots)
        for slot in slots.ids:
            self._prompts.pop(slot, None)

    def _read(self, slots: SlotBatch) -> None:
        unread = slots.some([slot for slot in slots.ids if slot in self._prompts])
        if unread.ids:
            self._encode_prompts(unread, [self._prompts[slot] for slot in unread.ids])
            for slot in unread.ids:
                del self._prompts[slot]

    def _add_missed(self, slots: SlotBatch, *values: Tensor) -> None:
        """Buffer the token of a step without drafts; encode a full buffer."""
        if self._missed.add(slots, *values):
            self._read(slots)
            self._encode_missed(slots)

    def replay_key(self, slots: SlotBatch, num_levels: int) -> Hashable | None:
        """See `Drafter.replay_key`; steps that encode buffered tokens have none."""
        missed = self._missed
        if num_levels:
            return None if any(missed.most[slot] for slot in slots.ids) else self.lanes.replay_key(slots)
        # A step that runs again adds its token twice.
        has_room = all(missed.most[slot] + 2 < missed.limit for slot in slots.ids)
        return () if has_room and not missed.skipped.intersection(slots.ids) else None

    def replayed(self, slots: SlotBatch, num_levels: int) -> None:
        if num_levels == 0:
            self._missed.note(slots)
