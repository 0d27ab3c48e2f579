"""Tests the engine's edge cases: refusals, limits, streaming, and the effect of a bad request on other requests."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from decoding import Engine, Method, Request, Sampling
from decoding.acceptance import Exact
from decoding.trees import Chain
from tests import toys
from tests.conformance import checks


def engine(slots: int = 2, family: str = "llava", context: int = 96, drafter: str = "perturbed") -> Engine:
    return Engine(toys.target(family), Method(checks.make_drafter(drafter, family), Chain(4), Exact()), slots, context)


def test_a_sample_too_long_for_its_slot_is_refused_and_the_others_are_not() -> None:
    fine = checks.requests("llava", 4)
    long = Request("long", " ".join(["w5"] * 80), (), Sampling(max_new_tokens=20))
    done = {c.sample_id: c for c in engine().run([fine[0], long, *fine[1:]])}
    error = done["long"].error
    assert error is not None
    assert error.code == "context_too_long"
    assert "80 tokens" in error.message
    assert "max_context_tokens (96)" in error.message
    assert all(done[request.sample_id].error is None for request in fine)


def test_a_sample_that_just_fits_is_decoded_to_its_last_token() -> None:
    request = Request("tight", " ".join(["w5"] * 76), (), Sampling(max_new_tokens=20, ignore_eos=True))
    for drafter in ("right", "perturbed"):
        (done,) = engine(drafter=drafter).run([request])
        assert done.token_ids == checks.generated("llava", request, frozenset())


def test_an_image_without_a_placeholder_is_refused_with_the_processors_reason() -> None:
    request = Request("stray", "<s> w5 w6", (toys.picture(1),))
    (done,) = engine().run([request])
    assert done.error is not None
    assert done.error.code == "prompt_refused"


def test_an_image_for_a_text_model_is_refused() -> None:
    (done,) = engine(family="llama").run([Request("picture", "<s> w5", (toys.picture(1),))])
    assert done.error is not None
    assert done.error.code == "prompt_refused"
    assert "takes text only" in done.error.message


def test_an_empty_prompt_is_refused() -> None:
    (done,) = engine(family="llama").run([Request("empty", "")])
    assert done.error is not None
    assert done.error.code == "prompt_refused"


def test_nan_logits_become_an_error_of_their_sample_only() -> None:
    target = toys.target("llama")
    poisoned = 17
    with torch.no_grad():
        target.decoder.embed_tokens.weight[poisoned] = torch.nan  # type: ignore[union-attr,index]
    made = Engine(target, Method(checks.make_drafter("right", "llama"), Chain(3), Exact()), 2, 96)
    short = Sampling(max_new_tokens=3)
    bad = Request("bad", f"<s> w5 w6 w7 w8 w9 w{poisoned} w30", (), short)
    # The last ones are refilled into the slot that held the bad one, whose columns they do not all overwrite.
    fine = [Request(f"fine-{i}", f"<s> w{20 + i} w30", (), short) for i in range(6)]
    done = {c.sample_id: c for c in made.run([fine[0], bad, *fine[1:]])}
    error = done["bad"].error
    assert error is not None
    assert error.code == "non_finite_logits"
    for request in fine:
        assert done[request.sample_id].token_ids == checks.generated("llama", request, target.eos_ids)


def test_a_request_of_one_token_is_decoded() -> None:
    request = Request("one", *toys.prompt("llava", 2), Sampling(max_new_tokens=1, ignore_eos=True))
    (done,) = engine().run([request])
    assert done.token_ids == checks.generated("llava", request, frozenset())
    assert done.finish_reason == "length"
    assert done.telemetry.num_spec_steps == 0
    assert done.telemetry.mean_acceptance_length == 1.0


def test_requests_are_read_only_as_slots_become_free() -> None:
    num_read = 0

    def source() -> Iterator[Request]:
        nonlocal num_read
        for request in checks.requests("llava", 20):
            num_read += 1
            yield request

    run = engine(slots=3).run(source())
    next(run)
    assert num_read <= 6


def test_an_engine_accepts_requests_after_it_has_finished_all() -> None:
    made = engine()
    first = {c.sample_id: c.token_ids for c in made.run(checks.requests("llava", 5))}
    assert not made.has_work
    assert made.num_free_slots == 2
    again = {c.sample_id: c.token_ids for c in made.run(checks.requests("llava", 5)[::-1])}
    assert first == again
    assert list(made.run([])) == []


def test_the_mean_logprob_is_the_targets_own_before_any_filter() -> None:
    request = Request(
        "p", *toys.prompt("llama", 4), Sampling(max_new_tokens=6, temperature=0.8, top_k=5, ignore_eos=True)
    )
    (done,) = engine(family="llama").run([request])
    inputs = toys.front_end("llama").encode(request.prompt, ())
    ids = torch.tensor([done.token_ids])
    with torch.inference_mode():
        logits = toys.oracle("llama")(input_ids=torch.cat([inputs["input_ids"], ids], 1)).logits[0]
    start = inputs["input_ids"].shape[1] - 1
    values = logits[start : start + 6].log_softmax(-1).gather(1, ids[0][:, None])
    assert done.mean_logprob == pytest.approx(float(values.mean()), abs=1e-4)


def test_greedy_and_sampled_requests_share_a_batch() -> None:
    greedy = checks.requests("llava", 4)
    sampled = [
        Request(
            f"s{i}", *toys.prompt("llava", i), Sampling(max_new_tokens=9, temperature=1.0, top_k=7 * (i % 2)), seed=5
        )
        for i in range(4)
    ]
    mixed = [request for both in zip(greedy, sampled, strict=True) for request in both]
    target = toys.target("llava")
    done = checks.run(
        Engine(target, Method(checks.make_drafter("perturbed", "llava"), Chain(4), Exact()), 4, 128), mixed
    )
    for request in greedy:
        assert done[request.sample_id].token_ids == checks.generated("llava", request, target.eos_ids)
    for request in sampled:
        assert done[request.sample_id].token_ids == checks.referenced("llava", request, target.eos_ids)


def test_a_drafter_with_a_smaller_or_larger_vocabulary_drafts_the_common_tokens() -> None:
    from decoding.contexts import Full
    from decoding.drafters import ModelDrafter
    from models.target import Target

    for vocab_size in (toys.VOCAB_SIZE - 9, toys.VOCAB_SIZE + 9):
        model = Target(toys.llama(3, vocab_size), toys.front_end("llama"), "other")
        drafter = ModelDrafter(model, [Full()], toys.VOCAB_SIZE)
        wanted = [r for r in checks.requests("llama", 24) if not any(f"w{i}" in r.prompt for i in range(55, 64))]
        assert len(wanted) > 5
        target = toys.target("llama")
        done = checks.run(Engine(target, Method(drafter, Chain(3), Exact()), 2, 128), wanted)
        for request in wanted:
            assert done[request.sample_id].token_ids == checks.generated("llama", request, target.eos_ids)


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_new_tokens", 0), ("temperature", -1.0), ("top_k", -1), ("top_p", 0.0), ("repetition_penalty", 0.0)],
)
def test_sampling_outside_its_range_is_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"sampling.{field}"):
        Sampling(**{field: value})  # type: ignore[arg-type]


def test_images_reach_the_model() -> None:
    prompt = "<s> w5 <image> w6 w7"
    outputs = set()
    for seed in range(4):
        image = np.full((16, 16, 3), 80 * seed, dtype=np.uint8)
        (done,) = engine().run([Request("i", prompt, (image,), Sampling(max_new_tokens=12))])
        outputs.add(done.token_ids)
        assert done.num_visual_tokens == 4
    assert len(outputs) > 1


def test_non_finite_values_in_the_drafter_do_not_affect_the_next_sample_of_the_slot() -> None:
    drafter = checks.make_drafter("right", "llama")
    poisoned = 17
    with torch.no_grad():
        drafter.model.decoder.embed_tokens.weight[poisoned] = torch.nan  # type: ignore[attr-defined]
    short = Sampling(max_new_tokens=8, ignore_eos=True)
    bad = Request("bad", f"<s> w5 w6 w7 w8 w9 w{poisoned} w30 w31 w32", (), short)
    after = Request("after", "<s> w20 w30", (), short)
    target = toys.target("llama")
    values = {}
    for order in ([after], [bad, after]):
        done = {c.sample_id: c for c in Engine(target, Method(drafter, Chain(3), Exact()), 1, 96).run(order)}
        values[len(order)] = done["after"].telemetry.acceptance_histogram
        for request in order:
            assert done[request.sample_id].token_ids == checks.generated("llama", request, frozenset())
    assert values[1] == values[2]
    assert sum(values[1][1:]) > 0


def test_a_row_past_its_time_limit_is_an_error_and_frees_its_slot() -> None:
    made = Engine(toys.target("llava"), Method(checks.make_drafter("right", "llava"), Chain(2), Exact()), 2, 96, 1e-9)
    long = Sampling(max_new_tokens=20, ignore_eos=True)
    slow = [Request(f"slow-{i}", *toys.prompt("llava", i), long) for i in range(3)]
    quick = Request("quick", *toys.prompt("llava", 3), Sampling(max_new_tokens=1, ignore_eos=True))
    done = {c.sample_id: c for c in made.run([slow[0], quick, *slow[1:]])}
    for request in slow:
        error = done[request.sample_id].error
        assert error is not None
        assert error.code == "row_timeout"
        assert "pool.max_row_s (1e-09 s)" in error.message
        assert done[request.sample_id].token_ids == ()
    assert done["quick"].error is None
    made.max_row_s = 1e9
    for request in slow:
        (again,) = made.run([request])
        assert again.token_ids == checks.generated("llava", request, frozenset())
