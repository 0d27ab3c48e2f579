"""Samples of one prompt that are admitted together: one prefill, the outputs of many."""

from __future__ import annotations

import pytest

from tests.conformance import sharing
from tests.conformance.methods import EVERY
from tests.conformance.sharing import NUM_PROMPTS, SAMPLED


@pytest.mark.parametrize("family", EVERY)
def test_samples_of_one_prompt_are_prefilled_once_and_equal_generate(family: str) -> None:
    assert sharing.check_equal_prompts("sd-chain", family, slots=9) == NUM_PROMPTS


@pytest.mark.parametrize("method", ["plain", "sd-tree", "specvlm", "tabed", "sd-pooled", "lvspec-zero", "sd-text"])
def test_sampled_outputs_of_one_prompt_are_each_seeds_own(method: str) -> None:
    assert sharing.check_equal_prompts(method, "qwen2_5_vl", 9, SAMPLED) == NUM_PROMPTS


@pytest.mark.parametrize("method", ["eagle", "medusa", "lookup", "dynamic"])
def test_drafters_that_read_the_targets_prefill_follow_every_sample(method: str) -> None:
    assert sharing.check_equal_prompts(method, "llama", 9, SAMPLED) == NUM_PROMPTS


def test_slots_that_fall_free_one_by_one_share_what_is_admitted_together() -> None:
    # Four slots: the first four samples have three prompts, and later ones come one or two at a time.
    assert NUM_PROMPTS < sharing.check_equal_prompts("sd-chain", "llava", 4) <= 9


@pytest.mark.parametrize("family", ["llava", "qwen3_vl"])
def test_copied_rows_hold_what_a_prefill_of_their_own_gives(family: str) -> None:
    sharing.check_memory(family)


@pytest.mark.parametrize("kind", ["text", "class"])
@pytest.mark.parametrize("method", ["plain", "sd-chain", "eagle2"])
def test_images_of_one_condition_are_prefilled_once_for_all_seeds(method: str, kind: str) -> None:
    # Two conditions with two lanes each.
    assert sharing.check_images(method, kind) == 4
