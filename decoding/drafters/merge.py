"""Merges the lanes of one drafter to one distribution: a single lane is returned as it is, two may be guided as the
target's are, several are an ensemble."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from decoding.contracts import EngineSpec, Judgement
from decoding.tree import Verdict
from models.kv.lanes import SlotBatch


class Merge(Protocol):
    """R lanes in, one distribution out; a merge that `learns` receives the target's outputs."""

    learns: bool

    def open(self, spec: EngineSpec, num_lanes: int) -> None:
        """Make per-slot memory."""
        ...

    def reset(self, slots: SlotBatch) -> None:
        """Reset the state of the slots' former samples."""
        ...

    def merge(self, slots: SlotBatch, logits: Tensor, depth: int) -> Tensor:
        """Lane logits (b, R, F, V) at nodes of one `depth` → logits (b, F, V); a step begins at depth 0."""
        ...

    def learn(self, judgement: Judgement, verdict: Verdict, place: Tensor) -> None:
        """Observe a step: `place` (b, D + 1) is the merge order of each node of the path, −1 if it was not merged."""
        ...

    def extras(self, slot: int) -> dict[str, Any]:
        """Telemetry of the sample."""
        ...


class SingleLane:
    """One context, nothing to merge."""

    learns = False

    def open(self, spec: EngineSpec, num_lanes: int) -> None:
        assert num_lanes == 1, f"{num_lanes} lanes need an ensemble"

    def reset(self, slots: SlotBatch) -> None:
        pass

    def merge(self, slots: SlotBatch, logits: Tensor, depth: int) -> Tensor:
        return logits[:, 0]

    def learn(self, judgement: Judgement, verdict: Verdict, place: Tensor) -> None:
        pass

    def extras(self, slot: int) -> dict[str, Any]:
        return {}


class Guided:
    """Lanes with and without the condition, merged with the scale that the target's are merged with."""

    learns = False

    def open(self, spec: EngineSpec, num_lanes: int) -> None:
        assert spec.guidance is not None, "the engine gives no guidance"
        assert num_lanes == spec.num_lanes, f"{num_lanes} drafter lanes for a target of {spec.num_lanes}"
        self._guidance = spec.guidance

    def reset(self, slots: SlotBatch) -> None:
        pass

    def merge(self, slots: SlotBatch, logits: Tensor, depth: int) -> Tensor:
        return self._guidance.merge(slots, logits, torch.full_like(logits[:, 0, :, 0], depth, dtype=torch.long))

    def learn(self, judgement: Judgement, verdict: Verdict, place: Tensor) -> None:
        pass

    def extras(self, slot: int) -> dict[str, Any]:
        return {}
