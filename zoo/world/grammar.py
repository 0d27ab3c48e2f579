"""The captions of a scene: five phrasings, each selected by its prompt, each with a parser that recovers the scene.

A caption states attributes, which follow from the scene, and filler words, which are drawn independently of it with the
fixed odds FILLER_ODDS.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence

from zoo.world.scene import COLOURS, MAX_OBJECTS, SHAPES, SIZES, TEXTURES, TONES, Scene, Thing

FILLER_ODDS = (0.5, 0.3, 0.2)
# The drafter is trained on texts with other habits: the same words, another favourite. So the two models disagree on
# fillers as well, where a disagreement does no harm, and rules that relax the right positions can be distinguished from
# others.
DRAFTER_FILLER_ODDS = (0.3, 0.5, 0.2)
PLACES = (
    "top left", "top centre", "top right",
    "middle left", "middle centre", "middle right",
    "bottom left", "bottom centre", "bottom right",
)  # fmt: skip
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
COLUMNS = ("left", "centre", "right")

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


def draw_fillers(rng: random.Random, odds: Sequence[float] = FILLER_ODDS) -> Words:
    """Return a function that draws the word of a named filler slot, independently each time."""
    return lambda slot: rng.choices(FILLERS[slot], odds)[0]


def _noun(number: int, one: str, many: str) -> str:
    return f"{NUMBERS[number]} {one if number == 1 else many}"


def kind_of(thing: Thing) -> str:
    """Return an object's attributes as words, such as `small red circle`."""
    return f"{thing.size} {thing.colour} {thing.shape}"


def _plain(scene: Scene, w: Words) -> str:
    body = " ".join(f"At the {PLACES[t.cell]} there is a {kind_of(t)}." for t in scene.things)
    count = _noun(len(scene.things), "object", "objects")
    return (
        f"The {w('view')} {w('shows')} {count} on a {scene.tone} {scene.texture} background. {body} "
        f"{w('overall')} it {w('looks')} {w('quite')} {w('calm')} and {w('clear')}."
    )


def _inventory(scene: Scene, w: Words) -> str:
    body = " ".join(f"Item {NUMBERS[i]}: {kind_of(t)}, {PLACES[t.cell]}." for i, t in enumerate(scene.things, start=1))
    count = _noun(len(scene.things), "item", "items")
    return (
        f"{w('listing')} of this {w('view')}: {count}. Ground: {scene.tone}, {scene.texture}. {body} "
        f"{w('nothing')} else is {w('worth')} in this {w('kind')} list."
    )


def _story(scene: Scene, w: Words) -> str:
    steps = ", then ".join(f"one {t.colour} {t.shape} of {t.size} size at the {PLACES[t.cell]}" for t in scene.things)
    return (
        f"{w('someone')} {w('gently')} {w('placed')} {steps}. The ground was {scene.texture} and {scene.tone}. "
        f"The {w('result')} is {w('quite')} {w('calm')}, and it {w('looks')} {w('bright')}."
    )


def _detailed(scene: Scene, w: Words) -> str:
    body = "; ".join(f"a {t.shape}, {t.colour} and {t.size}, {PLACES[t.cell]}" for t in scene.things)
    count = _noun(len(scene.things), "shape", "shapes")
    return (
        f"A {w('lovely')} {w('view')} in {w('bright')} {w('light')} with {count}: {body}. "
        f"Behind lies a {scene.texture} {scene.tone} surface, {w('quite')} {w('clear')}."
    )


