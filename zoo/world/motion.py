"""Moving scenes: one object moves straight from cell to cell, another may stay; their captions and a parser."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image

from zoo.world.grammar import FILLER_ODDS, PLACES, Words, draw_fillers, kind_of
from zoo.world.grammar import FILLERS as CAPTION_FILLERS
from zoo.world.render import NATIVE_PX, render_frames
from zoo.world.scene import COLOURS, GRID, NUM_CELLS, SHAPES, SIZES, TEXTURES, TONES, Scene, Thing, draw_scene

FILLERS = CAPTION_FILLERS | {"clip": ("clip", "video", "film"), "moves": ("moves", "travels", "glides")}
PROMPTS = {
    "describe": "Describe the video.",
    "detailed": "Write a detailed caption of the video.",
    "moved": "What moved, and where to?",
}
DWELL = 0.15
"""The share of a clip's time that the mover rests at its start, and again at its end."""


@dataclass(frozen=True)
class Motion:
    """A scene of one or two objects, of which `things[mover]` goes from its cell to the cell `end`."""

    scene: Scene
    mover: int
    end: int

    @property
    def moving(self) -> Thing:
        return self.scene.things[self.mover]

    @property
    def staying(self) -> Thing | None:
        return next((thing for index, thing in enumerate(self.scene.things) if index != self.mover), None)

    @property
    def truth(self) -> tuple[Thing, int, Thing | None, str, str]:
        """Everything that a caption may state."""
        return self.moving, self.end, self.staying, self.scene.tone, self.scene.texture


def draw_motion(rng: random.Random, split: str) -> Motion:
    """Draw a motion whose contents belong to `split`; no object is in the mover's way."""
    while True:
        scene = draw_scene(rng, split)
        if len(scene.things) > 2:
            continue
        mover = rng.randrange(len(scene.things))
        start = scene.things[mover].cell
        ends = [cell for cell in range(NUM_CELLS) if cell != start]
        others = [thing.cell for index, thing in enumerate(scene.things) if index != mover]
        ends = [end for end in ends if not any(_is_in_the_way(start, end, cell) for cell in others)]
        if ends:
            return Motion(scene, mover, rng.choice(ends))


def _is_in_the_way(start: int, end: int, cell: int) -> bool:
    """Whether a cell's middle is within 0.8 cells of the straight line between two others."""
    ax, ay, bx, by, x, y = start % GRID, start // GRID, end % GRID, end // GRID, cell % GRID, cell // GRID
    length = (bx - ax) ** 2 + (by - ay) ** 2
    share = max(0.0, min(1.0, ((x - ax) * (bx - ax) + (y - ay) * (by - ay)) / length))
    return (ax + share * (bx - ax) - x) ** 2 + (ay + share * (by - ay) - y) ** 2 < 0.8**2


def place_at(motion: Motion, moment: float) -> tuple[float, float]:
    """Where the mover is at a moment from 0 (first frame) to 1 (last frame): column and row, in cells."""
    share = max(0.0, min(1.0, (moment - DWELL) / (1.0 - 2.0 * DWELL)))
    start = motion.moving.cell
    column = start % GRID + share * (motion.end % GRID - start % GRID)
    row = start // GRID + share * (motion.end // GRID - start // GRID)
    return column, row


def render_motion(motion: Motion, num_frames: int, size_px: int = NATIVE_PX) -> list[Image.Image]:
    """The clip's frames, evenly spaced from its first to its last moment."""
    places = []
    for frame in range(num_frames):
        moment = frame / max(1, num_frames - 1)
        places.append(
            [
                place_at(motion, moment) if index == motion.mover else (thing.cell % GRID, thing.cell // GRID)
                for index, thing in enumerate(motion.scene.things)
            ]
        )
    return render_frames(motion.scene, places, size_px)


# --- words ---------------------------------------------------------------------------------------------------------


def _describe(m: Motion, w: Words) -> str:
    still = m.staying
    rest = f"while a {kind_of(still)} stays at the {PLACES[still.cell]}" if still else "and nothing else is there"
    return (
        f"A {kind_of(m.moving)} {w('moves')} {w('gently')} from the {PLACES[m.moving.cell]} to the {PLACES[m.end]} "
        f"over {m.scene.texture} {m.scene.tone} ground, {rest}. {w('overall')} the {w('clip')} {w('looks')} "
        f"{w('quite')} {w('calm')}."
    )


def _detailed(m: Motion, w: Words) -> str:
    one, still = m.moving, m.staying
    rest = f"A {still.shape}, {still.colour} and {still.size}, rests {PLACES[still.cell]}" if still else "Nothing rests"
    return (
        f"In this {w('lovely')} {w('clip')} in {w('bright')} {w('light')} a {one.shape}, {one.colour} and {one.size}, "
        f"starts {PLACES[one.cell]}. It {w('gently')} crosses {m.scene.texture} {m.scene.tone} ground and ends "
        f"{PLACES[m.end]}. {rest}. {w('overall')} it {w('looks')} {w('calm')} and {w('clear')}."
    )


def _moved(m: Motion, w: Words) -> str:
    return f"The {kind_of(m.moving)} moved from the {PLACES[m.moving.cell]} to the {PLACES[m.end]}."


PHRASINGS = {"describe": _describe, "detailed": _detailed, "moved": _moved}


def write_motion(motion: Motion, phrasing: str, rng: random.Random, odds: Sequence[float] = FILLER_ODDS) -> str:
    """Write a motion's caption in a phrasing of PROMPTS."""
    drawn = draw_fillers(rng, odds)
    own = {slot: words for slot, words in FILLERS.items() if slot not in CAPTION_FILLERS}
    return PHRASINGS[phrasing](motion, lambda slot: rng.choices(own[slot], odds)[0] if slot in own else drawn(slot))


def states(motion: Motion, phrasing: str, text: str) -> bool:
    """Whether `text` is a caption of this motion in this phrasing, with any filler words."""
    written = PHRASINGS[phrasing](motion, lambda slot: f"\0{slot}\0")
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
