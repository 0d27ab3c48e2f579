"""Guided images with negative prompts equal the slow reference whose unconditional input is the negative prompt."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from decoding import Engine, Request
from decoding.noise import Noise, Stream, key_of
from models.inputs.content import ConditionPair
from models.inputs.prompt_prefetch import Prompt
from tests.conformance import checks
from tests.conformance.images import METHODS, MODES
from tests.covering import tiers
from tests.llamagen_reference import LlamaGenReference, ReferenceSampling, filter_logits, greedy
from tests.toys import images

NAMES = ("plain", "eagle2", "eagle3", "sd-chain", "sd-tree", "layer-skip", "medusa", "jacobi", "suffix")


def pairs(count: int, mode: str) -> list[Request]:
    """The requests of images, with negative prompts of other lengths; the first one has none."""
    wanted = images.requests("text", count, MODES[mode])
    return [
        request if not index else replace(request, condition=pair_of(request, index))
        for index, request in enumerate(wanted)
    ]


def pair_of(request: Request, index: int) -> ConditionPair:
    assert isinstance(request.condition, np.ndarray)
    return ConditionPair(request.condition, images.condition("text", 40 + 2 * index))


def codes(request: Request, condition: Tensor, negative: Tensor) -> list[int]:
    """The two conditions in the reference: logits of each from its own input and padding, merged with the scale."""
    reference: LlamaGenReference = images.reference("text")
    sampling: ReferenceSampling = images.reference_sampling(request.sampling)
    (prompt, _, padding), (other, _, other_padding) = (reference.prompts(part) for part in (condition, negative))
    key = torch.tensor([key_of(request.seed, request.sample_id, request.replica)])
    tokens: list[int] = []
    while len(tokens) < reference.grid**2:
        logits = reference.next_logits(prompt, padding, tokens)
        guided = sampling.cfg_interval == -1 or len(tokens) <= sampling.cfg_interval + 1
        if sampling.cfg_scale > 1.0 and guided:
            without = reference.next_logits(other, other_padding, tokens)
            logits = without + sampling.cfg_scale * (logits - without)
        scores = filter_logits(logits, sampling)
        if sampling.temperature > 0:
            noise = Noise(key, torch.tensor([len(tokens)]))
            scores = scores + noise.gumbel(Stream.TOKEN, torch.zeros(1, dtype=torch.long), len(scores))[0, 0]
        tokens.append(greedy(len(tokens), scores))
    return tokens


@tiers("method, mode, slots", NAMES, ["greedy-guided", "sampled-guided", "sampled-interval"], [1, 4])
def test_every_image_equals_the_reference_with_the_two_conditions(method: str, mode: str, slots: int) -> None:
    check_equal(method, mode, slots)


def check_equal(method: str, mode: str, slots: int) -> None:
    target = images.target("text")
    engine = Engine(target, METHODS[method](target, "text"), slots, 64)
    wanted = pairs(6, mode)
    done = checks.run(engine, wanted)
    plain = images.requests("text", 6, MODES[mode])
    with_null = checks.run(Engine(target, METHODS["plain"](target, "text"), 4, 64), plain)
    num_changed = 0
    for request in wanted:
        name = request.sample_id
        checks.check_telemetry(done[name])
        if isinstance(request.condition, ConditionPair):
            parts = (torch.from_numpy(part) for part in (request.condition.positive, request.condition.negative))
            assert list(done[name].token_ids) == codes(request, *parts), name
            num_changed += done[name].token_ids != with_null[name].token_ids
        else:
            assert done[name].token_ids == with_null[name].token_ids
    assert num_changed >= 2, "the negative prompts change no image"


def test_an_unguided_image_does_not_depend_on_its_negative_prompt() -> None:
    [request] = images.requests("text", 1, MODES["greedy"])
    target = images.target("text")
    for condition in (request.condition, pair_of(request, 3)):
        engine = Engine(target, METHODS["plain"](target, "text"), 1, 64)
        done = checks.run(engine, [replace(request, condition=condition)])
        assert isinstance(request.condition, np.ndarray)
        reference = images.reference("text").generate(
            torch.from_numpy(request.condition), images.reference_sampling(request.sampling), greedy
        )
        assert list(done[request.sample_id].token_ids) == reference


def test_prompts_are_shared_only_with_equal_negative_prompts() -> None:
    one, two, three = (images.condition("text", index) for index in range(3))
    same = Prompt("a", condition=ConditionPair(one, two)).content
    assert same == Prompt("a", condition=ConditionPair(one.copy(), two.copy())).content
    for other in (ConditionPair(one, three), ConditionPair(two, one), one):
        assert same != Prompt("a", condition=other).content


def test_a_negative_prompt_of_a_wrong_shape_is_the_rows_error() -> None:
    [request] = images.requests("text", 1, MODES["greedy-guided"])
    assert isinstance(request.condition, np.ndarray)
    target = images.target("text")
    wrong = replace(request, condition=ConditionPair(request.condition, np.ones((2, 3), np.float32)))
    [done] = Engine(target, METHODS["plain"](target, "text"), 1, 64).run([wrong])
    assert done.error is not None
    assert "features of shape (2, 3) do not fit" in done.error.message


@pytest.mark.slow
def test_the_oracle_finds_a_null_embedding_in_place_of_the_negative_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    target = images.target("text")
    whole = type(target)._text_lanes
    monkeypatch.setattr(
        type(target),
        "_text_lanes",
        lambda self, prompt, condition: whole(
            self, prompt, condition.positive if isinstance(condition, ConditionPair) else condition
        ),
    )
    with pytest.raises(AssertionError):
        check_equal("plain", "greedy-guided", 4)
