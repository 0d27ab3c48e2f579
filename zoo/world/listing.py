"""Scenes without pictures: a prompt lists the objects, and the answer describes them at length.

An answer is long (93 to 167 tokens) and states only attributes of its prompt, besides filler words, which cannot be
predicted.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from zoo.world.grammar import FILLER_ODDS, FILLERS, NUMBERS, PLACES, Words, draw_fillers, kind_of
from zoo.world.scene import (
    COLOURS,
    NUM_CELLS,
    SHAPES,
    SIZES,
    SPLITS,
    TEXTURES,
    TONES,
    Scene,
    draw_scene,
    draw_thing,
    split_of,
)

NUM_OBJECTS = (3, 5)
"""The fewest and the most objects of a scene."""
ASKED = {
    "tour": "Tell me about the objects one by one.",
    "story": "Tell me how this was made.",
    "survey": "Write a detailed survey.",
}


def draw_listed_scene(rng: random.Random, split: str) -> Scene:
    """Draw a scene of three to five objects that belongs to `split`; raises KeyError for one that does not exist."""
    if split not in SPLITS:
        raise KeyError(f"no split {split!r}; the splits are {', '.join(SPLITS)}")
    while True:
        # Its tone and texture only: whether the scene belongs to the split is seen below, on the whole of it.
        ground = draw_scene(rng, "train")
        cells = sorted(rng.sample(range(NUM_CELLS), rng.randint(*NUM_OBJECTS)))
        things = tuple(draw_thing(rng, cell) for cell in cells)
        scene = Scene(things, ground.tone, ground.texture, 0)
        if split_of(scene) == split:
            return scene


def write_prompt(scene: Scene, phrasing: str) -> str:
    """List a scene's contents and ask for a phrasing of ASKED; the same scene and phrasing give the same text."""
    listed = "; ".join(f"{NUMBERS[i]}, {kind_of(t)}, {PLACES[t.cell]}" for i, t in enumerate(scene.things, start=1))
    return f"Ground: {scene.tone}, {scene.texture}. Objects: {listed}. {ASKED[phrasing]}"


def _tour(scene: Scene, w: Words) -> str:
    body = " ".join(
        f"Object {NUMBERS[i]} stands at the {PLACES[t.cell]} and {w('looks')} like a {kind_of(t)}, which is "
        f"{w('quite')} easy to see from here."
        for i, t in enumerate(scene.things, start=1)
    )
    return (
        f"The {w('view')} has {NUMBERS[len(scene.things)]} objects on a {scene.tone} {scene.texture} background. "
        f"{body} {w('overall')} all of it is {w('calm')} to look at."
    )


def _story(scene: Scene, w: Words) -> str:
    body = " ".join(
        f"As step {NUMBERS[i]} a {t.shape}, {t.colour} and {t.size}, was {w('placed')} at the {PLACES[t.cell]}, where "
        f"it has stayed {w('gently')} ever since."
        for i, t in enumerate(scene.things, start=1)
    )
    return (
        f"{w('someone')} began with {scene.texture} ground, {scene.tone} in tone, and then took "
        f"{NUMBERS[len(scene.things)]} steps. {body} The {w('result')} is what we see in front of us now."
    )


def _survey(scene: Scene, w: Words) -> str:
    body = " ".join(
        f"Entry {NUMBERS[i]}: in the {PLACES[t.cell]} cell there is a {w('lovely')} {t.shape} of {t.size} size, and "
        f"the colour of its surface is {w('quite')} {t.colour}."
        for i, t in enumerate(scene.things, start=1)
    )
    return (
        f"This is a {w('kind')} survey of the whole scene with {NUMBERS[len(scene.things)]} entries. {body} "
        f"Behind them lies a {scene.texture} {scene.tone} surface in {w('bright')} light. "
        f"{w('nothing')} else is to be seen here."
    )


PHRASINGS = {"tour": _tour, "story": _story, "survey": _survey}


def write_answer(scene: Scene, phrasing: str, rng: random.Random, odds: Sequence[float] = FILLER_ODDS) -> str:
    """Describe a scene in a phrasing of ASKED, its filler words drawn with these odds."""
    return PHRASINGS[phrasing](scene, draw_fillers(rng, odds))


def states(scene: Scene, phrasing: str, text: str) -> bool:
    """Whether `text` describes exactly this scene in this phrasing, with any filler words."""
    written = PHRASINGS[phrasing](scene, lambda slot: f"\0{slot}\0")
    # Split at the slots' marks, every second part is the name of a slot.
    parts = [
        "(?:" + "|".join(FILLERS[part]) + ")" if number % 2 else re.escape(part)
        for number, part in enumerate(written.split("\0"))
    ]
    return re.fullmatch("".join(parts), text.strip()) is not None


_WORDS = re.compile(r"\b(?:" + "|".join([*PLACES, *SIZES, *COLOURS, *SHAPES, *TONES, *TEXTURES]) + r")\b")


def stated(text: str) -> list[str]:
    """The attribute words of a text, in order: sizes, colours, shapes, places, tones, textures."""
    return _WORDS.findall(text)
