"""Tests the synthetic scenes: captions parse back to their scenes, splits are disjoint, rendering is deterministic."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zoo.world import dialogue, grammar, listing, sample_scenes
from zoo.world.render import NATIVE_PX, render_scene
from zoo.world.scene import (
    COLOURS,
    NUM_CELLS,
    SHAPES,
    SIZES,
    SPLITS,
    TEXTURES,
    TONES,
    Scene,
    Thing,
    change_scene,
    draw_clip,
    draw_scene,
    scene_rng,
    split_of,
)


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    cells = sorted(draw(st.sets(st.integers(0, NUM_CELLS - 1), min_size=1, max_size=4)))
    kind = st.tuples(st.sampled_from(SIZES), st.sampled_from(COLOURS), st.sampled_from(SHAPES))
    things = tuple(Thing(cell, *draw(kind)) for cell in cells)
    return Scene(things, draw(st.sampled_from(TONES)), draw(st.sampled_from(TEXTURES)), draw(st.integers(0, 2**32 - 1)))


@settings(max_examples=150, deadline=None)
@given(scene=scenes(), phrasing=st.sampled_from(list(grammar.PROMPTS)), seed=st.integers(0, 2**31))
def test_every_caption_reads_back_to_its_phrasing_and_its_scene(scene: Scene, phrasing: str, seed: int) -> None:
    caption = grammar.write_caption(scene, phrasing, random.Random(seed))
    assert grammar.parse_caption(caption) == (phrasing, scene.truth)


@settings(max_examples=60, deadline=None)
@given(scene=scenes(), phrasing=st.sampled_from(list(grammar.PROMPTS)), where=st.integers(0, 10**6))
def test_a_caption_with_one_word_changed_never_reads_back_to_the_same_scene(
    scene: Scene, phrasing: str, where: int
) -> None:
    words = grammar.write_caption(scene, phrasing, random.Random(where)).split()
    position = where % len(words)
    old = words[position].strip(".,:;")
    words[position] = words[position].replace(old, "banana")
    assert grammar.parse_caption(" ".join(words)) is None


def test_a_wrong_colour_reads_back_to_another_scene() -> None:
    scene = Scene((Thing(4, "small", "red", "ring"),), "pale", "dotted", 1)
    caption = grammar.write_caption(scene, "story", random.Random(0))
    parsed = grammar.parse_caption(caption.replace("red", "blue"))
    assert parsed == ("story", ((Thing(4, "small", "blue", "ring"),), "pale", "dotted"))


def test_filler_words_are_drawn_with_the_stated_odds_whatever_the_scene() -> None:
    for colour in ("red", "blue"):
        scene = Scene((Thing(0, "large", colour, "star"),), "dark", "plain", 3)
        rng = random.Random(5)
        firsts = Counter(grammar.write_caption(scene, "story", rng).split()[0] for _ in range(4000))
        shares = [firsts[word] / 4000 for word in grammar.FILLERS["someone"]]
        assert shares == pytest.approx(grammar.FILLER_ODDS, abs=0.03)


def test_no_filler_word_is_an_attribute_or_in_two_slots() -> None:
    words = [word for slot in grammar.FILLERS.values() for word in slot]
    assert len(words) == len(set(words))
    assert not set(words) & {*SIZES, *COLOURS, *SHAPES, *TONES, *TEXTURES, *grammar.COLUMNS}


def test_scenes_of_different_splits_never_share_their_contents() -> None:
    bounds = sorted(SPLITS.values())
    assert (bounds[0][0], bounds[-1][1]) == (0, 100)
    assert all(left[1] == right[0] for left, right in itertools.pairwise(bounds))
    contents = {}
    for split in SPLITS:
        drawn = [draw_scene(scene_rng(split, 0, index), split) for index in range(400)]
        assert {split_of(scene) for scene in drawn} == {split}
        contents[split] = {
            (scene.tone, scene.texture, tuple(sorted((t.size, t.colour, t.shape) for t in scene.things)))
            for scene in drawn
        }
    for split_name in SPLITS:
        for other in SPLITS:
            assert split_name == other or not contents[split_name] & contents[other]


def test_changed_scenes_and_the_frames_of_a_clip_stay_in_their_split() -> None:
    for index in range(40):
        rng = scene_rng("test", 1, index)
        before = draw_scene(rng, "test")
        after, _, _ = change_scene(rng, before, "test")
        assert split_of(after) == "test"
        assert after.truth != before.truth
        frames = draw_clip(rng, "test", 4)
        assert {split_of(frame) for frame in frames} == {"test"}
        assert frames[0].things[0].cell != frames[-1].things[0].cell


def test_the_answer_to_what_changed_names_the_one_change() -> None:
    thing = Thing(2, "large", "green", "cross")
    before = Scene((thing,), "grey", "plain", 0)
    after = Scene((Thing(2, "large", "pink", "cross"),), "grey", "plain", 1)
    result = dialogue.write_change(before, after, "colour", 0, random.Random(0))
    assert result.endswith("but the large green cross at the top right now has another colour: pink.")
    moved = Scene((Thing(6, "large", "green", "cross"),), "grey", "plain", 1)
    result = dialogue.write_change(before, moved, "moved", 0, random.Random(0))
    assert result.endswith("but the large green cross at the top right was moved to the bottom left.")


@pytest.mark.parametrize("draw", [draw_scene, listing.draw_listed_scene])
def test_a_split_that_does_not_exist_is_refused_by_name(draw: Callable[[random.Random, str], Scene]) -> None:
    with pytest.raises(KeyError, match="no split 'validation'"):
        draw(random.Random(0), "validation")


@settings(max_examples=60, deadline=None)
@given(index=st.integers(0, 10_000), phrasing=st.sampled_from(list(listing.ASKED)))
def test_an_answer_states_its_listed_scene_and_no_other(index: int, phrasing: str) -> None:
    rng = scene_rng("held_out", 4, index)
    first, other = listing.draw_listed_scene(rng, "held_out"), listing.draw_listed_scene(rng, "held_out")
    assert split_of(first) == "held_out"
    text = listing.write_answer(first, phrasing, rng)
    assert listing.states(first, phrasing, text)
    assert not listing.states(other, phrasing, text) or first == other
    assert not listing.states(first, phrasing, text.replace(".", "", 1))


def test_a_prompt_lists_everything_in_the_answer() -> None:
    scene = Scene((Thing(0, "small", "red", "ring"), Thing(4, "large", "blue", "star")), "pale", "dotted", 0)
    assert listing.write_prompt(scene, "tour") == (
        "Ground: pale, dotted. Objects: one, small red ring, top left; two, large blue star, middle centre. "
        "Tell me about the objects one by one."
    )
    stated = grammar.stated(listing.write_answer(scene, "survey", scene_rng("test", 0, 0)))
    assert stated == ["top left", "ring", "small", "red", "middle centre", "star", "large", "blue", "dotted", "pale"]


def test_the_same_seed_gives_the_same_pixels_and_words() -> None:
    first, other = sample_scenes("demo", 6, 11), sample_scenes("demo", 6, 11)
    for (scene, image, caption, prompt), (scene2, image2, caption2, prompt2) in zip(first, other):
        assert (scene, caption, prompt) == (scene2, caption2, prompt2)
        assert image.tobytes() == image2.tobytes()
    assert sample_scenes("demo", 1, 12)[0][0] != first[0][0]


def test_demo_scenes_are_336_px_and_carry_their_truth() -> None:
    for scene, image, caption, prompt in sample_scenes("demo", 10, 3):
        assert (image.size, image.mode) == ((336, 336), "RGB")
        assert split_of(scene) == "demo"
        parsed = grammar.parse_caption(caption)
        assert parsed is not None
        assert (grammar.PROMPTS[parsed[0]], parsed[1]) == (prompt, scene.truth)


def test_an_object_is_drawn_in_its_own_cell_and_in_its_colour() -> None:
    for cell in range(NUM_CELLS):
        scene = Scene((Thing(cell, "large", "red", "square"),), "pale", "plain", cell)
        pixels = np.asarray(render_scene(scene)).astype(int)
        red = (pixels[:, :, 0] - pixels[:, :, 1]) > 100
        rows, columns = np.nonzero(red)
        third = NATIVE_PX / 3
        assert (rows.mean() // third, columns.mean() // third) == divmod(cell, 3)
        assert rows.min() // third == rows.max() // third
        assert columns.min() // third == columns.max() // third