def _rows(scene: Scene, w: Words) -> str:
    rows = []
    for row, name in enumerate(("top", "middle", "bottom")):
        inside = [t for t in scene.things if t.cell // 3 == row]
        said = " and ".join(f"{COLUMNS[t.cell % 3]} {kind_of(t)}" for t in inside) or "empty"
        rows.append(f"The {name} row: {said}.")
    return (
        f"{w('reading')} row by row over {scene.texture} ground, {scene.tone} in tone. {' '.join(rows)} "
        f"{w('done')}, and the {w('view')} {w('looks')} {w('clear')}."
    )


PHRASINGS: dict[str, Callable[[Scene, Words], str]] = {
    "plain": _plain, "inventory": _inventory, "story": _story, "detailed": _detailed, "rows": _rows,
}  # fmt: skip
PROMPTS = {
    "plain": "Describe the image.",
    "inventory": "List every object in the image.",
    "story": "Tell me how this picture was made.",
    "detailed": "Write a detailed caption.",
    "rows": "Read the picture row by row.",
}


def write_caption(scene: Scene, phrasing: str, rng: random.Random, odds: Sequence[float] = FILLER_ODDS) -> str:
    """Write a scene's caption in a phrasing; raises KeyError for a phrasing that does not exist."""
    return PHRASINGS[phrasing](scene, draw_fillers(rng, odds))


def _any(words: tuple[str, ...]) -> str:
    return "(?:" + "|".join(words) + ")"


_SLOT = {slot: _any(words) for slot, words in FILLERS.items()}
_KIND = rf"({_any(SIZES)}) ({_any(COLOURS)}) ({_any(SHAPES)})"
_TONE, _TEXTURE, _PLACE = (f"({_any(words)})" for words in (TONES, TEXTURES, PLACES))
_COUNT = f"({_any(NUMBERS[1 : MAX_OBJECTS + 1])})"
_S = _SLOT
# Per phrasing: the whole caption (with one group for the list of objects) and one object inside that list. The groups
# of an object are in the order that _ORDER names.
_WHOLE = {
    "plain": rf"The {_S['view']} {_S['shows']} {_COUNT} objects? on a {_TONE} {_TEXTURE} background\. (?P<body>.+?\.) "
    rf"{_S['overall']} it {_S['looks']} {_S['quite']} {_S['calm']} and {_S['clear']}\.",
    "inventory": rf"{_S['listing']} of this {_S['view']}: {_COUNT} items?\. Ground: {_TONE}, {_TEXTURE}\. "
    rf"(?P<body>.+?\.) {_S['nothing']} else is {_S['worth']} in this {_S['kind']} list\.",
    "story": rf"{_S['someone']} {_S['gently']} {_S['placed']} (?P<body>.+?)\. The ground was {_TEXTURE} and {_TONE}\. "
    rf"The {_S['result']} is {_S['quite']} {_S['calm']}, and it {_S['looks']} {_S['bright']}\.",
    "detailed": rf"A {_S['lovely']} {_S['view']} in {_S['bright']} {_S['light']} with {_COUNT} shapes?: "
    rf"(?P<body>.+?)\. Behind lies a {_TEXTURE} {_TONE} surface, {_S['quite']} {_S['clear']}\.",
    "rows": rf"{_S['reading']} row by row over {_TEXTURE} ground, {_TONE} in tone\. (?P<body>.+\.) "
    rf"{_S['done']}, and the {_S['view']} {_S['looks']} {_S['clear']}\.",
}


def parse_caption(text: str) -> tuple[str, tuple[tuple[Thing, ...], str, str]] | None:
    """Read a caption back: its phrasing and the truth it states, or None where no phrasing could have written it."""
    text = text.strip()
    for phrasing, pattern in _WHOLE.items():
        match = re.fullmatch(pattern, text)
        if match is None:
            continue
        things = tuple(_read_things(match["body"], phrasing))
        groups = [group for group in match.groups() if group is not None]
        tone = next(group for group in groups if group in TONES)
        texture = next(group for group in groups if group in TEXTURES)
        scene = Scene(things, tone, texture, 0)
        # Rendering it again with the text's filler words checks the whole form at once.
        if things and _same_form(text, scene, phrasing):
            return phrasing, scene.truth
    return None


def _read_things(body: str, phrasing: str) -> list[Thing]:
    """Read the objects of a caption's list in the order they are stated."""
    things = []
    if phrasing == "rows":
        for row, said in enumerate(re.findall(r"row: ([^.]+)\.", body)):
            for column, *kind in re.findall(rf"({_any(COLUMNS)}) {_KIND}", said):
                things.append(Thing(row * 3 + COLUMNS.index(column), *kind))
        return things
    if phrasing == "plain":
        found = re.findall(rf"At the {_PLACE} there is a {_KIND}\.", body)
        return [Thing(PLACES.index(place), *kind) for place, *kind in found]
    if phrasing == "inventory":
        found = re.findall(rf"{_KIND}, {_PLACE}\.", body)
        return [Thing(PLACES.index(place), *kind) for *kind, place in found]
    if phrasing == "story":
        found = re.findall(rf"one ({_any(COLOURS)}) ({_any(SHAPES)}) of ({_any(SIZES)}) size at the {_PLACE}", body)
        return [Thing(PLACES.index(place), size, colour, shape) for colour, shape, size, place in found]
    found = re.findall(rf"a ({_any(SHAPES)}), ({_any(COLOURS)}) and ({_any(SIZES)}), {_PLACE}", body)
    return [Thing(PLACES.index(place), size, colour, shape) for shape, colour, size, place in found]


def _same_form(text: str, scene: Scene, phrasing: str) -> bool:
    """Whether the phrasing can write exactly this text for this scene, for some choice of the filler words."""
    if any(thing.cell >= 9 for thing in scene.things) or len(scene.things) > MAX_OBJECTS:
        return False
    written = PHRASINGS[phrasing](scene, lambda slot: f"\0{slot}\0")
    # Split at the slots' marks, every second part is the name of a slot.
    parts = [_SLOT[part] if number % 2 else re.escape(part) for number, part in enumerate(written.split("\0"))]
    return re.fullmatch("".join(parts), text) is not None
