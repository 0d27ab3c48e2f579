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
from tests import toys
from tests.conformance import checks, heads, planted, sharing
from tests.conformance.planted import Patch

pytestmark = pytest.mark.slow


def the_wrong_row_is_copied(patch: Patch) -> None:
    copy = RaggedCache.copy
    patch.setattr(RaggedCache, "copy", lambda self, source, rows, n: copy(self, source.roll(1), rows, n))


def the_last_column_is_not_copied(patch: Patch) -> None:
    copy = RaggedCache.copy
    patch.setattr(RaggedCache, "copy", lambda self, source, rows, n: copy(self, source, rows, n - 1))


def images_are_not_part_of_the_key(patch: Patch) -> None:
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


def tokens_after_the_stem_have_positions_of_columns(patch: Patch) -> None:
    def counted(rests: list[Prefix], starts: list[int]) -> tuple[list[Prefix], list[int]]:
        columns = [start + torch.arange(rest.length) for rest, start in zip(rests, starts, strict=True)]
        return [
            replace(rest, positions=own.expand_as(rest.positions)) for rest, own in zip(rests, columns, strict=True)
        ], starts

    _behind(patch, counted)


def stems_are_not_copied(patch: Patch) -> None:
    copy = prefill.PromptReader._copy
    patch.setattr(prefill.PromptReader, "_copy", lambda self, sources, targets, n: copy(self, targets, targets, n))


of = Prefix.of


def a_stem_precedes_features_that_are_added_in_layers(patch: Patch) -> None:
    # Ignores features that layers add: the first words are a stem although an image follows.
    common = prefill_batching._common_length
    patch.setattr(
        prefill_batching, "_common_length", lambda some: common([replace(prefix, deepstack=()) for prefix in some])
    )


def pairs_of_all_samples_are_taken_for_the_firsts(patch: Patch) -> None:
    # The last pair contains the first token, which differs between samples.
    _behind(patch, lambda rests, starts: ([rests[0]] * len(rests), starts))


def outputs(family: str = "qwen2_5_vl") -> Callable[[], object]:
    return lambda: sharing.check_equal_prompts("sd-chain", family, 9, sharing.SAMPLED)


def questions(family: str = "qwen2_5_vl") -> Callable[[], object]:
    return lambda: sharing.check_questions("sd-chain", family, 9)


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


FAULTS: list[planted.Fault] = [
    (the_wrong_row_is_copied, outputs()),
    (the_last_column_is_not_copied, memory_of_one_prompt),
    (images_are_not_part_of_the_key, pictures_alone),
    (states_are_those_of_the_first_prompt, outputs()),
    (a_request_is_lost_between_two_groups, bounded),
    (a_stem_is_one_column_too_long, questions()),
    (tokens_after_the_stem_have_positions_of_columns, questions()),
    (stems_are_not_copied, questions()),
    (a_stem_precedes_features_that_are_added_in_layers, lambda: sharing.check_picture_last("qwen3_vl")),
    (pairs_of_all_samples_are_taken_for_the_firsts, memory_of_a_head),
]


@planted.each(FAULTS)
def test_a_planted_fault_is_caught(fault: planted.Plant, check: planted.Check) -> None:
    planted.assert_caught(fault, check)
