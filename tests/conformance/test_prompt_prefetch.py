"""Prompt prefetch on a thread gives the same outputs and refusals."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from actors.serving.recovery import RecoveringEngine
from decoding import Engine, Method, Request, Sampling
from decoding.acceptance import Exact
from decoding.contexts import Full
from decoding.drafters import ModelDrafter, NoDrafter
from decoding.trees import Chain
from models.inputs.processing import FrontEnd, PromptError
from models.target import Target
from tests import toys
from tests.conformance import checks, images, methods
from tests.covering import tiers
from tests.models.inputs.test_features import check_answers, keeping

pytestmark = pytest.mark.slow

MAX_WAIT_S = 600.0
"""Timeout of a failing test."""
Patch = pytest.MonkeyPatch


@pytest.fixture
def ahead(monkeypatch: Patch) -> None:
    """Enables prompt prefetch in all engines."""
    make = Engine.__init__

    def made(self: Engine, target: Any, *options: Any, **named: Any) -> None:
        target.prefetch_prompts()
        make(self, target, *options, **named)

    monkeypatch.setattr(Engine, "__init__", made)


def plain(target: Target, slots: int, **options: Any) -> Engine:
    return Engine(target, Method(NoDrafter(), Chain(1), Exact()), slots, 160, **options)


@tiers("name, async_output", list(methods.METHODS), [False, True], strength=1)
def test_every_method_gives_the_targets_output(name: str, async_output: bool, ahead: None, monkeypatch: Patch) -> None:
    monkeypatch.setattr(Engine, "__init__", functools.partialmethod(Engine.__init__, async_output=async_output))
    families = methods.METHODS[name][1]
    methods.check_case((name, "llava" if "llava" in families else families[0], 3, "greedy"), count=8)


@pytest.mark.parametrize("family", methods.VISUAL)
def test_every_family_gives_the_targets_output_and_keeps_its_features(family: str, ahead: None) -> None:
    engine = check_answers(family, keeping(family), 2)
    num_doors = sum(bool(request.images) + bool(request.videos) for request in checks.requests(family, 2))
    assert engine.stats.num_feature_hits == engine.target.num_feature_hits > num_doors


@pytest.mark.parametrize("kind", ["class", "text"])
def test_prefetched_prompts_give_the_same_images(kind: str, ahead: None) -> None:
    images.check_equal("sd-chain", kind, 3, "sampled-guided")


def test_a_drafter_whose_model_has_a_thread_for_prompts_is_refused() -> None:
    target = toys.target("llava")
    target.prefetch_prompts()
    drafter = ModelDrafter(target, [Full()], target.vocab_size)
    with pytest.raises(ValueError, match="a drafter's prompts are made between steps"):
        Engine(target, Method(drafter, Chain(2), Exact()), 1, 160)


def shown(count: int, num_tokens: int = 16) -> list[Request]:
    sampling = Sampling(max_new_tokens=num_tokens, ignore_eos=True)
    return [replace(request, sampling=sampling) for request in checks.requests("llava", count)]


class Held:
    """Features of one call that wait for a number of further steps."""

    def __init__(self, target: Target, call: int, num_steps: int) -> None:
        owner: Any = target.model
        owner = getattr(owner, "model", owner)
        self.inner = owner.get_image_features
        self.call, self.num_steps = call, num_steps
        self.num_calls = 0
        self.threads: set[int] = set()
        self.is_inside, self.may_go = threading.Event(), threading.Event()
        self.went = True
        owner.get_image_features = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.threads.add(threading.get_ident())
        self.num_calls += 1
        if self.num_calls == self.call:
            self.is_inside.set()
            self.went = self.may_go.wait(MAX_WAIT_S)
        return self.inner(*args, **kwargs)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("slots", [1, 2])
def test_steps_continue_while_the_front_end_of_the_model_prepares_a_prompt(
    slots: int, compiled: bool, monkeypatch: Patch
) -> None:
    """With two slots, one is empty meanwhile."""
    monkeypatch.setattr("decoding.scheduling.admission.MAX_UNKNOWN", 1)  # the first prompt is a batch of its own
    target = toys.target("llava")
    if compiled:
        assert target.compile()
    target.prefetch_prompts()
    wanted = [request for request in shown(9) if request.images and not request.videos][:3]
    held = Held(target, 2, 5)
    engine = plain(target, slots)
    for request in wanted:
        engine.submit(request)
    done = engine.step()
    assert held.is_inside.wait(MAX_WAIT_S)
    for _ in range(5):
        done += engine.step()
    held.may_go.set()
    while engine.has_work:
        done += engine.step()
    assert held.went, "the prompt held up the steps"
    assert threading.get_ident() not in held.threads
    assert len(held.threads) == 1
    tokens = {completion.sample_id: completion.token_ids for completion in done}
    assert tokens == {request.sample_id: checks.generated("llava", request, frozenset()) for request in wanted}


def test_run_reads_ahead_of_its_slots_and_in_order() -> None:
    target = toys.target("llava")
    target.prefetch_prompts()
    read: list[str] = []
    wanted = shown(8, 5)

    def source() -> Any:
        for request in wanted:
            read.append(request.sample_id)
            yield request

    engine = plain(target, 2)
    running = engine.run(source())
    first = next(running)
    assert read == [request.sample_id for request in wanted[:4]]
    done = [first, *running]
    assert sorted(completion.sample_id for completion in done) == sorted(request.sample_id for request in wanted)
    assert all(completion.error is None for completion in done)


def test_refused_prompts_are_the_same_rows_with_the_same_words(ahead: None) -> None:
    fine = shown(4)
    blind = replace(fine[0], sample_id="blind", images=())
    long = replace(fine[1], sample_id="long", prompt=fine[1].prompt + " w5" * 200)
    wanted = [blind, fine[0], long, replace(long, sample_id="longer"), *fine[1:], replace(blind, sample_id="again")]
    errors = []
    for target in (toys.target("llava"), toys.target("llava")):
        done = {completion.sample_id: completion for completion in plain(target, 2).run(wanted)}
        assert len(done) == len(wanted)
        for request in fine:
            assert done[request.sample_id].token_ids == checks.generated("llava", request, frozenset())
        errors.append(
            {
                key: (completion.error.code, completion.error.message)
                for key, completion in done.items()
                if completion.error
            }
        )
    assert errors[0].keys() == {"blind", "long", "longer", "again"}
    assert errors[0] == errors[1]


def test_a_prefetched_prompt_is_checked_against_the_limits_of_its_request(ahead: None) -> None:
    # Equal prompts, one too long for the context window and one with guidance that the model does not support.
    request = shown(1)[0]
    wanted = [
        request,
        replace(request, sample_id="long", sampling=Sampling(max_new_tokens=150, ignore_eos=True)),
        replace(request, sample_id="guided", sampling=Sampling(max_new_tokens=5, temperature=1.0, guidance_scale=3.0)),
        replace(request, sample_id="twin"),
    ]
    done = {row.sample_id: row for row in plain(toys.target("llava"), 1).run(wanted)}
    assert {key for key, row in done.items() if row.error} == {"long", "guided"}
    assert (
        done["twin"].token_ids == done[request.sample_id].token_ids == checks.generated("llava", request, frozenset())
    )


def fail_once(target: Target, prompt: str, error: BaseException) -> list[int]:
    """Encoding this prompt fails the first time; the list has the encoding threads."""
    threads: list[int] = []
    inner = target.process
    failed = []

    def encode(text: str, *rest: Any) -> Any:
        threads.append(threading.get_ident())
        if text == prompt and not failed:
            failed.append(text)
            raise error
        return inner(text, *rest)

    target.process = encode  # type: ignore[method-assign]
    return threads


def test_out_of_memory_in_prompt_preparation_reduces_slots_and_fails_no_row() -> None:
    target = toys.target("llava")
    target.prefetch_prompts()
    wanted = shown(7, 6)
    threads = fail_once(target, wanted[4].prompt, torch.OutOfMemoryError("no room for features"))
    engine = RecoveringEngine(lambda slots: plain(target, slots), lambda: plain(target, 1), 4)
    for request in wanted:
        engine.submit(request)
    done = []
    while engine.has_work:
        done += engine.step()
    assert engine.num_slots == 2
    assert sorted(completion.sample_id for completion in done) == sorted(request.sample_id for request in wanted)
    tokens = {completion.sample_id: completion.token_ids for completion in done}
    assert tokens == {request.sample_id: checks.generated("llava", request, frozenset()) for request in wanted}
    assert threading.get_ident() not in threads


def test_a_recovering_engine_prefetches_the_prompts_of_waiting_rows() -> None:
    target = toys.target("llava")
    target.prefetch_prompts()
    wanted = shown(4)
    engine = RecoveringEngine(lambda slots: plain(target, slots), lambda: plain(target, 1), 1)
    for request in wanted[:3]:
        engine.submit(request)
    engine.queue.expect(wanted[3:])
    engine.step()
    held = _inner(engine)._prefetcher
    assert held is not None
    assert list(held._by_request) == [id(request) for request in wanted[1:]]  # the first is running


def _inner(engine: RecoveringEngine) -> Any:
    made: Any = engine._engine
    return made._admission


def test_two_threads_never_use_one_processor_at_once() -> None:
    front_end = FrontEnd(toys.processor("llava"))
    front_end.keep(1 << 20)
    both = threading.Barrier(2)
    met: list[bool] = []

    def encode(prompt: str, shown: Sequence[Any], videos: Sequence[Any]) -> Any:
        try:
            both.wait(0.2)
            met.append(True)
        except threading.BrokenBarrierError:
            both.reset()
        return {"input_ids": torch.tensor([[len(prompt)]])}

    front_end._encode = encode  # type: ignore[method-assign]
    picture = np.zeros((2, 2, 3), np.uint8)
    made: dict[str, Any] = {}

    def use(prompt: str) -> None:
        made[prompt] = front_end.encode(prompt, [picture])

    threads = [threading.Thread(target=use, args=(prompt,)) for prompt in ("a", "bcd")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not met
    assert {prompt: int(prompt_ids["input_ids"]) for prompt, prompt_ids in made.items()} == {"a": 1, "bcd": 3}


def test_an_error_in_prompt_preparation_is_raised_in_step() -> None:
    target = toys.target("llava")
    target.prefetch_prompts()
    wanted = shown(2)
    fail_once(target, wanted[1].prompt, RuntimeError("a kernel failed"))
    engine = plain(target, 1)
    with pytest.raises(RuntimeError, match="a kernel failed"):
        list(engine.run(wanted))
    # Refusals do not raise, because they are rows.
    fail_once(target, wanted[0].prompt, PromptError("no such words"))
    done = {completion.sample_id: completion for completion in plain(target, 1).run(wanted)}
    refused = done[wanted[0].sample_id].error
    assert refused is not None
    assert refused.message == "no such words"
    assert done[wanted[1].sample_id].error is None
