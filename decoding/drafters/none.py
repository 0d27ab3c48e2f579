"""The drafter that proposes nothing: plain decoding is the engine's one loop with this drafter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from decoding.contracts import EngineSpec, Judgement, Probe
from decoding.tree import Frontier, Verdict
from decoding.types import Request
from models.inputs.prefix import Prefix
from models.kv.lanes import SlotBatch


class NoDrafter:
    """Proposes nothing, remembers nothing."""

    name = "none"
    num_forwards = 0
    needs_hidden = False
    needs_attention = False

    def open(self, spec: EngineSpec) -> None:
        pass

    def prefixes(self, request: Request, probe: Probe) -> list[Prefix]:
        return []

    def admit(self, slots: SlotBatch, first: Tensor, probes: Sequence[Probe]) -> None:
        pass

    def prefill(self, slots: SlotBatch, prefixes: Sequence[list[Prefix]]) -> None:
        pass

    def skip(self, slots: SlotBatch) -> None:
        pass

    def draft(self, slots: SlotBatch, frontier: Frontier) -> Tensor:
        raise AssertionError("the engine asked the drafter 'none' for drafts")

    def commit(self, judgement: Judgement, verdict: Verdict) -> None:
        pass

    def extras(self, slot: int) -> dict[str, Any]:
        return {}
