"""Requests with packed processor outputs decode as requests with pixels, and no model runs its processor."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from decoding import Engine, Method, Request
from decoding.acceptance import Exact
from decoding.contexts import Full, Pooled, Pruned, TextOnly
from decoding.contracts import Context
from decoding.drafters import ModelDrafter, NoDrafter
from decoding.drafters.ensemble import Ensemble, EnsembleOptions
from decoding.scheduling.admission import content_of
from decoding.trees import Chain
from models.inputs.processing import FrontEnd
from models.target import Target
from tests import toys
from tests.conformance import checks
from tests.conformance.methods import VISUAL
from tests.covering import tiers
from tests.models.inputs.test_shared_inputs import ROOM, Counted

CONTEXTS: dict[str, list[Context]] = {
    "full": [Full()],
    "pruned": [Pruned(0.5), TextOnly()],
    "attention": [Pruned(0.5, "attention")],
}
POOLED = ("llava", "qwen2_5_vl", "qwen3_vl")


def wanted(family: str) -> list[Request]:
    """Requests with images, with videos where the family takes them, and two with equal media."""
    requests = checks.requests(family, 6)
    if toys.FAMILIES[family].video_placeholder:
        text, videos = toys.with_video(family, requests[0].prompt, 3)
        requests.append(replace(requests[0], sample_id="video", prompt=text, videos=videos))
    return [*requests, replace(requests[2], sample_id="again", prompt=f"{requests[2].prompt} w9")]


def packed(request: Request, front_end: FrontEnd, keeps_pixels: bool = False) -> Request:
    inputs = front_end.pack(request.prompt, request.images, request.videos)
    return replace(request, inputs=inputs) if keeps_pixels else replace(request, inputs=inputs, images=(), videos=())


def pair(family: str, other: bool = False) -> tuple[Target, Target, Counted]:
    """Target and drafter, with an equal front end or, with `other`, another one; and the target's counted processor."""
    target, drafter = toys.target(family), toys.perturbed(family, 0.02)
    processor = copy.deepcopy(toys.processor(family))
    if other:
        processor.image_processor.image_mean = [0.1, 0.2, 0.3]
    drafter.front_end = FrontEnd(processor)
    drafter.share_front_end(target, ROOM)
    counted = Counted(target.front_end.processor)
    target.front_end.processor = counted
    return target, drafter, counted


def run(target: Target, drafter: Target, contexts: Sequence[Context], requests: list[Request]) -> dict[str, Any]:
    merge = {"merge": Ensemble(EnsembleOptions())} if len(contexts) > 1 else {}
    method = Method(ModelDrafter(drafter, contexts, target.vocab_size, **merge), Chain(3), Exact())
    return checks.run(Engine(target, method, 3, 200), requests)


def check_equal(done: dict[str, Any], expected: dict[str, Any]) -> None:
    assert done.keys() == expected.keys()
    for name, completion in expected.items():
        assert completion.error is None
        assert not completion.telemetry.degraded
        assert done[name].token_ids == completion.token_ids
        assert done[name].num_visual_tokens == completion.num_visual_tokens
        assert done[name].telemetry.acceptance_histogram == completion.telemetry.acceptance_histogram


@tiers("family, contexts", VISUAL, list(CONTEXTS))
def test_tokens_and_acceptance_equal_those_of_pixels(family: str, contexts: str) -> None:
    requests = wanted(family)
    expected = run(*pair(family)[:2], CONTEXTS[contexts], requests)
    target, drafter, counted = pair(family)
    sent = [packed(request, toys.front_end(family)) for request in requests]
    check_equal(run(target, drafter, CONTEXTS[contexts], sent), expected)
    assert counted.num_calls == 0


@pytest.mark.slow_cases("llava")
@pytest.mark.parametrize("family", POOLED)
def test_pooled_contexts_read_packed_outputs(family: str) -> None:
    requests = wanted(family)
    expected = run(*pair(family)[:2], [Pooled()], requests)
    target, drafter, counted = pair(family)
    sent = [packed(request, toys.front_end(family)) for request in requests]
    check_equal(run(target, drafter, [Pooled()], sent), expected)
    assert counted.num_calls == 0


def test_a_drafter_with_another_front_end_reads_the_pixels() -> None:
    requests = wanted("llava")
    expected = run(*pair("llava", other=True)[:2], [Full()], requests)
    target, drafter, counted = pair("llava", other=True)
    sent = [packed(request, toys.front_end("llava"), keeps_pixels=True) for request in requests]
    check_equal(run(target, drafter, [Full()], sent), expected)
    assert (counted.num_calls, drafter.reads_inputs) == (0, False)


def test_a_drafter_with_another_front_end_refuses_outputs_without_pixels() -> None:
    _, drafter, _ = pair("llava", other=True)
    request = packed(next(request for request in wanted("llava") if request.images), toys.front_end("llava"))
    with pytest.raises(RuntimeError, match="lacks the images and videos"):
        drafter.encode(request.prompt, request.images, request.videos, request.inputs)


@pytest.mark.slow_cases("llava")
@pytest.mark.parametrize("family", VISUAL)
def test_packed_requests_with_equal_media_hit_the_feature_cache(family: str) -> None:
    target = toys.target(family)
    target.keep_features(ROOM)
    requests = [request for request in wanted(family) if request.images or request.videos]
    sent = [packed(request, toys.front_end(family)) for request in (*requests, *requests)]
    sent = [
        replace(request, sample_id=f"{index}", prompt=f"{request.prompt} w{index}")
        for index, request in enumerate(sent)
    ]
    engine = Engine(target, Method(NoDrafter(), Chain(1), Exact()), 1, 200)
    checks.run(engine, sent)
    assert engine.stats.num_feature_hits >= sum(bool(request.images) + bool(request.videos) for request in requests)


def test_requests_are_equal_by_prompt_and_media() -> None:
    front_end = toys.front_end("llava")
    first, other = [request for request in wanted("llava") if request.images][:2]
    key = content_of(packed(first, front_end))
    assert key == content_of(packed(replace(first, sample_id="x"), front_end))
    assert key != content_of(packed(replace(first, prompt=f"{first.prompt} w7"), front_end))
    assert key != content_of(packed(other, front_end))
