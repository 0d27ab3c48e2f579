"""Planted faults of shared prefills: each must make its check fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from decoding import Engine, Method, Sampling
from decoding.acceptance import Exact
from decoding.drafters import NoDrafter
from decoding.scheduling.admission import Admission
from decoding.trees import Chain
from models.backends.cache import RaggedCache
from models.inputs import content
from models.inputs.prefix import Prefix
from models.kv import prefill, prefill_batching
from models.kv.lanes import LaneModel
from tests import toys
from tests.conformance import checks, heads, sharing

pytestmark = pytest.mark.slow

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
    patch.setattr(
        content.Content, "shown", classmethod(lambda cls, images, videos, label=None: shown(cls, [], [], label))
    )


def states_are_those_of_the_first_prompt(patch: Patch) -> None:
    patch.setattr(prefill, "first_of_each", lambda prefixes: [0] * len(prefixes))


def a_request_is_lost_between_two_groups(patch: Patch) -> None:
    take = Admission.take

    def wrong(self: Admission, max_requests: int, **options: Any) -> Any:
        taken = take(self, max_requests, **options)
        if self.queue.waiting():
            self.queue.pop()
        return taken

    patch.setattr(Admission, "take", wrong)


def a_stem_is_one_column_too_long(patch: Patch) -> None:
    common = prefill_batching._common_length
    patch.setattr(
        prefill_batching,
        "_common_length",
        lambda some: min(common(some) + 1, min(prefix.length for prefix in some) - 1),
    )


def _behind(patch: Patch, wrong: Callable[[list[Prefix], list[int]], tuple[list[Prefix], list[int]]]) -> None:
    run_behind = prefill.PromptReader._run_behind
    patch.setattr(
        prefill.PromptReader,
        "_run_behind",
        lambda self, rows, rests, starts: run_behind(self, rows, *wrong(list(rests), list(starts))),
    )


def what_follows_is_written_one_column_too_early(patch: Patch) -> None:
    _behind(patch, lambda rests, starts: (rests, [start - 1 for start in starts]))


def what_follows_is_at_positions_of_columns(patch: Patch) -> None:
    def counted(rests: list[Prefix], starts: list[int]) -> tuple[list[Prefix], list[int]]:
        columns = [start + torch.arange(rest.length) for rest, start in zip(rests, starts, strict=True)]
        return [
            replace(rest, positions=own.expand_as(rest.positions)) for rest, own in zip(rests, columns, strict=True)
        ], starts

    _behind(patch, counted)


def what_follows_does_not_see_the_stem(patch: Patch) -> None:
    inner = prefill.tree_mask
    patch.setattr(
        prefill,
        "tree_mask",
        lambda lens, visible, window: (
            inner(lens, visible, window) & (torch.arange(window) >= lens[:, None])[:, None, None]
        ),
    )


def stems_are_not_copied(patch: Patch) -> None:
    copy = prefill.PromptReader._copy
    patch.setattr(prefill.PromptReader, "_copy", lambda self, sources, places, n: copy(self, places, places, n))


def all_prompts_are_of_one_origin(patch: Patch) -> None:
    patch.setattr(Prefix, "of", lambda self, origin: of(self, "one"))


of = Prefix.of


def features_of_layers_may_come_later(patch: Patch) -> None:
    # Ignores features that layers add: the first words are a stem although an image follows.
    common = prefill_batching._common_length
    patch.setattr(
        prefill_batching, "_common_length", lambda some: common([replace(prefix, deepstack=()) for prefix in some])
    )


def pairs_of_all_samples_are_taken_for_the_firsts(patch: Patch) -> None:
    # The last pair contains the first token, which differs between samples.
    _behind(patch, lambda rests, starts: ([rests[0]] * len(rests), starts))


def states_of_the_stem_are_left_out(patch: Patch) -> None:
    follow = prefill.PromptReader._follow

    def wrong(self: Any, prefixes: Any, stems: Any) -> None:
        follow(self, prefixes, stems)
        for stem in stems:
            for place in stem.places:
                states = self.states.get(place)
                if states is not None:
                    self.states[place] = torch.cat([states[stem.length :], states[: stem.length]])

    patch.setattr(prefill.PromptReader, "_follow", wrong)


def outputs(family: str = "qwen2_5_vl") -> Callable[[], object]:
    return lambda: sharing.check_equal_prompts("sd-chain", family, 9, sharing.SAMPLED)


def questions(family: str = "qwen2_5_vl") -> Callable[[], object]:
    return lambda: sharing.check_questions("sd-chain", family, 9)


def pictures_alone_behind_a_stem() -> None:
    with sharing.small_savings():
        sharing.check_pictures_alone("llava")


def pictures_alone() -> None:
    sharing.check_pictures_alone("llava")


def memory_of_a_head() -> None:
    with sharing.small_savings():
        heads.check_memory("llama", "chain", 9, sharing.equal_prompts("llama", sampling=sharing.LIVELY))


def memory_of_one_prompt() -> None:
    # Without a longer prompt, whose positions would be copied as well.
    sharing.check_memory(
        "llava", wanted=sharing.equal_prompts("llava", 24, Sampling(ignore_eos=True))[1 :: sharing.NUM_PROMPTS]
    )


def bounded() -> None:
    method = Method(NoDrafter(), Chain(1), Exact())
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
    (a_stem_is_one_column_too_long, questions()),
    (what_follows_is_written_one_column_too_early, questions()),
    (what_follows_is_at_positions_of_columns, questions()),
    (what_follows_does_not_see_the_stem, questions()),
    (stems_are_not_copied, questions()),
    (all_prompts_are_of_one_origin, pictures_alone_behind_a_stem),
    (features_of_layers_may_come_later, lambda: sharing.check_picture_last("qwen3_vl")),
    (pairs_of_all_samples_are_taken_for_the_firsts, memory_of_a_head),
    (states_of_the_stem_are_left_out, lambda: sharing.check_states("qwen3_vl")),
]


@pytest.mark.parametrize(("fault", "check"), FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
def test_a_planted_fault_is_caught(fault: Callable[[Patch], None], check: Callable[[], object]) -> None:
    check()
    with pytest.MonkeyPatch.context() as patch:
        # Some faults are also found when a model is loaded; here the check must find them.
        patch.setattr("models.target.prove", lambda *_: None)
        fault(patch)
        try:
            check()
        except (AssertionError, IndexError, RuntimeError):
            return
    pytest.fail(f"the check passes although {fault.__name__.replace('_', ' ')}")
