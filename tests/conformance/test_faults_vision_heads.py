"""Planted faults of ViSpec and MSD heads: each must make its check fail; none changes lossless output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from decoding.drafters import EagleDrafter
from models.heads.eagle import FeatureStack
from models.heads.vision import MsdNetwork, VispecNetwork
from tests.conformance import heads, planted
from tests.conformance.planted import Patch

pytestmark = pytest.mark.slow


def rows_take_the_positions_of_the_compressed_sequence(patch: Patch) -> None:
    pair = VispecNetwork.pair

    def renumbered(self: Any, prompt: Any, features: Tensor) -> Any:
        pairs, summary = pair(self, prompt, features)
        return replace(pairs, positions=torch.arange(pairs.length)), summary

    patch.setattr(VispecNetwork, "pair", renumbered)


def rows_take_the_first_positions_of_the_image(patch: Patch) -> None:
    pair = VispecNetwork.pair

    def early(self: Any, prompt: Any, features: Tensor) -> Any:
        pairs, summary = pair(self, prompt, features)
        moved = prompt.visual[pairs.positions]
        start = prompt.visual.int().argmax()
        positions = torch.where(moved, start + moved.cumsum(0) - 1, pairs.positions)
        return replace(pairs, positions=positions), summary

    patch.setattr(VispecNetwork, "pair", early)


def later_pairs_do_not_read_the_image(patch: Patch) -> None:
    pair = VispecNetwork.pair

    def forgotten(self: Any, prompt: Any, features: Tensor) -> Any:
        pairs, summary = pair(self, prompt, features)
        return pairs, torch.zeros_like(summary)

    patch.setattr(VispecNetwork, "pair", forgotten)


def drafted_pairs_do_not_read_the_image(patch: Patch) -> None:
    """Pairs with the target's features do."""
    extend = EagleDrafter._extend

    def blind(self: Any, slots: Any, frontier: Any) -> Tensor:
        kept, self._summaries = self._summaries, torch.zeros_like(self._summaries)
        outputs = extend(self, slots, frontier)
        self._summaries = kept
        return outputs

    patch.setattr(EagleDrafter, "_extend", blind)


def a_slot_reads_the_image_of_its_neighbour(patch: Patch) -> None:
    read = EagleDrafter._read

    def swapped(self: Any, slots: Any) -> None:
        before = len(self._prompts)
        read(self, slots)
        if before:
            self._summaries = self._summaries.roll(1, 0)

    patch.setattr(EagleDrafter, "_read", swapped)


def image_embeddings_are_fused_with_features(patch: Patch) -> None:
    patch.setattr(MsdNetwork, "pair", FeatureStack.pair)


def memory(kind: str, family: str = "llava") -> Callable[[], None]:
    return lambda: heads.check_memory(family, "chain", kind=kind)


def drafts(kind: str) -> Callable[[], None]:
    return lambda: heads.check_drafts(kind, "llava", "dynamic")


FAULTS: list[planted.Fault] = [
    (rows_take_the_positions_of_the_compressed_sequence, memory("vispec", "qwen2_5_vl")),
    (rows_take_the_first_positions_of_the_image, memory("vispec")),
    (later_pairs_do_not_read_the_image, memory("vispec")),
    (drafted_pairs_do_not_read_the_image, drafts("vispec")),
    (a_slot_reads_the_image_of_its_neighbour, memory("vispec")),
    (image_embeddings_are_fused_with_features, memory("msd")),
]


@planted.each(FAULTS)
def test_a_planted_fault_is_caught(fault: planted.Plant, check: planted.Check) -> None:
    planted.assert_caught(fault, check)


def test_a_wrong_head_does_not_change_the_output(monkeypatch: Patch) -> None:
    a_slot_reads_the_image_of_its_neighbour(monkeypatch)
    rows_take_the_first_positions_of_the_image(monkeypatch)
    heads.check_greedy("vispec", "llava", "dynamic", 4)
