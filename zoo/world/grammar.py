"""Writes and parses the captions of a scene: five phrasings, each selected by its prompt.

A caption states attributes, which follow from the scene, and filler words, which are drawn independently of it with the
fixed odds FILLER_ODDS.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from zoo.world.scene import COLOURS, GRID, MAX_OBJECTS, SHAPES, SIZES, TEXTURES, TONES, Scene, Thing

FILLER_ODDS = (0.5, 0.3, 0.2)
# The drafter learns other filler odds, so that the two models also disagree on words that do not affect the attributes.
DRAFTER_FILLER_ODDS = (0.3, 0.5, 0.2)
ROWS = ("top", "middle", "bottom")
COLUMNS = ("left", "centre", "right")
PLACES = tuple(f"{row} {column}" for row in ROWS for column in COLUMNS)
NUMBERS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight"),
    *("nine", "ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen"),
)

# Every filler slot: three words of which exactly one is drawn. Names are used in the templates as {name}.
FILLERS: dict[str, tuple[str, str, str]] = {
    "view": ("picture", "image", "scene"),
    "shows": ("shows", "presents", "contains"),
    "overall": ("Overall", "Altogether", "Generally"),
    "looks": ("looks", "feels", "seems"),
    "calm": ("calm", "simple", "neat"),
    "quite": ("quite", "rather", "very"),
    "listing": ("Inventory", "Contents", "Summary"),
    "kind": ("short", "careful", "complete"),
    "nothing": ("Nothing", "Little", "None"),
    "worth": ("listed", "noted", "shown"),
    "someone": ("Somebody", "Someone", "Anyone"),
    "placed": ("placed", "put", "set"),
    "gently": ("gently", "slowly", "quickly"),
    "result": ("result", "outcome", "effect"),
    "lovely": ("lovely", "pretty", "charming"),
    "clear": ("clear", "tidy", "clean"),
    "bright": ("bright", "soft", "warm"),
    "light": ("daylight", "light", "sunshine"),
    "reading": ("Reading", "Looking", "Going"),
    "done": ("Done", "Finished", "Complete"),
}

Words = Callable[[str], str]
"""Returns a word for a named filler slot."""


def draw_fillers(
    rng: random.Random, odds: Sequence[float] = FILLER_ODDS, fillers: Mapping[str, Sequence[str]] = FILLERS
) -> Words:
    """Return a function that draws the word of a named filler slot, independently each time."""
    return lambda slot: rng.choices(fillers[slot], odds)[0]


def has_form(text: str, write: Callable[[Words], str], fillers: Mapping[str, Sequence[str]] = FILLERS) -> bool:
    """Return whether `write` returns exactly this text for some choice of the filler words."""
    # After the split at the slot markers, every second part is the name of a slot.
    parts = enumerate(write(lambda slot: f"\0{slot}\0").split("\0"))
    pattern = "".join(f"(?:{'|'.join(fillers[part])})" if number % 2 else re.escape(part) for number, part in parts)
    return re.fullmatch(pattern, text.strip()) is not None


_ATTRIBUTES = re.compile(rf"\b(?:{'|'.join([*PLACES, *SIZES, *COLOURS, *SHAPES, *TONES, *TEXTURES])})\b")


def stated(text: str) -> list[str]:
    """Return the attribute words of a text, in order: sizes, colours, shapes, places, tones, textures."""
    return _ATTRIBUTES.findall(text)


def count_stated(truth: str, text: str) -> tuple[int, int]:
    """Return how many attribute words equal the true text's at the same position, and the larger of both counts."""
    true, actual = stated(truth), stated(text)
    return sum(word == other for word, other in zip(true, actual)), max(len(true), len(actual))


def kind_of(thing: Thing) -> str:
    """Return an object's attributes as words, such as `small red circle`."""
    return f"{thing.size} {thing.colour} {thing.shape}"


class Slots(dict[str, str]):
    """Values of a template's fields: fixed ones, and filler words, drawn in the order of the fields."""

    def __init__(self, words: Words, **fixed: str) -> None:
        super().__init__(fixed)
        self.words = words

    def __missing__(self, slot: str) -> str:
        return self.words(slot)


