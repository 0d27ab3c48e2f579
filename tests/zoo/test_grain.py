"""Tests the scenes with grain: prompts parse back, splits are disjoint, and the seed determines the grain."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zoo.image.gpt import NUM_CLASSES, class_of, draw_scenes
from zoo.world.grain import parse_prompt, render_grainy, sample_grainy, write_prompt
from zoo.world.scene import SPLITS, split_of


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32), split=st.sampled_from(sorted(SPLITS)))
def test_a_prompt_reads_back_to_its_scene_and_a_scene_stays_in_its_split(seed: int, split: str) -> None:
    (scene,) = draw_scenes("text", split, 1, seed)
    assert split_of(scene) == split
    assert scene.texture == "plain"
    assert {thing.size for thing in scene.things} <= {"medium", "large"}
    assert parse_prompt(write_prompt(scene)) == (scene.things, scene.tone)


def test_the_same_numbers_give_the_same_pixels_and_another_seed_other_grain() -> None:
    (scene, pixels, prompt), *_ = sample_grainy("held_out", 2, 7)
    again, *_ = sample_grainy("held_out", 1, 7)
    assert again[0] == scene
    assert again[2] == prompt
    assert np.array_equal(again[1], pixels)
    other = render_grainy(dataclasses.replace(scene, look_seed=scene.look_seed + 1))
    assert (np.abs(other.astype(int) - pixels) > 8).mean() > 0.3


def test_grain_changes_brightness_and_leaves_colour() -> None:
    (_, pixels, _), *_ = sample_grainy("held_out", 1, 0)
    ground = pixels[(pixels.max(-1).astype(int) - pixels.min(-1)) == 0]
    assert len(ground) > 4000
    assert 12 < ground[:, 0].astype(float).std() < 25


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a cat",
        "a small red circle at the top left on dark ground",
        "a large red circle at the top left on dark ground please",
        "a large red circle at the top left and a large red circle at the top left on dark ground",
    ],
)
def test_other_texts_are_no_prompts(text: str) -> None:
    assert parse_prompt(text) is None


def test_a_prompt_may_name_its_objects_in_any_order() -> None:
    swapped = parse_prompt("a large red star at the top right and a medium teal ring at the top left on pale ground")
    assert swapped is not None
    assert [thing.cell for thing in swapped[0]] == [0, 2]


def test_classes_are_colour_and_shape_and_all_occur() -> None:
    scenes = draw_scenes("class", "train", 600, 0)
    assert {len(scene.things) for scene in scenes} == {1}
    assert {class_of(scene) for scene in scenes} == set(range(NUM_CLASSES))
