"""Merges the lanes of one drafter into one distribution over the target's vocabulary."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from decoding.contracts import EngineSpec, VerificationOutput
from decoding.tree import AcceptanceResult
from models.kv.lanes import SlotBatch


class Merge(ABC):
    """Interface that merges R lanes into one distribution. Only `ModelDrafter` calls `reset`, `learn` and `extras`."""

    learns: bool = False

    def open(self, spec: EngineSpec, num_lanes: int) -> None:
        """Allocate per-slot state."""

    def reset(self, slots: SlotBatch) -> None:
        """Reset the state of the slots."""

    @abstractmethod
    def merge(self, slots: SlotBatch, logits: Tensor, depth: int) -> Tensor:
        """Merge lane logits (b, R, F, V) at nodes of one `depth` into logits (b, F, V); a step begins at depth 0."""

    def learn(self, verification: VerificationOutput, result: AcceptanceResult, merge_index: Tensor) -> None:
        """Update per-slot state from a verified step. `merge_index` (b, D + 1) has, for each node of `result.path`, its
        index among all nodes passed to `merge` in this step, in call order (0: the root); −1 for nodes not passed."""

    def extras(self, slot: int) -> dict[str, Any]:
        """Return telemetry extras of the sample."""
        return {}


class SingleLane(Merge):
    """Merge of a single lane: returns its logits."""

    def open(self, spec: EngineSpec, num_lanes: int) -> None:
        assert num_lanes == 1, f"{num_lanes} lanes need an ensemble"

    def merge(self, slots: SlotBatch, logits: Tensor, depth: int) -> Tensor:
        return logits[:, 0]


class Guided(Merge):
    """Merge of a conditional and an unconditional lane with the target's guidance scale."""

    def open(self, spec: EngineSpec, num_lanes: int) -> None:
        assert spec.guidance is not None, "the engine gives no guidance"
        assert num_lanes == spec.num_lanes, f"{num_lanes} drafter lanes for a target of {spec.num_lanes}"
        self._guidance = spec.guidance

    def merge(self, slots: SlotBatch, logits: Tensor, depth: int) -> Tensor:
        return self._guidance.merge(slots, logits, torch.full_like(logits[:, 0, :, 0], depth, dtype=torch.long))


def to_vocabulary(logits: Tensor, vocab_size: int) -> Tensor:
    """Truncate or pad logits (…, V') to the target's vocabulary size V; tokens missing in the drafter get −inf."""
    missing = vocab_size - logits.shape[-1]
    if missing > 0:
        return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
    return logits[..., :vocab_size] if missing else logits
