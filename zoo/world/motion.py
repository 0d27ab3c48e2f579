"""Generates moving scenes: one object moves straight from cell to cell, another may stay; writes their captions."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from PIL import Image

from zoo.world import grammar
from zoo.world.grammar import FILLER_ODDS, PLACES, Slots, Words, draw_fillers, has_form, kind_of
from zoo.world.render import NATIVE_PX, place_of, render_frames
from zoo.world.scene import GRID, NUM_CELLS, Scene, Thing, draw_scene

FILLERS = grammar.FILLERS | {"clip": ("clip", "video", "film"), "moves": ("moves", "travels", "glides")}
PROMPTS = {
    "describe": "Describe the video.",
    "detailed": "Write a detailed caption of the video.",
    "moved": "What moved, and where to?",
}
FORMS = {
    "describe": "A {kind} {moves} {gently} from the {start} to the {end} over {texture} {tone} ground, {stays}. "
    "{overall} the {clip} {looks} {quite} {calm}.",
    "detailed": "In this {lovely} {clip} in {bright} {light} a {shape}, {colour} and {size}, starts {start}. It "
    "{gently} crosses {texture} {tone} ground and ends {end}. {rests}. {overall} it {looks} {calm} and {clear}.",
    "moved": "The {kind} moved from the {start} to the {end}.",
}
DWELL = 0.15
"""The share of a clip's time that the mover rests at its start, and again at its end."""


@dataclass(frozen=True)
class Motion:
    """A scene of one or two objects, of which `things[mover]` moves from its cell to the cell `end`."""

    scene: Scene
    mover: int
    end: int

    @property
    def moving(self) -> Thing:
        return self.scene.things[self.mover]

    @property
    def staying(self) -> Thing | None:
        return next((thing for index, thing in enumerate(self.scene.things) if index != self.mover), None)


def draw_motion(rng: random.Random, split: str) -> Motion:
    """Draw a motion whose contents belong to `split`; no object is in the mover's way."""
    while True:
        scene = draw_scene(rng, split)
        if len(scene.things) > 2:
            continue
        mover = rng.randrange(len(scene.things))
        start = scene.things[mover].cell
        ends = [cell for cell in range(NUM_CELLS) if cell != start]
        others = [thing.cell for thing in scene.things if thing.cell != start]
        ends = [end for end in ends if not any(_is_in_the_way(start, end, cell) for cell in others)]
        if ends:
            return Motion(scene, mover, rng.choice(ends))


def _is_in_the_way(start: int, end: int, cell: int) -> bool:
    """Return whether the middle of `cell` is within 0.8 cells of the straight line from `start` to `end`."""
    (ay, ax), (by, bx), (y, x) = divmod(start, GRID), divmod(end, GRID), divmod(cell, GRID)
    length = (bx - ax) ** 2 + (by - ay) ** 2
    share = max(0.0, min(1.0, ((x - ax) * (bx - ax) + (y - ay) * (by - ay)) / length))
    return (ax + share * (bx - ax) - x) ** 2 + (ay + share * (by - ay) - y) ** 2 < 0.8**2


def place_at(motion: Motion, moment: float) -> tuple[float, float]:
    """Return the mover's position (column, row), in cells, at a moment from 0 (first frame) to 1 (last frame)."""
    share = max(0.0, min(1.0, (moment - DWELL) / (1.0 - 2.0 * DWELL)))
    (row, column), (end_row, end_column) = divmod(motion.moving.cell, GRID), divmod(motion.end, GRID)
    return column + share * (end_column - column), row + share * (end_row - row)


def render_motion(motion: Motion, num_frames: int, size_px: int = NATIVE_PX) -> list[Image.Image]:
    """Render the frames of a clip, evenly spaced from moment 0 to 1."""
    positions = []
    for frame in range(num_frames):
        still = [place_of(thing) for thing in motion.scene.things]
        still[motion.mover] = place_at(motion, frame / max(1, num_frames - 1))
        positions.append(still)
    return render_frames(motion.scene, positions, size_px)


def _write(motion: Motion, phrasing: str, words: Words) -> str:
    thing, still, scene = motion.moving, motion.staying, motion.scene
    stays, rests = "and nothing else is there", "Nothing rests"
    if still:
        stays = f"while a {kind_of(still)} stays at the {PLACES[still.cell]}"
        rests = f"A {still.shape}, {still.colour} and {still.size}, rests {PLACES[still.cell]}"
    fixed = {"kind": kind_of(thing), "size": thing.size, "colour": thing.colour, "shape": thing.shape}
    fixed |= {"start": PLACES[thing.cell], "end": PLACES[motion.end], "tone": scene.tone, "texture": scene.texture}
    return FORMS[phrasing].format_map(Slots(words, **fixed, stays=stays, rests=rests))


def write_motion(motion: Motion, phrasing: str, rng: random.Random, odds: Sequence[float] = FILLER_ODDS) -> str:
    """Write a motion's caption in a phrasing of PROMPTS."""
    return _write(motion, phrasing, draw_fillers(rng, odds, FILLERS))


def states(motion: Motion, phrasing: str, text: str) -> bool:
    """Return whether `text` is a caption of this motion in this phrasing, with any filler words."""
    return has_form(text, partial(_write, motion, phrasing), FILLERS)
