"""Samples of one prompt that are admitted together share one prefill."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from torch import Tensor

from decoding import Sampling
from models.inputs.prefix import Prefix
from models.kv.prefill import PromptReader
from tests.conformance import heads, sharing
from tests.conformance.methods import EVERY, VISUAL
from tests.conformance.sharing import LIVELY, NUM_PROMPTS, SAMPLED

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("family", EVERY)
def test_samples_of_one_prompt_are_prefilled_once_and_equal_generate(family: str) -> None:
    assert sharing.check_equal_prompts("sd-chain", family, slots=9) == NUM_PROMPTS


@pytest.mark.parametrize("method", ["plain", "sd-tree", "specvlm", "tabed", "sd-pooled", "lvspec-zero", "sd-text"])
def test_sampled_outputs_of_one_prompt_are_each_seeds_own(method: str) -> None:
    assert sharing.check_equal_prompts(method, "qwen2_5_vl", 9, SAMPLED) == NUM_PROMPTS


@pytest.mark.parametrize("method", ["eagle", "medusa", "lookup", "dynamic"])
def test_drafters_that_read_the_targets_prefill_follow_every_sample(method: str) -> None:
    assert sharing.check_equal_prompts(method, "llama", 9, SAMPLED) == NUM_PROMPTS


def test_prefills_are_shared_also_if_slots_become_free_one_by_one() -> None:
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


@pytest.mark.parametrize("family", EVERY)
def test_questions_about_one_image_share_what_comes_before_them_and_equal_generate(family: str) -> None:
    read = sharing.check_questions("sd-chain", family, 9)
    # Texts have no media that distinguish samples, so they share one prompt or none.
    assert (read.whole, read.behind) == ((2, 9) if family in VISUAL else (1, 9))


@pytest.mark.parametrize("family", VISUAL)
def test_rows_and_states_behind_a_stem_are_those_of_a_whole_prompt(family: str) -> None:
    assert sharing.check_states(family) == 9


def test_prompts_whose_features_are_added_in_layers_are_prefilled_without_a_stem() -> None:
    sharing.check_picture_last("qwen3_vl")


@pytest.mark.parametrize("method", ["plain", "sd-tree", "tabed", "lvspec-zero"])
def test_sampled_answers_behind_a_stem_are_each_seeds_own(method: str) -> None:
    assert sharing.check_questions(method, "qwen3_vl", 9, SAMPLED).behind == 9


def test_prompts_whose_attention_is_probed_are_run_whole() -> None:
    read = sharing.check_questions("specvlm", "qwen2_5_vl", 9)
    assert (read.whole, read.behind) == (9, 0)


@pytest.mark.parametrize("method", ["eagle", "medusa"])
def test_heads_receive_the_states_of_shared_and_other_prompt_tokens(method: str) -> None:
    assert sharing.check_questions(method, "llama", 9, SAMPLED).behind == 9


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_memory_behind_a_stem_stays_that_of_a_prefill_of_ones_own(family: str) -> None:
    with sharing.small_savings():
        sharing.check_memory(family, wanted=sharing.questions(family, Sampling(ignore_eos=True)))


@pytest.mark.parametrize(
    ("method", "family"),
    [("eagle", "llama"), ("vispec", "llava"), ("medusa", "llama"), ("tabed", "llava"), ("sd-pooled", "qwen3_vl")],
)
def test_drafters_that_share_prompts_and_stems_draft_as_they_do_alone(method: str, family: str) -> None:
    sharing.check_drafts(method, family, sharing.equal_prompts(family, sampling=LIVELY))
    sharing.check_drafts(method, family, sharing.questions(family, LIVELY))


def test_a_head_reads_the_pairs_of_one_prompt_once_and_each_samples_last_one() -> None:
    with sharing.small_savings(), pytest.MonkeyPatch.context() as patch:
        behind = []
        inner = PromptReader._run_behind

        def noted(self: PromptReader, rows: Tensor, rests: Sequence[Prefix], starts: Sequence[int]) -> Tensor:
            behind.append([rest.length for rest in rests])
            return inner(self, rows, rests, starts)

        patch.setattr(PromptReader, "_run_behind", noted)
        heads.check_memory("llama", "chain", 9, sharing.equal_prompts("llama", sampling=LIVELY))
    assert behind == [[1] * 9]
