"""MTP layers: the output equals the target's, and drafts equal those of transformers' own layer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from decoding import Sampling
from decoding.acceptance import Rejection
from decoding.trees import DynamicTree
from tests.conformance import checks, mtp
from tests.covering import tiers

MIXED = Sampling(temperature=0.9, top_k=20, top_p=0.9, repetition_penalty=1.3)
PATTERNS = {"always": [], "paused": [0, 2, 0, 0, 4, 1, 0, 0, 0], "late": [0, 0, 0, 0, 0, 3]}


@pytest.fixture(autouse=True)
def families() -> Iterator[None]:
    with mtp.mixtures():
        yield


def test_drafts_of_a_prompt_with_images_equal_those_of_transformers_layer() -> None:
    mtp.check_drafts("qwen3_vl", mtp.chain(2), count=3)


@pytest.mark.slow
@tiers("family, slots, length", mtp.FAMILIES, [1, 4, 9], [1, 2, 3, 4, 5, 6])
def test_greedy_output_equals_generate(family: str, slots: int, length: int) -> None:
    assert mtp.check_greedy(family, mtp.chain(length), slots) > 0.1


@pytest.mark.slow
@tiers("family, slots, length", mtp.FAMILIES, [1, 4, 9], [1, 2, 3, 4, 5, 6])
def test_sampled_output_equals_plain_sampling_under_shared_noise(family: str, slots: int, length: int) -> None:
    assert mtp.check_sampled(family, mtp.chain(length), slots, MIXED) > 0.01


@pytest.mark.slow
@tiers("family, pattern", mtp.FAMILIES, ["paused", "late"])
def test_output_of_drafters_that_pause_equals_plain_decoding(family: str, pattern: str) -> None:
    mtp.check_greedy(family, mtp.chain(4), 4, PATTERNS[pattern])
    mtp.check_sampled(family, mtp.chain(4), 4, MIXED, PATTERNS[pattern])


@pytest.mark.slow
@pytest.mark.parametrize("family", mtp.FAMILIES)
@pytest.mark.parametrize("pattern", list(PATTERNS))
def test_every_draft_equals_that_of_transformers_layer(family: str, pattern: str) -> None:
    mtp.check_drafts(family, mtp.chain(6), PATTERNS[pattern])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen2_5_vl"])
def test_every_node_of_a_tree_equals_that_of_transformers_layer(family: str) -> None:
    mtp.check_drafts(family, DynamicTree(4, 3, 16))
    mtp.check_greedy(family, DynamicTree(4, 3, 16), 4)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_vl"])
def test_rejection_at_temperature_zero_is_greedy_decoding(family: str) -> None:
    engine, wanted = mtp.make_engine(family, mtp.chain(3), 4, Rejection()), checks.requests(family, 9)
    done = checks.run(engine, wanted)
    for request in wanted:
        expected = checks.generated(family, request, engine.target.eos_ids)
        assert done[request.sample_id].token_ids == expected, request.sample_id


@pytest.mark.slow
@pytest.mark.parametrize("family", ["glm4_moe", "qwen2_5_vl"])
def test_drafts_of_a_row_do_not_depend_on_the_batch(family: str) -> None:
    wanted = checks.requests(family, 9)
    outputs = []
    for slots, order in ((1, wanted), (4, wanted[::-1]), (9, wanted[4:] + wanted[:4])):
        done = checks.run(mtp.make_engine(family, mtp.chain(4), slots), order)
        outputs.append({name: (c.token_ids, c.telemetry.acceptance_histogram) for name, c in done.items()})
    assert outputs[0] == outputs[1] == outputs[2]
