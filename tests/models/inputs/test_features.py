"""Cached visual features: reused for the same image under any prompt, and for no other image."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from decoding import Engine, Method, Request, Sampling
from decoding.acceptance import Exact
from decoding.contexts import Full, Pooled
from decoding.drafters import ModelDrafter, NoDrafter
from decoding.drafters.ensemble import Ensemble, EnsembleOptions
from decoding.trees import Chain
from models.inputs import features
from models.inputs.processing import PromptError
from models.target import Target
from tests import toys
from tests.conformance import checks
from tests.conformance.methods import VISUAL

ROOM = 64 * 1024**2
Patch = pytest.MonkeyPatch


def keeping(family: str, max_bytes: int = ROOM, noise: float = 0.0) -> Target:
    target = toys.perturbed(family, noise) if noise else toys.target(family)
    target.keep_features(max_bytes)
    return target


def asked_again(family: str) -> list[Request]:
    """Two samples, one of them with a video where the family takes one, asked three prompts each, in turns."""
    made = []
    for turn in range(3):
        for sample in range(2):
            text, images = toys.prompt(family, sample)
            text, videos = toys.with_video(family, text, sample) if sample else (text, ())
            words = f"{text} w{30 + turn} w{7 * turn + 5}"
            limits = Sampling(max_new_tokens=6 + turn)
            made.append(Request(f"{sample}-{turn}", words, images, limits, videos=videos))
    return made


def check_answers(family: str, target: Target, slots: int = 1) -> Engine:
    engine = Engine(target, Method(NoDrafter(), Chain(1), Exact()), slots, 160)
    wanted = asked_again(family)
    done = checks.run(engine, wanted)
    for request in wanted:
        assert done[request.sample_id].token_ids == checks.generated(family, request, target.eos_ids), request.sample_id
    return engine


@pytest.mark.parametrize("family", VISUAL)
def test_repeated_images_are_encoded_once_and_outputs_equal_generate(family: str) -> None:
    target = keeping(family)
    engine = check_answers(family, target)
    num_doors = sum(bool(request.images) + bool(request.videos) for request in asked_again(family)[:2])
    assert engine.stats.num_feature_hits == 2 * num_doors == target.num_feature_hits
    assert 0 < target._features._recent.num_bytes <= ROOM
    # With a slot for each they are admitted together, and still encoded one after the other.
    assert check_answers(family, target, 6).stats.num_feature_hits == 3 * num_doors


def test_features_are_not_cached_by_default() -> None:
    assert check_answers("llava", toys.target("llava")).stats.num_feature_hits == 0
    assert check_answers("llava", keeping("llava", 0)).stats.num_feature_hits == 0


@pytest.mark.parametrize("family", VISUAL)
def test_the_model_itself_is_not_patched(family: str) -> None:
    target = toys.target(family)
    objects = (target.model, target.model.model)
    before = [set(vars(item)) for item in objects]
    modules = [dict(item._modules) for item in objects]
    target.keep_features(ROOM)
    text, images = toys.prompt(family, 2)
    assert images
    for _ in range(2):
        target.encode(text, images)
    assert target.num_feature_hits == 1
    assert [set(vars(item)) for item in objects] == before
    assert [dict(item._modules) for item in objects] == modules
    assert not {*features.METHODS} & {*vars(target.model), *vars(target.model.model)}


def test_other_pixels_of_the_same_size_and_text_miss_the_feature_cache() -> None:
    target = keeping("llava")
    text, images = toys.prompt("llava", 2)
    shown = [tuple(np.roll(image, shift, axis=1) for image in images) for shift in range(3)]
    first = [target.encode(text, images).embeds for images in shown]
    again = [target.encode(text, images).embeds for images in shown]
    assert target.num_feature_hits == 3
    for before, other in zip(first, again, strict=True):
        torch.testing.assert_close(before, other, atol=0, rtol=0)
    assert not torch.equal(first[0], first[1])


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_an_image_and_a_video_of_one_prompt_have_features_of_their_own(family: str) -> None:
    text, images = toys.prompt(family, 2)
    text, videos = toys.with_video(family, text, 2)
    assert images
    assert videos
    wanted = toys.target(family).encode(text, images, videos)
    target = keeping(family)
    for hits in (0, 2, 4):
        prefix = target.encode(text, images, videos)
        assert target.num_feature_hits == hits
        torch.testing.assert_close(prefix.embeds, wanted.embeds)
        torch.testing.assert_close(prefix.positions, wanted.positions)
        assert len(prefix.deepstack) == len(wanted.deepstack)
        for mine, theirs in zip(prefix.deepstack, wanted.deepstack, strict=True):
            torch.testing.assert_close(mine, theirs)


def test_an_array_that_the_caller_changes_misses_the_feature_cache() -> None:
    target = keeping("llava")
    text, images = toys.prompt("llava", 2)
    before = target.encode(text, images).embeds
    images[0][:] = 255 - images[0]
    after = target.encode(text, images).embeds
    assert target.num_feature_hits == 0
    assert not torch.equal(before, after)


def test_the_feature_cache_evicts_the_least_recently_used_entry_and_stays_within_its_bound() -> None:
    text, images = toys.prompt("llava", 2)
    pictures = [tuple(np.roll(image, shift, axis=1) for image in images) for shift in range(4)]
    whole = keeping("llava")
    whole.encode(text, pictures[0])
    entry_bytes = whole._features._recent.num_bytes
    target = keeping("llava", 2 * entry_bytes)
    hits = []
    for index in (0, 1, 0, 2, 0, 1, 3, 3):
        target.encode(text, pictures[index])
        assert target._features._recent.num_bytes <= 2 * entry_bytes
        hits.append(target.num_feature_hits)
    assert hits == [0, 0, 1, 1, 2, 2, 2, 3]
    assert target._features._recent.num_bytes == sum(size for _, size in target._features._recent._entries.values())
    small = keeping("llava", entry_bytes - 1)
    small.encode(text, pictures[0])
    small.encode(text, pictures[0])
    assert (small.num_feature_hits, small._features._recent.num_bytes) == (0, 0)


def test_only_outputs_that_the_model_reads_are_cached() -> None:
    target = keeping("llava")
    text, images = toys.prompt("llava", 2)
    target.encode(text, images)
    (((kept), size),) = target._features._recent._entries.values()
    (held,) = kept.values()
    assert set(held.keys()) == {"pooler_output"}
    assert size < 20 * sum(image.nbytes for image in images) + 4 * target.hidden_size * 1000


def test_a_refused_prompt_leaves_nothing_and_the_next_one_is_served() -> None:
    target = keeping("llava")
    text, images = toys.prompt("llava", 2)
    with pytest.raises(PromptError):
        target.encode(f"{text} <image>", images)
    wanted = toys.target("llava").encode(text, images).embeds
    for _ in range(2):
        torch.testing.assert_close(target.encode(text, images).embeds, wanted)
    assert target.num_feature_hits == 1


def test_contexts_that_change_features_do_not_use_the_feature_cache() -> None:
    drafter = keeping("llava", noise=0.02)
    merge = Ensemble(EnsembleOptions("matches", steps=4))
    method = Method(ModelDrafter(drafter, [Full(), Pooled()], toys.VOCAB_SIZE, merge), Chain(4), Exact())
    target = keeping("llava")
    wanted = asked_again("llava")
    done = checks.run(Engine(target, method, 1, 160), wanted)
    for request in wanted:
        assert done[request.sample_id].token_ids == checks.generated("llava", request, target.eos_ids)
    pooled = Pooled().build(wanted[0], None, drafter)  # type: ignore[arg-type]
    alone = Pooled().build(wanted[0], None, toys.perturbed("llava", 0.02))  # type: ignore[arg-type]
    torch.testing.assert_close(pooled.embeds, alone.embeds)
