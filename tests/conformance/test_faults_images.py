"""Planted faults of guided image decoding: each must make its check fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import models.kv.prefill as reading
import models.llamagen.rotary as rotary
from decoding.drafters.merge import Guided
from decoding.guidance import Guidance
from tests.conformance import images as contract
from tests.conformance import planted, test_images
from tests.conformance.planted import Patch

pytestmark = pytest.mark.slow


def padding_is_attended(patch: Patch) -> None:
    mask = reading.mask_padding
    patch.setattr(reading, "mask_padding", lambda padding: mask(torch.zeros_like(padding)))


def lanes_are_swapped(patch: Patch) -> None:
    merge = Guidance.merge
    patch.setattr(Guidance, "merge", lambda self, slots, logits, depth: merge(self, slots, logits.flip(1), depth))


def interval_counts_steps_instead_of_nodes(patch: Patch) -> None:
    merge = Guidance.merge
    patch.setattr(Guidance, "merge", lambda self, slots, logits, depth: merge(self, slots, logits, 0 * depth))


def refill_keeps_the_old_scale(patch: Patch) -> None:
    occupy = Guidance.occupy

    def once(self: Any, slot: int, sampling: Any) -> None:
        if self._scale[slot] == 1.0:
            occupy(self, slot, sampling)

    patch.setattr(Guidance, "occupy", once)


def rows_and_columns_of_the_image_are_swapped(patch: Patch) -> None:
    forward = rotary.GridRotary.forward

    def swapped(self: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        position = position_ids - self.num_condition_tokens
        turned = position % self.grid * self.grid + position // self.grid + self.num_condition_tokens
        return forward(self, x, torch.where(position >= 0, turned, position_ids))

    patch.setattr(rotary.GridRotary, "forward", swapped)


def drafter_is_not_guided(patch: Patch) -> None:
    patch.setattr(Guided, "merge", lambda self, slots, logits, depth: logits[:, 0])


def drafter_is_guided_one_code_late(patch: Patch) -> None:
    merge = Guided.merge
    patch.setattr(Guided, "merge", lambda self, slots, logits, depth: merge(self, slots, logits, depth - 1))


def equal(
    method: str = "eagle2", kind: str = "text", mode: str = "sampled-guided", count: int = 5
) -> Callable[[], object]:
    return lambda: contract.check_equal(method, kind, 3, mode, count)


def walked(kind: str = "text") -> Callable[[], object]:
    return lambda: test_images.test_all_drafts_of_an_exact_drafter_are_accepted_to_the_last_code(kind)


def interval_of_drafts() -> None:
    test_images.test_the_drafter_stops_being_guided_with_its_target()


FAULTS: list[planted.Fault] = [
    (padding_is_attended, equal()),
    (lanes_are_swapped, equal()),
    (interval_counts_steps_instead_of_nodes, equal("sd-chain", mode="sampled-interval")),
    (refill_keeps_the_old_scale, equal(count=9)),
    (rows_and_columns_of_the_image_are_swapped, equal()),
    (drafter_is_not_guided, walked("class")),
    (drafter_is_guided_one_code_late, interval_of_drafts),
]


@planted.each(FAULTS)
def test_a_planted_fault_is_caught(fault: planted.Plant, check: planted.Check) -> None:
    planted.assert_caught(fault, check)
