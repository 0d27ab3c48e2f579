"""Generates scenes without images: a prompt lists the objects, and the answer describes them at length.

An answer is long (93 to 167 tokens) and states only attributes of its prompt, besides filler words, which cannot be
predicted.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

from zoo.world.grammar import FILLER_ODDS, NUMBERS, PLACES, Form, draw_fillers, has_form, kind_of
from zoo.world.scene import NUM_CELLS, Scene, check_split, draw_scene, draw_thing, split_of

NUM_OBJECTS = (3, 5)
"""The fewest and the most objects of a scene."""
ASKED = {
    "tour": "Tell me about the objects one by one.",
    "story": "Tell me how this was made.",
    "survey": "Write a detailed survey.",
}
FORMS = {
    "tour": Form(
        "The {view} has {count} on a {tone} {texture} background. {things} {overall} all of it is {calm} to look at.",
        "Object {number} stands at the {place} and {looks} like a {size} {colour} {shape}, which is {quite} easy to "
        "see from here.",
    ),
    "story": Form(
        "{someone} began with {texture} ground, {tone} in tone, and then took {count}. {things} The {result} is what "
        "we see in front of us now.",
        "As step {number} a {shape}, {colour} and {size}, was {placed} at the {place}, where it has stayed {gently} "
        "ever since.",
        noun="step",
    ),
    "survey": Form(
        "This is a {kind} survey of the whole scene with {number} entries. {things} Behind them lies a {texture} "
        "{tone} surface in {bright} light. {nothing} else is to be seen here.",
        "Entry {number}: in the {place} cell there is a {lovely} {shape} of {size} size, and the colour of its surface "
        "is {quite} {colour}.",
    ),
}


def draw_listed_scene(rng: random.Random, split: str) -> Scene:
    """Draw a scene of three to five objects that belongs to `split`; raises KeyError for one that does not exist."""
    check_split(split)
    while True:
        # Only the tone and the texture of this scene are used.
        ground = draw_scene(rng, "train")
        cells = sorted(rng.sample(range(NUM_CELLS), rng.randint(*NUM_OBJECTS)))
        scene = Scene(tuple(draw_thing(rng, cell) for cell in cells), ground.tone, ground.texture, 0)
        if split_of(scene) == split:
            return scene


def write_prompt(scene: Scene, phrasing: str) -> str:
    """List a scene's contents and ask for a phrasing of ASKED; the same scene and phrasing give the same text."""
    listed = "; ".join(f"{NUMBERS[i]}, {kind_of(t)}, {PLACES[t.cell]}" for i, t in enumerate(scene.things, start=1))
    return f"Ground: {scene.tone}, {scene.texture}. Objects: {listed}. {ASKED[phrasing]}"


def write_answer(scene: Scene, phrasing: str, rng: random.Random, odds: Sequence[float] = FILLER_ODDS) -> str:
    """Describe a scene in a phrasing of ASKED, its filler words drawn with these odds."""
    return FORMS[phrasing].write(scene, draw_fillers(rng, odds))


def states(scene: Scene, phrasing: str, text: str) -> bool:
    """Return whether `text` describes exactly this scene in this phrasing, with any filler words."""
    return has_form(text, partial(FORMS[phrasing].write, scene))
