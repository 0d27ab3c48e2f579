"""The measures of texts and images, and that the shipped pairs are as good as reported."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import numpy as np
import pytest

from models.target import Target
from pipeline.quality.frechet import frechet_distance
from zoo import quality, text, video
from zoo.image.quality import (
    Described,
    Reader,
    count_right,
    image_features,
    load_reader,
    measure_described,
)
from zoo.pair import CHECKPOINTS
from zoo.world import grammar, listing, motion, sample_scenes
from zoo.world.grain import sample_grainy
from zoo.world.scene import Scene, Thing, scene_rng

SHIPPED = json.loads(quality.REPORT.read_text())
STAR = Thing(2, "large", "red", "star")
RING = Thing(7, "medium", "teal", "ring")


@pytest.fixture(scope="module")
def reader() -> Reader:
    return load_reader()


@pytest.mark.parametrize("part", quality.PARTS)
def test_the_readme_shows_the_committed_tables(part: str) -> None:
    assert quality.quality_table(SHIPPED[part]) in (CHECKPOINTS.parent / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("part", "num"), [("caption", 24), ("video", 18), ("text", 9)])
def test_the_target_of_a_pair_is_as_good_as_reported_and_the_drafter_is_visibly_weaker(part: str, num: int) -> None:
    measured, shipped, noun = quality.measure(part, num=num, seed=99), SHIPPED[part], quality.PARTS[part][0]
    assert measured[f"target_{noun}s_right"] >= shipped[f"target_{noun}s_right"] - (0.3 if part == "video" else 0.18)
    assert measured["target_attributes_right"] >= shipped["target_attributes_right"] - 0.05
    assert measured["drafter_attributes_right"] <= measured["target_attributes_right"] - 0.1
    assert measured["mean_acceptance_length"] == pytest.approx(shipped["mean_acceptance_length"], abs=0.6)
    if part == "caption":
        assert measured["target_attributes_right"] >= 0.97
        assert 2.0 <= measured["mean_acceptance_length"] <= 4.5
        assert measured["attribute_top1_mean"] >= 0.95
        assert measured["filler_top1_mean"] <= 0.6
        assert measured["target_clip_right"] > 0.9


def test_the_target_follows_the_prompt_and_not_only_the_image(reader: Target) -> None:
    _, image, _, _ = sample_scenes("test", 1, 4)[0]
    questions = [quality.ask(prompt, [image], "") for prompt in grammar.PROMPTS.values()]
    parsed = [grammar.parse_caption(answer) for answer in quality.answer_all(reader, questions)]
    assert [caption and caption[0] for caption in parsed] == list(grammar.PROMPTS)


@pytest.mark.slow
def test_frames_in_reverse_are_another_caption() -> None:
    """The video target reads the order of the frames, not only what they show."""
    target = quality.load_target(CHECKPOINTS, "video_target")
    requests, score = quality.ask_video(target, 9, 99)
    clips = [request.videos[0] for request in requests]
    turned = [
        replace(request, videos=(replace(clip, frames=clip.frames[::-1].copy()),))
        for request, clip in zip(requests, clips, strict=True)
    ]
    assert not any(score(index, completion.text)[0] for index, completion in enumerate(quality.decode(target, turned)))


def test_attributes_are_counted_against_the_object_in_the_stated_cell() -> None:
    scene = Scene((Thing(0, "small", "red", "ring"), Thing(8, "large", "blue", "star")), "pale", "plain", 0)
    wrong = Scene((Thing(0, "small", "red", "star"), Thing(7, "large", "blue", "star")), "pale", "plain", 0)
    result = grammar.write_caption(wrong, "rows", random.Random(0))
    assert quality.count_attributes(scene, "rows", result) == (2 + 3 + 0, 10)
    assert quality.count_attributes(scene, "plain", result) == (0, 10)
    assert quality.count_attributes(scene, "rows", "nonsense") == (0, 10)


def test_all_attributes_of_a_true_text_are_right() -> None:
    rng = scene_rng("held_out", 4, 1)
    listed, moved = listing.draw_listed_scene(rng, "held_out"), motion.draw_motion(rng, "held_out")
    answer = listing.write_answer(listed, "survey", rng)
    assert text.attributes_right(listed, "survey", answer) == (2 + 4 * len(listed.things),) * 2
    right, total = video.attributes_right(moved, "detailed", motion.write_motion(moved, "detailed", rng))
    assert right == total >= 5


def test_two_answers_compare_by_what_they_state() -> None:
    answer = "Overall the second image looks alike, but a ring was removed."
    other = "Generally the second scene feels alike, but a ring was removed."
    assert quality.mask_fillers(answer) == quality.mask_fillers(other)
    assert quality.mask_fillers(answer) != quality.mask_fillers(other.replace("ring", "star"))


def test_the_frechet_distance_of_two_gaussians_is_the_textbook_s() -> None:
    rng = np.random.default_rng(0)
    base = rng.standard_normal((400, 3))
    base = (base - base.mean(0)) / base.std(0, ddof=1)
    base = base @ np.linalg.inv(np.linalg.cholesky(np.cov(base, rowvar=False))).T
    # Covariance I and diag(4, 1, 9) shifted by (1, 2, 0): 5 + (2 - 1)² + 0 + (3 - 1)².
    other = base * [2, 1, 3] + [1, 2, 0]
    assert frechet_distance(base, other) == pytest.approx(10.0)
    assert frechet_distance(other, base) == pytest.approx(10.0)
    assert frechet_distance(base, base) == pytest.approx(0.0, abs=1e-6)
    few = rng.standard_normal((3, 20))  # fewer images than features
    assert frechet_distance(few, few + 2) == pytest.approx(80.0)


@pytest.mark.parametrize("bad", [np.zeros((1, 3)), np.zeros((4, 2)), np.zeros(3), np.full((4, 3), np.nan)])
def test_sets_without_a_distance_are_refused(bad: np.ndarray) -> None:
    with pytest.raises(ValueError, match="features"):
        frechet_distance(np.eye(3), bad)


@pytest.mark.parametrize(
    ("seen", "right"),
    [
        (None, 0),
        (((STAR, RING), "dark"), 9),
        (((STAR, RING), "pale"), 8),
        (((STAR,), "dark"), 5),
        (((Thing(3, "large", "red", "star"),), "dark"), 1),
        (((Thing(2, "medium", "blue", "star"), RING), "dark"), 7),
        (((STAR, Thing(5, "large", "red", "ring"), RING), "dark"), 9),
    ],
)
def test_attributes_are_counted_where_the_prompt_puts_them(
    seen: tuple[tuple[Thing, ...], str] | None, right: int
) -> None:
    assert count_right(((STAR, RING), "dark"), seen) == right


def test_the_captioner_reads_true_pictures_of_any_size_and_denies_false_prompts(reader: Reader) -> None:
    samples = sample_grainy("test", 16, 5)
    images, prompts = [pixels for _, pixels, _ in samples], [prompt for _, _, prompt in samples]
    true = measure_described(reader, images, prompts)
    assert true.whole >= 15 / 16
    assert true.attributes > 0.98
    false = measure_described(reader, images, [*prompts[1:], prompts[0]])
    assert false.whole == 0
    assert false.attributes < 0.5
    twice = images[0].repeat(2, axis=0).repeat(2, axis=1)
    assert measure_described(reader, [twice], prompts[:1]) == Described(1.0, 1.0)


def test_noise_is_farther_from_pictures_than_other_pictures_are_in_any_batch(reader: Reader) -> None:
    images = [pixels for _, pixels, _ in sample_grainy("test", 40, 0)]
    noise = list(np.random.default_rng(0).integers(0, 256, (20, 96, 96, 3), dtype=np.uint8))
    first, others, noisy = (image_features(reader, some) for some in (images[:20], images[20:], noise))
    near, far = frechet_distance(first, others), frechet_distance(noisy, others)
    assert 0 < near < far / 3
    np.testing.assert_allclose(image_features(reader, images[:5], 2), first[:5], atol=1e-4)


def test_inputs_that_cannot_be_measured_are_refused(reader: Reader) -> None:
    image = np.zeros((96, 96, 3), dtype=np.uint8)
    with pytest.raises(ValueError, match="zip"):
        measure_described(reader, [image], [])
    with pytest.raises(ValueError, match="not a prompt of the grainy world: 'a cat'"):
        measure_described(reader, [image], ["a cat"])
