"""Tests moving scenes: they are deterministic, splits are disjoint, paths are free, and captions parse back."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from zoo.training import IGNORED
from zoo.video import NUM_FRAMES, label_tokens
from zoo.world import motion
from zoo.world.render import render_scene
from zoo.world.scene import COLOURS, GRID, Scene, Thing, scene_rng, split_of

ACROSS = motion.Motion(
    Scene((Thing(0, "large", "red", "star"), Thing(8, "small", "blue", "ring")), "dark", "dotted", 5), mover=0, end=2
)


def draw(index: int, split: str = "train") -> motion.Motion:
    return motion.draw_motion(scene_rng(split, 3, index), split)


@given(st.integers(0, 10_000), st.sampled_from(["train", "held_out", "demo", "test"]))
@settings(max_examples=60, deadline=None)
def test_a_motion_stays_in_its_split_and_runs_into_nothing(index: int, split: str) -> None:
    drawn = draw(index, split)
    assert split_of(drawn.scene) == split
    assert drawn.moving.cell != drawn.end
    if drawn.staying:
        x, y = drawn.staying.cell % GRID, drawn.staying.cell // GRID
        for moment in np.linspace(0, 1, 33):
            column, row = motion.place_at(drawn, float(moment))
            assert (column - x) ** 2 + (row - y) ** 2 >= 0.8**2 - 1e-9


@given(st.integers(0, 10_000), st.sampled_from(list(motion.PROMPTS)))
@settings(max_examples=60, deadline=None)
def test_a_caption_states_its_motion_and_no_other(index: int, phrasing: str) -> None:
    first, other = draw(index), draw(index + 20_000)
    text = motion.write_motion(first, phrasing, scene_rng("train", 9, index))
    assert motion.states(first, phrasing, text)
    assert motion.states(other, phrasing, text) == (
        motion.write_motion(other, phrasing, scene_rng("train", 9, index)) == text
    )


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
