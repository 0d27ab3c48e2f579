"""Planted faults of guided image decoding: each must make its check fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import models.kv.prefill as reading
import models.llamagen.rotary as rotary
import models.llamagen.target as target_module
from decoding.drafters.merge import Guided
from decoding.guidance import Guidance
from models.inputs.prefix import Prefix
from models.kv.lanes import LaneModel
from models.llamagen.target import LlamaGenTarget
from tests.conformance import images as contract
from tests.conformance import test_images

pytestmark = pytest.mark.slow

Patch = pytest.MonkeyPatch


def padding_is_seen(patch: Patch) -> None:
    mask = reading.mask_padding
    patch.setattr(reading, "mask_padding", lambda padding: mask(torch.zeros_like(padding)))


def padding_stays_in_memory(patch: Patch) -> None:
    patch.setattr(Prefix, "num_kept", property(lambda self: self.length))
    patch.setattr(reading, "stack_padding", lambda flat: None)


def null_lane_sees_all_its_columns(patch: Patch) -> None:
    encode = LlamaGenTarget.encode_lanes

    def whole(self: Any, *asked: Any) -> list[Prefix]:
        first, *rest = encode(self, *asked)
        return [first, *(replace(lane, padding=None, num_padding=0) for lane in rest)]

    patch.setattr(LlamaGenTarget, "encode_lanes", whole)


def lanes_are_swapped(patch: Patch) -> None:
    merge = Guidance.merge
    patch.setattr(Guidance, "merge", lambda self, slots, logits, depth: merge(self, slots, logits.flip(1), depth))


def interval_ends_one_code_early(patch: Patch) -> None:
    merge = Guidance.merge
    patch.setattr(Guidance, "merge", lambda self, slots, logits, depth: merge(self, slots, logits, depth + 1))


def interval_counts_steps_instead_of_nodes(patch: Patch) -> None:
    merge = Guidance.merge
    patch.setattr(Guidance, "merge", lambda self, slots, logits, depth: merge(self, slots, logits, 0 * depth))


def refill_keeps_the_old_scale(patch: Patch) -> None:
    occupy = Guidance.occupy

    def once(self: Any, slot: int, sampling: Any) -> None:
        if self._scale[slot] == 1.0:
            occupy(self, slot, sampling)

    patch.setattr(Guidance, "occupy", once)


def condition_positions_turn_by_nothing(patch: Patch) -> None:
    """Rows of ones instead of zeros: the identity, which the published weights were not trained with."""
    tables = rotary.GridRotary._tables

    def identity(self: Any) -> tuple[Tensor, Tensor]:
        cos, sin = tables(self)
        cos[: self.num_condition_tokens] = 1.0
        return cos, sin

    patch.setattr(rotary.GridRotary, "_tables", identity)


def rows_and_columns_of_the_image_are_swapped(patch: Patch) -> None:
    forward = rotary.GridRotary.forward

    def swapped(self: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        place = position_ids - self.num_condition_tokens
        turned = place % self.grid * self.grid + place // self.grid + self.num_condition_tokens
        return forward(self, x, torch.where(place >= 0, turned, position_ids))

    patch.setattr(rotary.GridRotary, "forward", swapped)


def codes_stand_one_position_too_far(patch: Patch) -> None:
    admit = LaneModel.admit

    def shifted(self: Any, slots: Any, *rest: Any, **options: Any) -> Any:
        out = admit(self, slots, *rest, **options)
        self.delta[self.rows(slots)] += 1
        return out

    patch.setattr(LaneModel, "admit", shifted)


def drafter_is_not_guided(patch: Patch) -> None:
    patch.setattr(Guided, "merge", lambda self, slots, logits, depth: logits[:, 0])


def drafter_is_guided_one_code_late(patch: Patch) -> None:
    merge = Guided.merge
    patch.setattr(Guided, "merge", lambda self, slots, logits, depth: merge(self, slots, logits, depth - 1))


def both_lanes_read_the_first_lanes_prompt(patch: Patch) -> None:
    encode = LlamaGenTarget.encode_lanes
    patch.setattr(target_module.LlamaGenTarget, "encode_lanes", lambda self, *asked: [encode(self, *asked)[0]] * 2)


def equal(
    method: str = "eagle2", kind: str = "text", mode: str = "sampled-guided", count: int = 5
) -> Callable[[], object]:
    return lambda: contract.check_equal(method, kind, 3, mode, count)


def walked(kind: str = "text") -> Callable[[], object]:
    return lambda: test_images.test_trees_of_a_drafter_that_knows_the_target_are_walked_to_the_last_code(kind)


def interval_of_drafts() -> None:
    test_images.test_the_drafter_stops_being_guided_with_its_target()


FAULTS: list[tuple[Callable[[Patch], None], Callable[[], object]]] = [
    (padding_is_seen, equal()),
    (padding_stays_in_memory, equal()),
    (null_lane_sees_all_its_columns, equal()),
    (lanes_are_swapped, equal()),
    (interval_ends_one_code_early, equal(mode="sampled-interval", count=8)),
    (interval_counts_steps_instead_of_nodes, equal("sd-chain", mode="sampled-interval")),
    (refill_keeps_the_old_scale, equal(count=9)),
    (condition_positions_turn_by_nothing, equal()),
    (rows_and_columns_of_the_image_are_swapped, equal()),
    (codes_stand_one_position_too_far, equal(kind="class")),
    (drafter_is_not_guided, walked("class")),
    (drafter_is_guided_one_code_late, interval_of_drafts),
    (both_lanes_read_the_first_lanes_prompt, equal(kind="class")),
]


@pytest.mark.parametrize(("fault", "check"), FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
def test_a_planted_fault_is_caught(
    fault: Callable[[Patch], None], check: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    try:
        check()
    except (AssertionError, IndexError):
        return
    pytest.fail(f"the check passes although {fault.__name__.replace('_', ' ')}")


@pytest.mark.parametrize("place", range(len(FAULTS)), ids=[fault.__name__ for fault, _ in FAULTS])
def test_the_same_check_passes_without_the_fault(place: int) -> None:
    FAULTS[place][1]()
