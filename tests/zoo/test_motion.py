"""Tests moving scenes: they are deterministic, splits are disjoint, paths are free, and captions parse back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.inputs.clip import Clip
from models.inputs.processing import FrontEnd
from zoo.training import IGNORED
from zoo.video.pair import NUM_FRAMES, build_processor, build_tokenizer
from zoo.video.quality import attributes_right
from zoo.video.samples import draw_batches, encode, label_tokens
from zoo.world import motion
from zoo.world.grammar import stated
from zoo.world.render import render_scene
from zoo.world.scene import COLOURS, GRID, Scene, Thing, draw_scene, scene_rng, split_of

ACROSS = motion.Motion(
    Scene((Thing(0, "large", "red", "star"), Thing(8, "small", "blue", "ring")), "dark", "dotted", 5), mover=0, end=2
)


def draw(index: int, split: str = "train") -> motion.Motion:
    return motion.draw_motion(scene_rng(split, 3, index), split)


@given(st.integers(0, 10_000), st.sampled_from(["train", "held_out", "demo", "test"]))
@settings(max_examples=60, deadline=None)
def test_a_motion_stays_in_its_split_and_runs_into_nothing(index: int, split: str) -> None:
    one = draw(index, split)
    assert split_of(one.scene) == split
    assert one.moving.cell != one.end
    if one.staying:
        x, y = one.staying.cell % GRID, one.staying.cell // GRID
        for moment in np.linspace(0, 1, 33):
            column, row = motion.place_at(one, float(moment))
            assert (column - x) ** 2 + (row - y) ** 2 >= 0.8**2 - 1e-9


@given(st.integers(0, 10_000), st.sampled_from(list(motion.PROMPTS)))
@settings(max_examples=60, deadline=None)
def test_a_caption_states_its_motion_and_no_other(index: int, phrasing: str) -> None:
    one, other = draw(index), draw(index + 20_000)
    text = motion.write_motion(one, phrasing, scene_rng("train", 9, index))
    assert motion.states(one, phrasing, text)
    assert motion.states(other, phrasing, text) == (
        motion.write_motion(other, phrasing, scene_rng("train", 9, index)) == text
    )
    right, total = attributes_right(one, phrasing, text)
    assert right == total >= 5


def test_words_inside_other_words_are_no_attributes() -> None:
    assert stated("a star, red and large, starts top left. It crosses plain pale ground.") == [
        "star", "red", "large", "top left", "plain", "pale",
    ]  # fmt: skip


def test_the_mover_rests_goes_straight_and_rests_again() -> None:
    assert motion.place_at(ACROSS, 0.0) == motion.place_at(ACROSS, motion.DWELL) == (0.0, 0.0)
    assert motion.place_at(ACROSS, 0.5) == (1.0, 0.0)
    assert motion.place_at(ACROSS, 1.0) == motion.place_at(ACROSS, 1.0 - motion.DWELL) == (2.0, 0.0)


def test_frames_differ_only_where_the_mover_is() -> None:
    first, *_, last = (np.asarray(frame).astype(int) for frame in motion.render_motion(ACROSS, NUM_FRAMES))
    changed = np.abs(first - last).max(axis=2) > 0
    assert changed[:32, :32].any()
    assert changed[:32, 64:].any()
    assert not changed[40:].any()


def test_a_motions_first_frame_is_its_scene() -> None:
    """A still scene and a moving one are drawn by the same hand."""
    assert motion.render_motion(ACROSS, 2)[0].tobytes() == render_scene(ACROSS.scene).tobytes()


def test_labels_name_the_object_of_a_cell_only() -> None:
    labels = label_tokens(ACROSS).view(6, NUM_FRAMES // 2, GRID, GRID)
    red = COLOURS.index("red")
    assert [int(labels[2, step, 0, column]) for step, column in ((0, 0), (3, 2))] == [red, red]
    assert int(labels[2, 0, 0, 2]) == IGNORED
    assert labels[0, :, 2, 2].tolist() == [1, 1, 1, 1]
    assert labels[0, :, 1, 0].tolist() == [0, 0, 0, 0]
    assert int(labels[0, 1, 0, 0]) == IGNORED


def test_a_training_sample_is_what_the_processor_sends_at_decoding() -> None:
    tokenizer = build_tokenizer()
    processor = build_processor(tokenizer)
    one = draw(7)
    frames = np.stack([np.asarray(frame) for frame in motion.render_motion(one, NUM_FRAMES)])
    front = FrontEnd(processor)
    content = [{"type": "video"}, {"type": "text", "text": motion.PROMPTS["moved"]}]
    prompt = front.render([{"role": "user", "content": content}])
    sent = front.encode(prompt, (), (Clip(frames, tuple(i / 4 for i in range(NUM_FRAMES)), 4.0),))
    ids, weights = encode(motion.PROMPTS["moved"], "The end.", tokenizer, 36)
    assert ids[: sent["input_ids"].shape[1]] == sent["input_ids"][0].tolist()
    assert not any(weights[: sent["input_ids"].shape[1]])
    assert ids[-1] == tokenizer.eos_token_id
    alone = processor.video_processor([frames], [None])
    assert torch.equal(sent["pixel_values_videos"], alone["pixel_values_videos"])
    assert sent["video_grid_thw"].tolist() == [[4, 6, 6]]


def test_batches_are_the_same_every_time_and_hold_no_word_in_pieces() -> None:
    tokenizer = build_tokenizer()
    videos = build_processor(tokenizer).video_processor
    one, other = (next(draw_batches("train", 4, 3, tokenizer, videos)) for _ in range(2))
    assert torch.equal(one.ids, other.ids)
    assert torch.equal(one.inputs["pixel_values_videos"], other.inputs["pixel_values_videos"])
    for words in motion.FILLERS.values():
        for word in words:
            assert len(tokenizer(f" {word}")["input_ids"]) == 1, word


@pytest.mark.parametrize("split", ["nowhere", ""])
def test_a_split_that_does_not_exist_is_refused(split: str) -> None:
    with pytest.raises(KeyError):
        draw_scene(scene_rng("train", 0, 0), split)
