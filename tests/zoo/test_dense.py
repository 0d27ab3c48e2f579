"""Tests dense scenes: their captions, their pixels, and the labels and words of their patches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zoo.real_vision.model import CELL, IMAGE_PX, SIDE
from zoo.real_vision.recipe import HEADS, WORDS, label_patches, words_of
from zoo.training import IGNORED
from zoo.world.dense import GRID, MAX_OBJECTS, MIN_OBJECTS, PROMPTS, ROWS_OF, draw_dense, states, write_description
from zoo.world.grammar import stated
from zoo.world.render import RGB, render_scene
from zoo.world.scene import COLOURS, SHAPES, SIZES, Scene, Thing, scene_rng, split_of

SEEDS = st.integers(0, 2**32 - 1)
PHRASINGS = st.sampled_from(list(PROMPTS))


@given(SEEDS, PHRASINGS)
def test_captions_are_long_and_state_few_attributes(seed: int, phrasing: str) -> None:
    rng = scene_rng("train", seed, 0)
    scene = draw_dense(rng, "train")
    assert MIN_OBJECTS <= len(scene.things) <= MAX_OBJECTS
    assert split_of(scene) == "train"
    caption = write_description(scene, phrasing, rng)
    words = caption.split()
    assert 60 <= len(words) <= 200
    assert 0 < len(stated(caption)) < 0.2 * len(words)


@given(SEEDS, PHRASINGS, st.data())
def test_a_caption_is_of_its_scene_only(seed: int, phrasing: str, data: st.DataObject) -> None:
    rng = scene_rng("train", seed, 0)
    scene = draw_dense(rng, "train")
    caption = write_description(scene, phrasing, rng)
    assert states(scene, phrasing, caption)
    assert not any(states(scene, other, caption) for other in PROMPTS if other != phrasing)
    told = [thing for thing in scene.things if thing.cell // GRID in ROWS_OF[phrasing]]
    if phrasing == "overview":  # only the first object of each row is described
        told = [
            thing for thing in told if thing.cell == min(t.cell for t in told if t.cell // GRID == thing.cell // GRID)
        ]
    if not told:
        return
    thing = data.draw(st.sampled_from(told))
    name, values = data.draw(st.sampled_from([("size", SIZES), ("colour", COLOURS), ("shape", SHAPES)]))
    other = data.draw(st.sampled_from([value for value in values if value != getattr(thing, name)]))
    changed = tuple(replace(drawn, **{name: other}) if drawn is thing else drawn for drawn in scene.things)
    assert not states(replace(scene, things=changed), phrasing, caption)
    fewer = tuple(drawn for drawn in scene.things if drawn is not thing)
    assert not states(replace(scene, things=fewer), phrasing, caption)


def test_an_empty_row_is_stated() -> None:
    scene = Scene((Thing(12, "small", "red", "ring"),), "pale", "plain", 0, GRID)
    for phrasing, number in (("overview", 3), ("upper", 2), ("lower", 1)):
        caption = write_description(scene, phrasing, scene_rng("train", 0, 0))
        assert caption.count("empty from one side to the other") == number
        assert states(scene, phrasing, caption)


@pytest.mark.parametrize("cell", range(GRID * GRID))
def test_an_object_is_drawn_and_labelled_in_its_cell(cell: int) -> None:
    scene = Scene((Thing(cell, "large", "red", "square"),), "pale", "plain", 0, GRID)
    pixels = np.asarray(render_scene(scene, IMAGE_PX)).astype(int)
    is_red = np.abs(pixels - np.array(RGB["red"])).sum(-1) < 60
    rows, columns = (line.mean() / (IMAGE_PX / GRID) for line in is_red.nonzero())
    assert (int(rows), int(columns)) == divmod(cell, GRID)
    labels = dict(zip(HEADS, label_patches(scene).reshape(len(HEADS), SIDE, SIDE), strict=True))
    row, column = (CELL * part for part in divmod(cell, GRID))
    filled = labels["filled"].nonzero().tolist()
    assert filled == [[row + y, column + x] for y in range(CELL) for x in range(CELL)]
    assert (labels["shape"][labels["filled"] == 1] == SHAPES.index("square")).all()
    assert (labels["shape"][labels["filled"] == 0] == IGNORED).all()
    assert [WORDS[word] for word in labels["word"][row + 1, column : column + CELL]] == ["large", "red", "square", ","]
    assert labels["count"][:, 0].tolist() == [int(y // CELL == cell // GRID) for y in range(SIDE)]


def test_the_words_of_a_row_count_its_objects_and_name_the_ground() -> None:
    things = (Thing(4, "small", "teal", "ring"), Thing(7, "large", "pink", "star"))
    lines = words_of(Scene(things, "dark", "dotted", 0, GRID))
    assert [len(line) for line in lines] == [SIDE] * SIDE
    assert lines[4][:4] == ["upper", "row", "has", "two"]
    assert [word for word in lines[5] if word != ","] == ["small", "teal", "ring", "large", "pink", "star"]
    assert lines[6] == ["dark", "dotted", "background", ","] * GRID
    assert lines[0][:4] == ["top", "row", "has", "zero"]
