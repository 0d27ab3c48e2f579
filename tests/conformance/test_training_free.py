"""Speculative Jacobi decoding and suffix decoding: what is accepted, and what the output does not depend on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from decoding import Engine, Method, Request, Sampling
from decoding.acceptance import Exact, Rejection
from decoding.contracts import Drafter
from decoding.drafters import JacobiDrafter, SuffixDrafter
from decoding.trees import Chain
from models.target import Target
from tests import toys
from tests.conformance import checks, images
from tests.conformance.catch_up import MIXED
from tests.conformance.erratic import unsettled
from tests.toys import images as image_toys

pytestmark = pytest.mark.slow

WINDOW = 5
# So hot that the noise of a position decides its token, almost without regard to the tokens before.
HOT = Sampling(max_new_tokens=41, temperature=40.0, ignore_eos=True)
DRAFTERS: dict[str, Callable[[], Drafter]] = {"jacobi": JacobiDrafter, "suffix": SuffixDrafter}
SAMPLED = Sampling(temperature=0.9, top_k=20, top_p=0.9, repetition_penalty=1.3)


@pytest.fixture(autouse=True)
def known_to_the_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    make = checks.make_drafter

    def make_any(kind: str, family: str) -> Drafter:
        return DRAFTERS[kind]() if kind in DRAFTERS else make(kind, family)

    monkeypatch.setattr(checks, "make_drafter", make_any)


def test_a_jacobi_draft_may_be_the_eos_or_follow_it() -> None:
    """Every token of a text becomes its EOS in turn; the hot noise makes long paths, so that it is inside of them."""
    request = replace(checks.requests("llama", 3)[2], sampling=HOT)
    target = toys.target("llama")
    full = checks.run(jacobi_engine(target), [request])[request.sample_id].token_ids
    assert full == checks.referenced("llama", request, frozenset())
    ended_inside = 0
    for index in range(12):
        target.eos_ids = frozenset([full[index]])
        hot = replace(request, sampling=replace(HOT, ignore_eos=False))
        done = checks.run(jacobi_engine(target), [hot])[request.sample_id]
        assert done.token_ids == full[: full.index(full[index]) + 1]
        checks.check_telemetry(done)
        ended_inside += done.telemetry.ended_inside_path
    assert ended_inside > 3


def jacobi_engine(target: Target, slots: int = 3, async_output: bool | None = None) -> Engine:
    return Engine(target, Method(JacobiDrafter(), Chain(WINDOW), Exact()), slots, 128, async_output=async_output)


@pytest.mark.parametrize("async_output", [False, True])
def test_drafts_of_unchanged_choices_are_all_accepted(async_output: bool) -> None:
    """Where the noise decides, a position's choice is the same in every step, so every draft that a forward has reached
    is right, in refilled slots too. If c drafts of a window W are right, the step accepts c, and W − c choices remain
    as drafts of the next step: W / 2 drafts on average."""
    wanted = [replace(request, sampling=HOT) for request in checks.requests("llama", 8)]
    done = checks.run(jacobi_engine(toys.target("llama"), async_output=async_output), wanted)
    for request in wanted:
        completion = done[request.sample_id]
        assert completion.token_ids == checks.referenced("llama", request, frozenset())
        assert completion.telemetry.mean_acceptance_length > 2.9, completion.telemetry.acceptance_histogram
        assert completion.telemetry.drafter_forwards == 0


def test_jacobi_accepts_drafts_of_guided_images_at_high_temperature() -> None:
    wanted = image_toys.requests("class", 6, Sampling(temperature=60.0, guidance_scale=4.0))
    target = image_toys.target("class")
    plain = checks.run(Engine(target, images.METHODS["plain"](target, "class"), 3, 64), wanted)
    for method, least in (("jacobi", 2.9), ("jacobi-above", 3.6)):
        done = checks.run(Engine(target, images.METHODS[method](target, "class"), 3, 64), wanted)
        assert {key: completion.token_ids for key, completion in done.items()} == {
            key: completion.token_ids for key, completion in plain.items()
        }
        assert sum(completion.telemetry.mean_acceptance_length for completion in done.values()) / len(done) > least


@pytest.mark.parametrize("pattern", [MIXED, [0], [5], [1, 5, 0, 3]], ids=str)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_training_free_drafters_track_the_text_at_every_depth(drafter: str, pattern: list[int]) -> None:
    made = DRAFTERS[drafter]()
    method = unsettled(Method(made, Chain(WINDOW), Exact()), pattern=pattern)
    engine = Engine(toys.target("llama"), method, 3, 128)
    wanted = [replace(request, sampling=replace(HOT, max_new_tokens=20)) for request in checks.requests("llama", 6)]
    for request in wanted:
        engine.submit(request)
    num_compared, done = 0, {}
    while engine.has_work:
        done |= {completion.sample_id: completion.token_ids for completion in engine.step()}
        for slot, progress in enumerate(engine._slots.progress):
            if progress is None:
                continue
            assert isinstance(made, JacobiDrafter | SuffixDrafter)
            length, text = int(made._length[slot]), progress.token_ids
            if isinstance(made, SuffixDrafter):
                prompt = toys.front_end("llama").encode(progress.request.prompt, ())["input_ids"][0].tolist()
                assert made._text[slot, :length].tolist() == [*prompt, *text]
            else:
                assert made._output[slot, :length].tolist() == text
            num_compared += 1
    assert num_compared > 10
    for request in wanted:
        assert done[request.sample_id] == checks.referenced("llama", request, frozenset())


def test_jacobi_under_rejection_keeps_the_targets_distribution() -> None:
    assert checks.joint_of_two_tokens(checks.TREES["chain"], Rejection(), 3000, "jacobi") < 2.1


# --- suffix decoding -------------------------------------------------------------------------------------------------


def suffix_engine(slots: int = 3, async_output: bool | None = None) -> Engine:
    method = Method(SuffixDrafter(), Chain(WINDOW), Exact())
    return Engine(toys.target("llama"), method, slots, 128, async_output=async_output)


def again(wanted: list[Request]) -> list[Request]:
    """The same prompts and limits under other ids."""
    return [replace(request, sample_id=f"again-{request.sample_id}") for request in wanted]


@pytest.mark.parametrize("async_output", [False, True])
def test_texts_that_were_written_before_are_accepted(async_output: bool) -> None:
    wanted = [
        replace(request, sampling=Sampling(max_new_tokens=32, ignore_eos=True))
        for request in checks.requests("llama", 5)
    ]
    engine = suffix_engine(async_output=async_output)
    first, second = checks.run(engine, wanted), checks.run(engine, again(wanted))
    for request in wanted:
        expected = checks.generated("llama", request, frozenset())
        before, after = first[request.sample_id], second[f"again-{request.sample_id}"]
        assert before.token_ids == after.token_ids == expected
        assert after.telemetry.mean_acceptance_length > 4.0
        assert after.telemetry.extras["suffix_shared_match_rate"] > 0.5
        assert after.telemetry.extras["suffix_match_tokens_mean"] > 3.0
    # Nothing had finished when the first texts began.
    assert sum(completion.telemetry.mean_acceptance_length for completion in first.values()) < 5 * 3.0


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
def test_tokens_do_not_depend_on_what_finished_before(sampling: Sampling) -> None:
    wanted = checks.requests("llama", 7, sampling)
    others = [
        replace(request, sample_id=f"other-{request.sample_id}", seed=77)
        for request in checks.requests("llama", 9, SAMPLED)
    ]
    tokens, drafted = [], set()
    for before, slots, order in (([], 4, wanted), (others, 4, wanted), (again(wanted), 1, wanted[::-1])):
        engine = suffix_engine(slots)
        checks.run(engine, before)
        done = checks.run(engine, order)
        tokens.append({key: completion.token_ids for key, completion in done.items()})
        drafted.add(sum(completion.telemetry.num_accepted_draft_tokens for completion in done.values()))
    assert tokens[0] == tokens[1] == tokens[2]
    for request in wanted:
        assert tokens[0][request.sample_id] == checks.referenced("llama", request, toys.target("llama").eos_ids)
    assert len(drafted) > 1, "the history has to change the drafts"


def test_outputs_enter_the_corpus_in_the_order_in_which_they_finish_and_failed_ones_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, noted = suffix_engine(), []
    monkeypatch.setattr(engine.method.drafter, "finished", lambda token_ids: noted.append(tuple(token_ids)))
    wanted = checks.requests("llama", 6)
    # One output ends with its first token, which the prefill gives.
    wanted[2] = replace(wanted[2], sampling=Sampling(max_new_tokens=1))
    ended = [completion.token_ids for completion in engine.run(wanted)]
    assert noted == ended
    head = engine.target.head.forward
    monkeypatch.setattr(engine.target.head, "forward", lambda hidden: head(hidden) * torch.nan)
    assert all(completion.error for completion in engine.run(again(wanted)))
    assert noted == ended
