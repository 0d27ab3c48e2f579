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
from models.heads.vision import ImageAdaptor, MsdNetwork, VispecNetwork
from tests.conformance import heads

pytestmark = pytest.mark.slow

Patch = pytest.MonkeyPatch


def no_image_is_compressed(patch: Patch) -> None:
    """Image tokens are pairs of text, as for an EAGLE head."""
    patch.setattr(VispecNetwork, "pair", whole)


def whole(self: VispecNetwork, prompt: Any, features: Tensor) -> Any:
    pairs, _ = FeatureStack.pair(self, prompt, features)
    return pairs, features.new_zeros(self.summary_size)


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


def the_first_output_is_the_state_of_the_image(patch: Patch) -> None:
    forward = ImageAdaptor.forward
    patch.setattr(ImageAdaptor, "forward", lambda self, embeds: forward(self, embeds).roll(-1, 0))


def prompts_do_not_read_their_image(patch: Patch) -> None:
    """Only later pairs read its state."""
    pair = VispecNetwork.pair

    def apart(self: Any, prompt: Any, features: Tensor) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            fuse = VispecNetwork.fuse
            inner.setattr(VispecNetwork, "fuse", lambda self, embeds, features, _summary: fuse(self, embeds, features))
            return pair(self, prompt, features)

    patch.setattr(VispecNetwork, "pair", apart)


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


def a_slot_keeps_the_image_of_its_first_sample(patch: Patch) -> None:
    read = EagleDrafter._read
    seen: dict[int, set[int]] = {}

    def stale(self: Any, slots: Any) -> None:
        known = seen.setdefault(id(self), set())
        kept = self._summaries.clone()
        unread = [slot for slot in slots.ids if slot in self._prompts]
        read(self, slots)
        for slot in unread:
            if slot in known:
                self._summaries[slot] = kept[slot]
            known.add(slot)

    patch.setattr(EagleDrafter, "_read", stale)


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


def tokens_after_an_image_are_not_fused(patch: Patch) -> None:
    """The mask of visual tokens is one token late."""
    pair = MsdNetwork.pair
    patch.setattr(
        MsdNetwork,
        "pair",
        lambda self, prompt, features: pair(self, replace(prompt, visual=prompt.visual.roll(1)), features),
    )


def memory(kind: str, family: str = "llava") -> Callable[[], None]:
    return lambda: heads.check_memory(family, "chain", kind=kind)


def drafts(kind: str) -> Callable[[], None]:
    return lambda: heads.check_drafts(kind, "llava", "dynamic")


FAULTS: list[tuple[Callable[[Patch], None], Callable[[], None]]] = [
    (no_image_is_compressed, memory("vispec")),
    (rows_take_the_positions_of_the_compressed_sequence, memory("vispec", "qwen2_5_vl")),
    (rows_take_the_first_positions_of_the_image, memory("vispec")),
    (the_first_output_is_the_state_of_the_image, memory("vispec")),
    (prompts_do_not_read_their_image, memory("vispec")),
    (later_pairs_do_not_read_the_image, memory("vispec")),
    (drafted_pairs_do_not_read_the_image, drafts("vispec")),
    (a_slot_keeps_the_image_of_its_first_sample, memory("vispec")),
    (a_slot_reads_the_image_of_its_neighbour, memory("vispec")),
    (image_embeddings_are_fused_with_features, memory("msd")),
    (tokens_after_an_image_are_not_fused, memory("msd", "qwen2_5_vl")),
]


@pytest.mark.parametrize(("fault", "check"), FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
def test_a_planted_fault_is_caught(
    fault: Callable[[Patch], None], check: Callable[[], None], monkeypatch: Patch
) -> None:
    check()
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        check()


def test_a_wrong_head_does_not_change_the_output(monkeypatch: Patch) -> None:
    a_slot_reads_the_image_of_its_neighbour(monkeypatch)
    rows_take_the_first_positions_of_the_image(monkeypatch)
    heads.check_greedy("vispec", "llava", "dynamic", 4)
