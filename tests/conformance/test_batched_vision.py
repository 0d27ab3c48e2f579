"""Images and videos of several prompts in one forward of the vision encoder: the same outputs, few forwards, and a bad
image costs its own row alone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.utils import ModelOutput

import models.inputs.vision as vision
from decoding import Completion, Engine, Method, Request, Sampling
from decoding.acceptance import Exact
from decoding.contexts import Full, Pruned
from decoding.drafters import ModelDrafter, NoDrafter
from decoding.drafters.ensemble import Ensemble, EnsembleOptions
from decoding.scheduling.admission import prompt_of
from decoding.trees import Chain
from models.inputs.content import Recent
from models.inputs.features import VisualFeatures
from models.inputs.prompt_prefetch import Prompt
from models.inputs.vision import EncoderCall, VisionEncoder
from models.target import Target
from tests import toys
from tests.conformance import checks
from tests.conformance.methods import VISUAL
from tests.models.inputs.test_packed_requests import packed

Patch = pytest.MonkeyPatch
PATCHES = (toys.IMAGE_SIZE_PX // toys.PATCH_PX) ** 2
"""Patches of an image of the toy LLaVA."""
SLOW = ("llava_next", "llava_onevision", "qwen3_vl_moe")
BLACK = np.zeros((16, 16, 3), np.uint8)


class Tower:
    """Counts the forwards of a target's vision encoder, which refuses black images if `is_strict`, and batches of more
    than `max_images` images for lack of memory."""

    def __init__(self, target: Target, is_strict: bool = False, max_images: int = 1000) -> None:
        owner: Any = target.model.model
        self.num_forwards = 0
        self.is_strict, self.max_images = is_strict, max_images
        (getattr(owner, "vision_tower", None) or owner.visual).register_forward_hook(self._count)
        self._inner = owner.get_image_features
        owner.get_image_features = self._check

    def _count(self, *_: Any) -> None:
        self.num_forwards += 1

    def _check(self, pixel_values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if len(pixel_values) > self.max_images:
            raise torch.OutOfMemoryError("no room for images")
        shown = (pixel_values[:, 0] if pixel_values.dim() == 5 else pixel_values).flatten(1)
        if self.is_strict and bool((shown.reshape(len(shown), 3, -1).std(-1) == 0).all(-1).any()):
            raise ValueError("a black image")
        return self._inner(pixel_values, *args, **kwargs)


def engine_of(target: Target, slots: int) -> Engine:
    return Engine(target, Method(NoDrafter(), Chain(1), Exact()), slots, 160)


def run(target: Target, slots: int, requests: Sequence[Request]) -> dict[str, Completion]:
    return {completion.sample_id: completion for completion in engine_of(target, slots).run(requests)}


def mixed(family: str) -> list[Request]:
    """Prompts without media, with images and with videos of several sizes, some equal, and two bad ones in the middle:
    the vision encoder refuses one, and the processor the other."""
    requests = checks.requests(family, 7)
    shown = next(request for request in requests if request.images and not request.videos)
    placeholder = toys.FAMILIES[family].placeholder
    black = Request("black", f"<s> w9 {placeholder} w7", (BLACK,), Sampling(max_new_tokens=4))
    missing = Request("missing", f"<s> w9 {placeholder} {placeholder}", (toys.picture(5, family),))
    twin = replace(shown, sample_id="twin", prompt=f"{shown.prompt} w8")
    return [*requests[:4], black, missing, twin, *requests[4:], replace(shown, sample_id="again")]


def check_mixed(family: str, slots: int) -> None:
    """All rows equal transformers' `generate`; the two bad ones have the errors that they have alone."""
    target = toys.target(family)
    Tower(target, is_strict=True)
    requests = mixed(family)
    done = run(target, slots, requests)
    assert len(done) == len(requests)
    alone = toys.target(family)
    Tower(alone, is_strict=True)
    for request in requests:
        completion = done[request.sample_id]
        if request.sample_id in ("black", "missing"):
            assert completion.error is not None
            assert completion.error == run(alone, 1, [request])[request.sample_id].error
        else:
            assert completion.error is None, completion.error
            assert completion.token_ids == checks.generated(family, request, target.eos_ids), request.sample_id
    assert done["black"].error.message == "the model refuses the prompt: a black image"  # type: ignore[union-attr]


