"""Wraps a drafter so that it fails on some samples: it returns NaN or infinity as logits, or raises."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from decoding import Engine, Request
from decoding.contracts import Drafter, EngineSpec, PrefillOutput, VerificationOutput
from decoding.tree import AcceptanceResult, Frontier
from models.inputs.prefix import Prefix
from models.inputs.prompt_prefetch import Prompt
from models.kv.lanes import SlotBatch


class FailingDrafter:
    """Wraps `inner` and fails on samples for which `is_sick(request)` is true, from tree level `from_level` on.

    With `value`, it returns this value in place of logits; otherwise it raises `error` in the method `raises_in`.
    """

    def __init__(
        self,
        inner: Drafter,
        is_sick: Callable[[Request], bool],
        value: float | None = None,
        from_level: int = 0,
        raises_in: str = "draft",
        error: type[Exception] = IndexError,
    ) -> None:
        self.inner = inner
        self.name = inner.name
        self.num_forwards = 0
        self.feature_layers, self.needs_attention = inner.feature_layers, inner.needs_attention
        self.shares_cache = inner.shares_cache
        self.is_sick, self.value, self.from_level = is_sick, value, from_level
        self.raises_in, self.error = raises_in, error
        self.engine: Engine | None = None
        self.struck: set[str] = set()

    def _sick(self, slots: SlotBatch) -> list[bool]:
        assert self.engine is not None
        requests = [self.engine._slots.at(slot).request for slot in slots.ids]
        return [self.is_sick(request) for request in requests]

    def _strike(self, where: str, slots: SlotBatch) -> None:
        if self.value is None and where == self.raises_in and any(self._sick(slots)):
            raise self.error("index 7 is out of range")

    def _strike_alone(self, where: str, request: Request) -> None:
        if self.value is None and where == self.raises_in and self.is_sick(request):
            raise self.error("index 7 is out of range")

    def open(self, spec: EngineSpec) -> None:
        self.inner.open(spec)

    def encoded_ahead(self, prompts: Sequence[Prompt]) -> AbstractContextManager[None]:
        return self.inner.encoded_ahead(prompts)

    def prefixes(self, request: Request, prefill_output: PrefillOutput) -> list[Prefix]:
        self._strike_alone("prefixes", request)
        return self.inner.prefixes(request, prefill_output)

    def admit(self, slots: SlotBatch, first: Tensor, prefill_outputs: Sequence[PrefillOutput]) -> None:
        self._strike("admit", slots)
        self.inner.admit(slots, first, prefill_outputs)

    def prefill(self, slots: SlotBatch, prefixes: Sequence[list[Prefix]]) -> None:
        self._strike("prefill", slots)
        self.inner.prefill(slots, prefixes)

    def skip(self, slots: SlotBatch) -> None:
        self.inner.skip(slots)

    def draft(self, slots: SlotBatch, frontier: Frontier) -> Tensor:
        self._strike("draft", slots)
        logits = self.inner.draft(slots, frontier)
        sick = self._sick(slots)
        if self.value is None or frontier.depth < self.from_level or not any(sick):
            return logits
        assert self.engine is not None
        self.struck |= {
            self.engine._slots.at(slot).request.sample_id for slot, ill in zip(slots.ids, sick, strict=True) if ill
        }
        logits = logits.clone()
        logits[torch.tensor(sick)] = self.value
        return logits

    def commit(self, verification: VerificationOutput, result: AcceptanceResult) -> None:
        self._strike("commit", verification.slots)
        self.inner.commit(verification, result)

    def finished(self, token_ids: Sequence[int]) -> None:
        if self.raises_in == "finished":
            raise self.error("index 7 is out of range")
        self.inner.finished(token_ids)

    def extras(self, slot: int) -> dict[str, Any]:
        return self.inner.extras(slot)
