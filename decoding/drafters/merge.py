"""Merges the lanes of one drafter into one distribution over the target's vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from decoding.contracts import EngineSpec, Judgement
from decoding.tree import Verdict
from models.kv.lanes import SlotBatch


class Merge:
    """R lanes in, one distribution out; a merge that `learns` receives the target's outputs."""

    learns: bool = False

    def open(self, spec: EngineSpec, num_lanes: int) -> None:
        """Allocate per-slot state."""

    def reset(self, slots: SlotBatch) -> None:
        """Reset the state of the slots."""

    def merge(self, slots: SlotBatch, logits: Tensor, depth: int) -> Tensor:
        """Lane logits (b, R, F, V) at nodes of one `depth` → logits (b, F, V); a step begins at depth 0."""
        raise NotImplementedError

    def learn(self, judgement: Judgement, verdict: Verdict, place: Tensor) -> None:
        """Observe a step: `place` (b, D + 1) is the merge order of each node of the path, −1 if it was not merged."""

    def extras(self, slot: int) -> dict[str, Any]:
        """Telemetry of the sample."""
        return {}


class SingleLane(Merge):
    """One context, nothing to merge."""

    def open(self, spec: EngineSpec, num_lanes: int) -> None:
        assert num_lanes == 1, f"{num_lanes} lanes need an ensemble"

    def merge(self, slots: SlotBatch, logits: Tensor, depth: int) -> Tensor:
        return logits[:, 0]


class Guided(Merge):
    """Lanes with and without the condition, merged with the target's scale."""

    def open(self, spec: EngineSpec, num_lanes: int) -> None:
        assert spec.guidance is not None, "the engine gives no guidance"
        assert num_lanes == spec.num_lanes, f"{num_lanes} drafter lanes for a target of {spec.num_lanes}"
        self._guidance = spec.guidance

    def merge(self, slots: SlotBatch, logits: Tensor, depth: int) -> Tensor:
        return self._guidance.merge(slots, logits, torch.full_like(logits[:, 0, :, 0], depth, dtype=torch.long))


def to_vocabulary(logits: Tensor, vocab_size: int) -> Tensor:
    """Cut or fill (…, V') logits to the target's V; tokens that the drafter does not have get −inf."""
    missing = vocab_size - logits.shape[-1]
    if missing > 0:
        return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
    return logits[..., :vocab_size] if missing else logits