@pytest.mark.slow_cases(*SLOW)
@pytest.mark.parametrize("slots", [1, 3, 9])
@pytest.mark.parametrize("family", VISUAL)
def test_outputs_equal_generate_and_bad_images_cost_their_rows_alone(family: str, slots: int) -> None:
    check_mixed(family, slots)


def pictures(count: int) -> list[Request]:
    """Rows with one image each, all different."""
    sampling = Sampling(max_new_tokens=1)
    return [Request(f"{i}", f"<s> w{4 + i % 50} <image> w7", (toys.picture(i),), sampling) for i in range(count)]


def warm(family: str = "llava", **options: Any) -> tuple[Target, Tower]:
    """A target whose vision encoder is proven for images of one size and of several."""
    target = toys.target(family)
    tower = Tower(target, **options)
    checks.run(engine_of(target, 9), checks.requests(family, 9))
    tower.num_forwards = 0
    return target, tower


@pytest.mark.parametrize("num_images", [1, 5, 28, 128])
@pytest.mark.parametrize("way", ["now", "thread", "thread, packed"])
def test_the_number_of_forwards_follows_from_the_bound_of_patches(
    num_images: int, way: str, monkeypatch: Patch
) -> None:
    monkeypatch.setattr("models.target.MAX_PATCHES", PATCHES * num_images + PATCHES - 1)
    monkeypatch.setattr("decoding.scheduling.admission.MAX_WAIT_S", 600.0)
    monkeypatch.setattr("decoding.scheduling.admission.MAX_UNKNOWN", 128)
    target, tower = warm()
    requests = pictures(128)
    if way != "now":
        target.prefetch_prompts()
    if way == "thread, packed":
        monkeypatch.setattr("decoding.scheduling.admission.MAX_UNKNOWN", 1)
        requests = [packed(request, toys.front_end("llava")) for request in requests]
    checks.run(engine_of(target, 128), requests)
    assert tower.num_forwards == -(-128 // num_images)


@pytest.mark.slow_cases(*SLOW)
@pytest.mark.parametrize("family", VISUAL)
def test_images_of_all_prompts_run_in_one_forward_and_videos_in_one_for_each_shape(family: str) -> None:
    target, tower = warm(family)
    requests = checks.requests(family, 9)
    checks.run(engine_of(target, 9), requests)
    num_frames = {len(clip.frames) for request in requests for clip in request.videos}
    num_video_forwards = len(num_frames) if family == "llava_onevision" else min(1, len(num_frames))
    assert tower.num_forwards == 1 + num_video_forwards


def check_equal_images_run_once() -> None:
    target, tower = warm()
    first = pictures(6)
    requests = [
        *first,
        *(replace(request, sample_id=f"{i}+", prompt="<s> <image> w9") for i, request in enumerate(first)),
    ]
    prompts = [target.front_end.encode(request.prompt, request.images) for request in first]
    seen: list[int] = []
    owner: Any = target.model.model
    owner.vision_tower.register_forward_pre_hook(lambda _module, args: seen.append(len(args[0])))
    checks.run(engine_of(target, 12), requests)
    assert (tower.num_forwards, seen) == (1, [len(prompts)])
    target.keep_features(1 << 26)
    checks.run(engine_of(target, 12), requests)
    engine = engine_of(target, 12)
    checks.run(engine, requests)
    assert (tower.num_forwards, engine.stats.num_feature_hits) == (2, 12)


def test_equal_images_run_once_and_cached_ones_not_at_all() -> None:
    check_equal_images_run_once()


@pytest.mark.parametrize("contexts", ["full", "full and pruned"])
def test_a_drafters_prompts_run_in_one_forward_too(contexts: str) -> None:
    drafter, tower = warm()
    target = toys.target("llava")
    parts = [Full()] if contexts == "full" else [Full(), Pruned(0.5)]
    merge = {} if contexts == "full" else {"merge": Ensemble(EnsembleOptions())}
    method = Method(ModelDrafter(drafter, parts, toys.VOCAB_SIZE, **merge), Chain(3), Exact())
    requests = [replace(request, sampling=Sampling(max_new_tokens=6)) for request in pictures(9)]
    done = checks.run(Engine(target, method, 9, 160), requests)
    assert tower.num_forwards == 1
    for request in requests:
        assert done[request.sample_id].token_ids == checks.generated("llava", request, target.eos_ids)


@pytest.mark.parametrize("max_images", [1, 2, 5])
def test_out_of_memory_halves_the_batch_and_goes_on(max_images: int) -> None:
    target, tower = warm()
    tower.max_images = max_images
    requests = pictures(16)
    done = checks.run(engine_of(target, 16), requests)
    assert tower.num_forwards == {1: 16, 2: 8, 5: 4}[max_images]
    for request in requests:
        assert done[request.sample_id].token_ids == checks.generated("llava", request, target.eos_ids)
    tower.max_images = 0
    with pytest.raises(torch.OutOfMemoryError, match="no room for images"):
        checks.run(engine_of(target, 16), requests)


def test_a_drafter_that_is_out_of_memory_costs_no_output() -> None:
    drafter = toys.target("llava")
    Tower(drafter, max_images=0)
    target = toys.target("llava")
    method = Method(ModelDrafter(drafter, [Full()], toys.VOCAB_SIZE), Chain(3), Exact())
    text = Request("text", "<s> w5 w9", sampling=Sampling(max_new_tokens=6))
    requests = [*(replace(request, sampling=Sampling(max_new_tokens=6)) for request in pictures(3)), text]
    done = checks.run(Engine(target, method, 4, 160), requests)
    assert [done[request.sample_id].telemetry.degraded for request in requests] == [True, True, True, False]
    for request in requests:
        assert done[request.sample_id].token_ids == checks.generated("llava", request, target.eos_ids)


def test_a_text_is_encoded_before_the_next_prompt_is_taken() -> None:
    target = toys.target("llava")
    taken: list[int] = []

    def prompts() -> Any:
        for number, text in enumerate(["<s> w5", "<s> w6 w7"]):
            taken.append(number)
            yield vision_prompt(text)

    encoding = target.encode_prompts(prompts())
    assert next(encoding).num_tokens == 2  # type: ignore[union-attr]
    assert taken == [0]


def vision_prompt(text: str, *images: Any) -> Prompt:
    return prompt_of(Request("", text, images))


def leaks_between_images(target: Target) -> None:
    owner: Any = target.model.model
    inner = owner.get_image_features

    def mixed_up(*args: Any, **kwargs: Any) -> Any:
        out = inner(*args, **kwargs)
        mean = torch.stack(list(out.pooler_output)).mean(0)
        out.pooler_output = [features + 0.01 * mean for features in out.pooler_output]
        return out

    owner.get_image_features = mixed_up


def refuses_batches(target: Target) -> None:
    owner: Any = target.model.model
    inner = owner.get_image_features

    def strict(pixel_values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        assert len(pixel_values) == 1, "one image at a time"
        return inner(pixel_values, *args, **kwargs)

    owner.get_image_features = strict


def returns_flat_features(target: Target) -> None:
    owner: Any = target.model.model
    inner = owner.get_image_features

    def flat(*args: Any, **kwargs: Any) -> Any:
        out = inner(*args, **kwargs)
        out.pooler_output = torch.cat(list(out.pooler_output)).split(3)
        return out

    owner.get_image_features = flat


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (leaks_between_images, "features of a batch differ from those of one prompt by "),
        (refuses_batches, "the model refuses a batch (one image at a time"),
        (returns_flat_features, "features are not one for each image or video"),
    ],
)
def test_a_family_that_cannot_be_batched_runs_prompt_by_prompt_and_says_why_once(
    change: Callable[[Target], None], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    target = toys.target("llava")
    change(target)
    requests = pictures(5)
    expected = [target.encode(request.prompt, request.images).embeds for request in requests]
    caplog.set_level(logging.WARNING)
    for _ in range(2):
        encoded = target.encode_prompts(vision_prompt(request.prompt, *request.images) for request in requests)
        for prompt, embeds in zip(encoded, expected, strict=True):
            torch.testing.assert_close(prompt.lanes[0].embeds, embeds)  # type: ignore[union-attr]
    messages = [record.message for record in caplog.records if record.name == vision.__name__]
    assert len(messages) == 1
    assert messages[0].startswith("llava: get_image_features runs prompt by prompt: ")
    assert reason in messages[0]


def check_storage(family: str) -> None:
    """Features of one prompt keep no others in memory."""
    target, _ = warm(family)
    target.keep_features(1 << 26)
    checks.run(engine_of(target, 9), checks.requests(family, 9))
    num_tensors = 0
    for features, _ in target._features._recent._entries.values():
        for value in features.values():
            for tensor in vision._tensors(value):
                assert tensor.untyped_storage().nbytes() == tensor.nbytes, family
                num_tensors += 1
    assert num_tensors > 5


@pytest.mark.slow_cases(*SLOW)
@pytest.mark.parametrize("family", VISUAL)
def test_features_of_one_prompt_keep_no_others_in_memory(family: str) -> None:
    check_storage(family)


def test_patches_that_do_not_fill_their_grid_do_not_shift_the_features_of_other_prompts() -> None:
    target, _ = warm("qwen2_5_vl")
    pixels = [torch.randn(16, 96, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    grids = [torch.tensor([[1, 4, 4]]) for _ in range(3)]
    good = [EncoderCall("get_image_features", (rows, grid), {"return_dict": True}) for rows, grid in zip(pixels, grids)]
    longer = EncoderCall("get_image_features", (torch.cat([pixels[0], pixels[0][:4]]), grids[0]), {"return_dict": True})
    shorter = EncoderCall("get_image_features", (pixels[0][:12], grids[0]), {"return_dict": True})
    encoder = target._features.encoder
    results = encoder.run([good[0], longer, shorter, good[1], good[2]])
    for result, call in zip([results[0], results[3], results[4]], good, strict=True):
        torch.testing.assert_close(result.pooler_output, encoder.run([call])[0].pooler_output)
    for result, call in zip(results[1:3], (longer, shorter), strict=True):
        assert isinstance(result, Exception)
        assert str(result) == str(encoder.run([call])[0])


# --- planted faults -----------------------------------------------------------------------------------------------


def features_go_to_another_row(patch: Patch) -> None:
    split = vision._split

    def reversed_split(features: Any, *rest: Any) -> list[Any]:
        parts = split(features, *rest)
        return parts[::-1] if isinstance(features, ModelOutput) else parts

    patch.setattr(vision, "_split", reversed_split)


def rows_keep_the_batch(patch: Patch) -> None:
    patch.setattr(vision, "_copied", lambda features: features)


def a_bad_image_costs_its_neighbours(patch: Patch) -> None:
    def run_alike(self: VisionEncoder, calls: list[EncoderCall]) -> list[Any]:
        try:
            return self._run_together(calls) if len(calls) > 1 else [self._run_alone(calls[0])]
        except ValueError as error:
            return [error] * len(calls)

    patch.setattr(VisionEncoder, "_run_alike", run_alike)


def cached_features_are_ignored(patch: Patch) -> None:
    patch.setattr(Recent, "get", lambda self, key: None)
    patch.setattr(Recent, "keep", lambda self, *_: None)


def equal_images_are_not_shared(patch: Patch) -> None:
    embed = VisualFeatures.embed
    patch.setattr(VisualFeatures, "embed", lambda self, prompts: [embed(self, [prompt])[0] for prompt in prompts])


FAULTS: list[tuple[Callable[[Patch], None], Callable[[], None], bool]] = [
    (features_go_to_another_row, lambda: check_mixed("llava_next", 9), True),
    (features_go_to_another_row, lambda: check_mixed("qwen3_vl", 9), True),
    (rows_keep_the_batch, lambda: check_storage("qwen2_5_vl"), False),
    (rows_keep_the_batch, lambda: check_storage("llava"), False),
    (a_bad_image_costs_its_neighbours, lambda: check_mixed("llava", 9), False),
    (cached_features_are_ignored, check_equal_images_run_once, False),
    (equal_images_are_not_shared, check_equal_images_run_once, False),
]


@pytest.mark.parametrize(
    ("fault", "check", "unproven"), FAULTS, ids=[f"{i}-{f.__name__}" for i, (f, *_) in enumerate(FAULTS)]
)
def test_a_planted_fault_is_caught(
    fault: Callable[[Patch], None], check: Callable[[], None], unproven: bool, monkeypatch: Patch
) -> None:
    fault(monkeypatch)
    if unproven:  # the first batch would find it too
        monkeypatch.setattr(VisionEncoder, "_difference", lambda *_: "")
    with pytest.raises((AssertionError, RuntimeError)):  # deepstack features of another number of tokens do not fit
        check()


def test_the_first_batch_finds_features_of_another_row(monkeypatch: Patch, caplog: pytest.LogCaptureFixture) -> None:
    features_go_to_another_row(monkeypatch)
    check_mixed("llava", 9)
    assert "differ from those of one prompt" in caplog.text
