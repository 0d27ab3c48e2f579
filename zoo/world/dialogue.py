"""Writes prompts besides single captions, with their answers: changes, second turns, text-only questions, clips."""

from __future__ import annotations

import random
from collections.abc import Sequence

from zoo.world.grammar import FILLER_ODDS, NUMBERS, PLACES, PROMPTS, draw_fillers, kind_of, write_caption
from zoo.world.scene import COLOURS, SHAPES, Scene, Thing

CHANGE_PROMPT = "What changed between the two images?"
CLIP_PROMPT = "What happens in these frames?"
SECOND_PROMPTS = {
    "last": "What was the last object you named?",
    "first": "What was the first object you named?",
    "count": "How many objects did you name?",
    "ground": "What did you say about the background?",
}
MIXES = {("red", "yellow"): "orange", ("blue", "yellow"): "green", ("blue", "red"): "purple", ("green", "blue"): "teal"}
SIDES = {"triangle": 3, "square": 4}


def _seen(thing: Thing) -> str:
    return f"the {kind_of(thing)} at the {PLACES[thing.cell]}"


def write_change(
    before: Scene, after: Scene, kind: str, index: int, rng: random.Random, odds: Sequence[float] = FILLER_ODDS
) -> str:
    """Write the answer to CHANGE_PROMPT for a change as `scene.change_scene` returns it."""
    w = draw_fillers(rng, odds)
    new = next((thing for thing in after.things if thing not in before.things), None)
    if new is None:
        statement = f"{_seen(before.things[index])} was removed"
    elif kind == "added":
        statement = f"a {kind_of(new)} was added at the {PLACES[new.cell]}"
    elif kind == "moved":
        statement = f"{_seen(before.things[index])} was moved to the {PLACES[new.cell]}"
    else:
        statement = f"{_seen(before.things[index])} now has another {kind}: {getattr(new, kind)}"
    return f"{w('overall')} the second {w('view')} {w('looks')} alike, but {statement}."


def write_second(scene: Scene, question: str) -> str:
    """Return the answer to the second-turn question with key `question` of `SECOND_PROMPTS`; the first turn was a
    caption of the scene."""
    if question == "count":
        return f"I named {NUMBERS[len(scene.things)]}."
    if question == "ground":
        return f"I said that it is {scene.tone} and {scene.texture}."
    return f"It was {_seen(scene.things[0 if question == 'first' else -1])}."


def write_clip(frames: list[Scene], rng: random.Random, odds: Sequence[float] = FILLER_ODDS) -> str:
    """Write the answer to CLIP_PROMPT for a clip as `scene.draw_clip` returns it."""
    w = draw_fillers(rng, odds)
    first, last = frames[0].things[0], frames[-1].things[0]
    return (
        f"A {kind_of(first)} moves {w('gently')} from the {PLACES[first.cell]} to the {PLACES[last.cell]} "
        f"over {frames[0].texture} {frames[0].tone} ground, and the {w('view')} {w('looks')} {w('calm')}."
    )


def draw_text_only(rng: random.Random) -> tuple[str, str]:
    """Draw a question without an image and its answer."""
    kind = rng.randrange(4)
    if kind == 0:
        (first, second), result = rng.choice(list(MIXES.items()))
        return f"What do you get from {first} and {second}?", f"You get {result}."
    if kind == 1:
        shape = rng.choice(list(SIDES))
        return f"How many sides does a {shape} have?", f"A {shape} has {NUMBERS[SIDES[shape]]} sides."
    if kind == 2:
        start = rng.randint(1, 5)
        stop = rng.randint(start + 1, 9)
        counted = ", ".join(NUMBERS[start : stop + 1])
        return f"Count from {NUMBERS[start]} to {NUMBERS[stop]}.", f"{counted}."
    if rng.random() < 0.5:
        return "Which colours do you know?", "I know " + ", ".join(COLOURS) + "."
    return "Which shapes do you know?", "I know " + ", ".join(SHAPES) + "."


def draw_second_turn(scene: Scene, rng: random.Random, odds: Sequence[float] = FILLER_ODDS) -> list[tuple[str, str]]:
    """Draw a conversation of two turns about one image: a caption, then a question about that caption."""
    phrasing, question = rng.choice(list(PROMPTS)), rng.choice(list(SECOND_PROMPTS))
    first = (PROMPTS[phrasing], write_caption(scene, phrasing, rng, odds))
    return [first, (SECOND_PROMPTS[question], write_second(scene, question))]
