"""How the lanes of one drafter become one distribution: a single lane is itself, several are an ensemble.

Knows nothing of contexts or trees.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from decoding.contracts import EngineSpec, Judgement
from decoding.tree import Verdict
from models.lanes import SlotBatch


class Merge(Protocol):
    """R lanes in, one distribution out; may learn from what the target said."""

    def open(self, spec: EngineSpec, num_lanes: int) -> None:
        """Make per-slot memory."""
        ...

    def reset(self, slots: SlotBatch) -> None:
        """Forget what was learned from the slots' former samples."""
        ...

    def merge(self, slots: SlotBatch, logits: Tensor, first: bool) -> Tensor:
        """Lane logits (b, R, F, V) → logits (b, F, V); `first` marks a step's first level."""
        ...

    def learn(self, judgement: Judgement, verdict: Verdict, place: Tensor) -> None:
        """Follow a step: `place` (b, D + 1) says as how many-th node each node of the path was merged, −1 for never."""
        ...

    def extras(self, slot: int) -> dict[str, Any]:
        """What the sample's telemetry should say."""
        ...


class SingleLane:
    """One context, nothing to merge."""

    def open(self, spec: EngineSpec, num_lanes: int) -> None:
        assert num_lanes == 1, f"{num_lanes} lanes need an ensemble"

    def reset(self, slots: SlotBatch) -> None:
        pass

    def merge(self, slots: SlotBatch, logits: Tensor, first: bool) -> Tensor:
        return logits[:, 0]

    def learn(self, judgement: Judgement, verdict: Verdict, place: Tensor) -> None:
        pass

    def extras(self, slot: int) -> dict[str, Any]:
        return {}