@dataclass(frozen=True)
class Form:
    """Templates of a phrasing: the text with its `{things}`, one object, the text between objects, and their noun."""

    text: str
    thing: str
    between: str = " "
    noun: str = "object"

    def write(self, scene: Scene, words: Words) -> str:
        """Write a scene; the filler words of the objects are drawn first."""
        listed = [write_thing(thing, self.thing, words, number) for number, thing in enumerate(scene.things, start=1)]
        if "{column}" in self.thing:
            rows = [[phrase for t, phrase in zip(scene.things, listed) if t.cell // GRID == row] for row in range(GRID)]
            listed = [f"The {name} row: {' and '.join(row) or 'empty'}." for name, row in zip(ROWS, rows)]
        number = NUMBERS[len(scene.things)]
        count = f"{number} {self.noun}{'' if len(scene.things) == 1 else 's'}"
        fixed = {"tone": scene.tone, "texture": scene.texture, "number": number, "count": count}
        return self.text.format_map(Slots(words, things=self.between.join(listed), **fixed))


def write_thing(thing: Thing, template: str, words: Words, number: int = 0) -> str:
    """Fill an object's template; `number` is its rank in the scene."""
    fixed = {"size": thing.size, "colour": thing.colour, "shape": thing.shape, "place": PLACES[thing.cell]}
    return template.format_map(Slots(words, **fixed, column=COLUMNS[thing.cell % GRID], number=NUMBERS[number]))


_FIELDS = {"size": SIZES, "colour": COLOURS, "shape": SHAPES, "place": PLACES, "column": COLUMNS, "number": NUMBERS}
_GROUPS = {name: f"(?P<{name}>{'|'.join(words)})" for name, words in _FIELDS.items()}


def read_things(text: str, template: str) -> list[Thing]:
    """Read the objects that a text states by a template without filler words, in their order."""
    if "{column}" in template:
        template = template.replace("{column}", "{place}")
        rows = zip(ROWS, re.findall(r"row: ([^.]+)\.", text))
        text = "; ".join(re.sub(rf"\b({'|'.join(COLUMNS)})\b", rf"{name} \1", row) for name, row in rows)
    matches = re.finditer(template.replace(".", r"\.").format(**_GROUPS), text)
    return [Thing(PLACES.index(match["place"]), match["size"], match["colour"], match["shape"]) for match in matches]


FORMS = {
    "plain": Form(
        "The {view} {shows} {count} on a {tone} {texture} background. {things} "
        "{overall} it {looks} {quite} {calm} and {clear}.",
        "At the {place} there is a {size} {colour} {shape}.",
    ),
    "inventory": Form(
        "{listing} of this {view}: {count}. Ground: {tone}, {texture}. {things} "
        "{nothing} else is {worth} in this {kind} list.",
        "Item {number}: {size} {colour} {shape}, {place}.",
        noun="item",
    ),
    "story": Form(
        "{someone} {gently} {placed} {things}. The ground was {texture} and {tone}. "
        "The {result} is {quite} {calm}, and it {looks} {bright}.",
        "one {colour} {shape} of {size} size at the {place}",
        between=", then ",
    ),
    "detailed": Form(
        "A {lovely} {view} in {bright} {light} with {count}: {things}. "
        "Behind lies a {texture} {tone} surface, {quite} {clear}.",
        "a {shape}, {colour} and {size}, {place}",
        between="; ",
        noun="shape",
    ),
    "rows": Form(
        "{reading} row by row over {texture} ground, {tone} in tone. {things} {done}, and the {view} {looks} {clear}.",
        "{column} {size} {colour} {shape}",
    ),
}
PROMPTS = {
    "plain": "Describe the image.",
    "inventory": "List every object in the image.",
    "story": "Tell me how this picture was made.",
    "detailed": "Write a detailed caption.",
    "rows": "Read the picture row by row.",
}


def write_caption(scene: Scene, phrasing: str, rng: random.Random, odds: Sequence[float] = FILLER_ODDS) -> str:
    """Write a scene's caption in a phrasing; raises KeyError for a phrasing that does not exist."""
    return FORMS[phrasing].write(scene, draw_fillers(rng, odds))


def parse_caption(text: str) -> tuple[str, tuple[tuple[Thing, ...], str, str]] | None:
    """Parse a caption to its phrasing and the contents it states; None if no phrasing can write it."""
    words = stated(text)
    tone, texture = (next((word for word in words if word in known), "") for known in (TONES, TEXTURES))
    for phrasing, form in FORMS.items():
        scene = Scene(tuple(read_things(text, form.thing)), tone, texture, 0)
        # Writing the scene again checks the whole form.
        if 0 < len(scene.things) <= MAX_OBJECTS and has_form(text, partial(form.write, scene)):
            return phrasing, scene.truth
    return None
