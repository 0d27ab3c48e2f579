"""Faults of shared prefills: each is planted, and the contract must notice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from decoding import Engine, Method, Sampling
from decoding.acceptance import Exact
from decoding.admission import Admission
from decoding.drafters import NoDrafter
from decoding.trees import chain
from models import content, lanes
from models.cache import RaggedCache
from models.lanes import LaneModel
from tests import toys
from tests.conformance import checks, sharing

Patch = pytest.MonkeyPatch


def the_wrong_row_is_copied(patch: Patch) -> None:
    copy = RaggedCache.copy
    patch.setattr(RaggedCache, "copy", lambda self, source, rows, n: copy(self, source.roll(1), rows, n))


def the_last_column_is_not_copied(patch: Patch) -> None:
    copy = RaggedCache.copy
    patch.setattr(RaggedCache, "copy", lambda self, source, rows, n: copy(self, source, rows, n - 1))


def a_copied_row_is_one_column_short(patch: Patch) -> None:
    def wrong(self: Any, slots: Any, prefixes: Any, *rest: Any, **more: Any) -> Any:
        filled = admit(self, slots, prefixes, *rest, **more)
        ids = [id(one) for some in prefixes for one in some]
        copies = [place for place, one in enumerate(ids) if ids.index(one) < place]
        self.cache.lens[self.rows(slots)[copies]] -= 1
        return filled

    admit = LaneModel.admit
    patch.setattr(LaneModel, "admit", wrong)


def the_offset_of_positions_is_not_copied(patch: Patch) -> None:
    def wrong(self: Any, slots: Any, prefixes: Any, *rest: Any, **more: Any) -> Any:
        filled = admit(self, slots, prefixes, *rest, **more)
        ids = [id(one) for some in prefixes for one in some]
        copies = [place for place, one in enumerate(ids) if ids.index(one) < place]
        self.delta[self.rows(slots)[copies]] = 0
        return filled

    admit = LaneModel.admit
    patch.setattr(LaneModel, "admit", wrong)


def all_prompts_are_taken_for_one(patch: Patch) -> None:
    patch.setattr(content.Content, "__eq__", lambda self, other: True)
    patch.setattr(content.Content, "__hash__", lambda self: 0)


def pictures_are_left_out_of_the_key(patch: Patch) -> None:
    shown = content.Content.shown.__func__  # type: ignore[attr-defined]
    patch.setattr(content.Content, "shown", classmethod(lambda cls, images, videos, label: shown(cls, [], [], label)))


def states_are_those_of_the_first_prompt(patch: Patch) -> None:
    patch.setattr(lanes, "first_of_each", lambda prefixes: [0] * len(prefixes))


def a_request_is_lost_between_two_groups(patch: Patch) -> None:
    take = Admission.take

    def wrong(self: Admission, max_requests: int) -> Any:
        taken = take(self, max_requests)
        if self.waiting:
            self.waiting.popleft()
        return taken

    patch.setattr(Admission, "take", wrong)


def outputs(family: str = "qwen2_5_vl") -> Callable[[], object]:
    return lambda: sharing.check_equal_prompts("sd-chain", family, 9, sharing.SAMPLED)


def pictures_alone() -> None:
    sharing.check_pictures_alone("llava")


def memory_of_one_prompt() -> None:
    # No other prompt is longer, whose columns would be copied along.
    sharing.check_memory(
        "llava", wanted=sharing.equal_prompts("llava", 24, Sampling(ignore_eos=True))[1 :: sharing.NUM_PROMPTS]
    )


def bounded() -> None:
    method = Method(NoDrafter(), chain(1), Exact())
    engine = Engine(toys.target("llama"), method, 9, 128, max_prefill_tokens=2)
    checks.run(engine, checks.requests("llama", 9))


FAULTS: list[tuple[Callable[[Patch], None], Callable[[], object]]] = [
    (the_wrong_row_is_copied, outputs()),
    (the_last_column_is_not_copied, memory_of_one_prompt),
    (a_copied_row_is_one_column_short, outputs()),
    (the_offset_of_positions_is_not_copied, outputs()),
    (all_prompts_are_taken_for_one, outputs()),
    (pictures_are_left_out_of_the_key, pictures_alone),
    (states_are_those_of_the_first_prompt, outputs()),
    (a_request_is_lost_between_two_groups, bounded),
]


@pytest.mark.parametrize(("fault", "check"), FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
def test_a_planted_fault_is_caught(fault: Callable[[Patch], None], check: Callable[[], object]) -> None:
    check()
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        try:
            check()
        except (AssertionError, IndexError, RuntimeError):
            return
    pytest.fail(f"the check passes although {fault.__name__.replace('_', ' ')}")
