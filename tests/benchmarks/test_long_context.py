"""Forced acceptance accepts at the given rate, and rows have random columns beside their prompts."""

from __future__ import annotations

import pytest
import torch

from actors.loading.pair import load_target
from benchmarks.harness.engines import plain
from benchmarks.harness.long_context import Filled, Forced, time_steps
from configs.schema import CheckpointConfig
from decoding import Engine, Method, Request, Sampling
from decoding.contexts import Full
from decoding.drafters import ModelDrafter
from decoding.trees import Chain
from models.target import Target
from zoo.pair import CHECKPOINTS
from zoo.text import held_out_prompts

pytestmark = pytest.mark.slow

GAMMA = 3


@pytest.fixture(scope="module")
def pair() -> list[Target]:
    names = ("text_target", "text_drafter")
    return [
        load_target(CheckpointConfig(path=str(CHECKPOINTS / name), dtype="float32", device="cpu"), name)
        for name in names
    ]


def requests(seed: int = 0, num_tokens: int = 80) -> list[Request]:
    sampling = Sampling(max_new_tokens=num_tokens, ignore_eos=True)
    prompts = held_out_prompts(2, 0)
    return [Request(f"row-{number}", text, sampling=sampling, seed=seed) for number, text in enumerate(prompts)]


def engine_over(pair: list[Target], rate: float, num_columns: int) -> tuple[Engine, Filled, Filled]:
    target, drafter = (Filled(model, num_columns, 2, 256) for model in pair)
    method = Method(ModelDrafter(drafter, [Full()], target.vocab_size), Chain(GAMMA), Forced(rate))  # type: ignore[arg-type]
    return Engine(target, method, 2, 200), target, drafter  # type: ignore[arg-type]


def tokens_after(engine: Engine, num_steps: int = 3) -> list[list[int]]:
    time_steps(engine, requests(), num_steps)
    return [request_state.token_ids for request_state in engine._slots.progress if request_state is not None]


@pytest.mark.parametrize(("rate", "per_step"), [(0.0, 1), (1.0, GAMMA + 1)])
def test_a_rate_of_one_takes_all_drafts_and_a_rate_of_nought_takes_none(
    pair: list[Target], rate: float, per_step: int
) -> None:
    _, num_steps, tokens = time_steps(engine_over(pair, rate, 0)[0], requests(), 3)
    assert (num_steps, tokens) == (3, 3 * 2 * per_step)


def test_drafts_are_accepted_at_about_the_forced_rate_in_any_context(pair: list[Target]) -> None:
    seconds = [
        time_steps(engine_over(pair, 0.7, columns)[0], requests(seed), 20)[1:] for columns in (0, 40) for seed in (0, 1)
    ]
    assert seconds[:2] == seconds[2:], "the draws are the seed's"
    assert seconds[0] != seconds[1], "another seed has other draws"
    mean = sum(tokens for _, tokens in seconds[:2]) / (2 * 2 * 20)
    assert mean == pytest.approx(sum(0.7**index for index in range(GAMMA + 1)), rel=0.15)


def test_rows_have_the_random_columns_beside_their_prompts_and_steps_read_them(pair: list[Target]) -> None:
    engine, target, drafter = engine_over(pair, 0.5, 40)
    prompts = [pair[0].encode(request.prompt, ()).length for request in requests()]
    for request in requests():
        engine.submit(request)
    engine.step()
    made = [len(progress.token_ids) - 1 for progress in engine._slots.progress if progress is not None]
    lanes = target.lanes(2, 1, 100)
    assert lanes.cache.lens.tolist() == [length + 40 + num for length, num in zip(prompts, made, strict=True)]
    # Windows follow from the lengths known on the host.
    assert lanes.rows.prefix_lengths == [length + 40 for length in prompts]
    assert min(drafter.lanes(2, 1, 100).cache.lens.tolist()) >= min(prompts) + 40
    for memory in lanes.cache.keys:
        assert memory is not None
        assert torch.isfinite(memory).all()
        assert float(memory[0, :, prompts[0] + 39].abs().max()) > 0.0, "the last column is filled"
    texts = [
        tokens_after(Engine(Filled(pair[0], columns, 2, 256), plain(), 2, 200))  # type: ignore[arg-type]
        for columns in (40, 0)
    ]
    assert texts[0] != texts[1]


def test_forced_acceptance_is_not_lossless_and_no_job_can_choose_it() -> None:
    from actors.loading import method

    assert not Forced(0.5).lossless
    assert all("forced" not in kind for kind in method.ACCEPTANCES)
