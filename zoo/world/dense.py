"""Draws scenes of 8 to 14 objects on a grid of 4 x 4 cells, and writes their long captions.

A caption has 80 to 200 words: stretches that follow from its form, filler words, which cannot be predicted, and the
attributes of some of the objects, which are fewer than a fifth of the words.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

from zoo.world.grammar import FILLER_ODDS, NUMBERS, Slots, Words, draw_fillers, has_form
from zoo.world.scene import Scene, Thing, draw_scene, scene_rng

GRID = 4
MIN_OBJECTS, MAX_OBJECTS = 8, 14
ROWS = ("top", "upper", "lower", "bottom")
PROMPTS = {
    "overview": "Describe the image from top to bottom.",
    "upper": "Describe the upper half of the image in detail.",
    "lower": "Describe the lower half of the image in detail.",
}
ROWS_OF = {"overview": (0, 1, 2, 3), "upper": (0, 1), "lower": (2, 3)}
FORMS = {
    "overview": "The {view} {shows} a number of objects on a {tone} {texture} background, and they can be read row by "
    "row from top to bottom. {rows} {overall} the {view} {looks} {quite} {calm} and {clear}.",
    "half": "{someone} {gently} {placed} the objects in the {half} half of this {view} on {texture} ground, which is "
    "{tone} in tone. {rows} {nothing} else is {worth} in this {kind} description.",
}
ROW_FORMS = {
    "overview": "In the {row} row there {are} {count}, and the one that is furthest to the left is a {size} {colour} "
    "{shape}, which {looks} {quite} {calm} from here.",
    "half": "The {row} row has {count}. {things}",
    "empty": "The {row} row is {quite} empty from one side to the other.",
}
THING_FORM = "{order} there is a {shape} of {size} size and {colour} colour, which {looks} {quite} {calm} to the eye."


def draw_dense(rng: random.Random, split: str) -> Scene:
    """Draw a scene of 8 to 14 objects on 4 x 4 cells that belongs to `split`; raises KeyError for an unknown one."""
    return draw_scene(rng, split, max_objects=MAX_OBJECTS, min_objects=MIN_OBJECTS, grid=GRID)


def draw_asked(split: str, num: int, seed: int) -> list[tuple[Scene, str]]:
    """Return scenes of a split, each with a phrasing of PROMPTS in turn."""
    phrasings = list(PROMPTS)
    return [(draw_dense(scene_rng(split, seed, n), split), phrasings[n % len(phrasings)]) for n in range(num)]


def in_row(scene: Scene, row: int) -> list[Thing]:
    """Return the objects of a row of the grid, from left to right."""
    return [thing for thing in scene.things if thing.cell // scene.grid == row]


def _write(scene: Scene, phrasing: str, words: Words) -> str:
    kind = "overview" if phrasing == "overview" else "half"
    rows = " ".join(_write_row(in_row(scene, row), ROWS[row], kind, words) for row in ROWS_OF[phrasing])
    return FORMS[kind].format_map(Slots(words, rows=rows, half=phrasing, tone=scene.tone, texture=scene.texture))


def _write_row(things: Sequence[Thing], row: str, kind: str, words: Words) -> str:
    if not things:
        return ROW_FORMS["empty"].format_map(Slots(words, row=row))
    count = f"{NUMBERS[len(things)]} object{'' if len(things) == 1 else 's'}"
    fixed = {"row": row, "count": count, "are": "is" if len(things) == 1 else "are"}
    listed = " ".join(_write_thing(thing, index, words) for index, thing in enumerate(things)) if kind == "half" else ""
    first = things[0]
    attributes = {"size": first.size, "colour": first.colour, "shape": first.shape}
    return ROW_FORMS[kind].format_map(Slots(words, **fixed, **attributes, things=listed))


def _write_thing(thing: Thing, index: int, words: Words) -> str:
    order = "Next" if index else "First"
    return THING_FORM.format_map(Slots(words, order=order, size=thing.size, colour=thing.colour, shape=thing.shape))


def write_description(scene: Scene, phrasing: str, rng: random.Random, odds: Sequence[float] = FILLER_ODDS) -> str:
    """Write a scene's caption in a phrasing of PROMPTS, its filler words drawn with these odds."""
    return _write(scene, phrasing, draw_fillers(rng, odds))


def states(scene: Scene, phrasing: str, text: str) -> bool:
    """Return whether `text` is a caption of this scene in this phrasing, with any filler words."""
    return has_form(text, partial(_write, scene, phrasing))
