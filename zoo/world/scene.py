"""Draws scenes: attribute values, drawing from a seed, and the rule that separates the splits."""

from __future__ import annotations

import dataclasses
import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

SIZES = ("small", "medium", "large")
COLOURS = ("red", "orange", "yellow", "green", "teal", "blue", "purple", "pink")
SHAPES = ("circle", "square", "triangle", "star", "cross", "ring")
TONES = ("pale", "grey", "dark")
TEXTURES = ("plain", "striped", "dotted", "checked")
GRID = 3
NUM_CELLS = GRID * GRID
MAX_OBJECTS = 4

# The share of all scene identities, in per cent, that belongs to each split.
SPLITS = {"train": (0, 85), "held_out": (85, 91), "demo": (91, 96), "test": (96, 100)}


@dataclass(frozen=True, order=True)
class Thing:
    """One object: its cell of the grid (in reading order, 0..8 for 3 x 3 cells), size, colour and shape."""

    cell: int
    size: str
    colour: str
    shape: str


@dataclass(frozen=True)
class Scene:
    """Objects in reading order on a background; `look_seed`, which sets jitter and texture phase, is not stated.

    `grid` is the number of cells per side.
    """

    things: tuple[Thing, ...]
    tone: str
    texture: str
    look_seed: int
    grid: int = GRID

    @property
    def truth(self) -> tuple[tuple[Thing, ...], str, str]:
        """Everything that a caption states: the objects, the tone, the texture."""
        return self.things, self.tone, self.texture


def split_of(scene: Scene) -> str:
    """Return the split of a scene: a hash of its background and its objects without their cells.

    Positions and `look_seed` are excluded: two scenes with the same contents are always in one split, and an object
    that moves through a clip does not carry its scene into another split.
    """
    kinds = sorted((thing.size, thing.colour, thing.shape) for thing in scene.things)
    digest = hashlib.sha256(repr((scene.tone, scene.texture, kinds)).encode()).digest()
    bucket = int.from_bytes(digest[:4], "big") % 100
    return next(name for name, (low, high) in SPLITS.items() if low <= bucket < high)


def check_split(split: str) -> None:
    """Raise KeyError for a split that does not exist."""
    if split not in SPLITS:
        raise KeyError(f"no split {split!r}; the splits are {', '.join(SPLITS)}")


def draw_thing(rng: random.Random, cell: int, sizes: Sequence[str] = SIZES) -> Thing:
    """Draw one object for a cell, every attribute uniform and independent."""
    return Thing(cell, rng.choice(sizes), rng.choice(COLOURS), rng.choice(SHAPES))


def draw_scene(
    rng: random.Random,
    split: str,
    num_objects: int | None = None,
    max_objects: int = MAX_OBJECTS,
    sizes: Sequence[str] = SIZES,
    texture: str | None = None,
    min_objects: int = 1,
    grid: int = GRID,
) -> Scene:
    """Draw a scene of `num_objects`, or of `min_objects` to `max_objects`, that belongs to `split`. Raises KeyError if
    the split does not exist."""
    check_split(split)
    while True:
        cells = sorted(rng.sample(range(grid * grid), num_objects or rng.randint(min_objects, max_objects)))
        things = tuple(draw_thing(rng, cell, sizes) for cell in cells)
        scene = Scene(things, rng.choice(TONES), texture or rng.choice(TEXTURES), rng.getrandbits(32), grid)
        if split_of(scene) == split:
            return scene


def scene_rng(split: str, seed: int, index: int) -> random.Random:
    """Return the random stream of sample `index` of a split; streams of different splits never coincide."""
    digest = hashlib.sha256(f"zoo-world/{split}/{seed}/{index}".encode()).digest()
    return random.Random(int.from_bytes(digest[:16], "big"))


def change_scene(rng: random.Random, scene: Scene, split: str) -> tuple[Scene, str, int]:
    """Change one object of a scene inside its split; return the new scene, the kind of change and the object's index.

    Kinds: `colour`, `shape`, `size`, `moved`, `removed` (index into the old scene), `added` (index into the new one).
    """
    values = {"colour": COLOURS, "shape": SHAPES, "size": SIZES}
    while True:
        kind = rng.choice((*values, "moved", "removed", "added"))
        things = list(scene.things)
        free = [cell for cell in range(NUM_CELLS) if cell not in {thing.cell for thing in things}]
        index = rng.randrange(len(things))
        if (kind == "added" and len(things) == MAX_OBJECTS) or (kind == "removed" and len(things) == 1):
            continue
        old = things.pop(index)
        if kind == "added":
            new = draw_thing(rng, rng.choice(free))
            things += [old, new]
        elif kind == "moved":
            things.append(dataclasses.replace(old, cell=rng.choice(free)))
        elif kind != "removed":
            others = [value for value in values[kind] if value != getattr(old, kind)]
            value: dict[str, Any] = {kind: rng.choice(others)}
            things.append(dataclasses.replace(old, **value))
        changed = dataclasses.replace(scene, things=tuple(sorted(things)), look_seed=rng.getrandbits(32))
        if split_of(changed) == split:
            return changed, kind, changed.things.index(new) if kind == "added" else index


def draw_clip(rng: random.Random, split: str, num_frames: int) -> list[Scene]:
    """Draw a clip: one object crosses a row or a column of the grid, frame by frame; the first and last cell differ."""
    scene = draw_scene(rng, split)
    while len(scene.things) != 1:
        scene = draw_scene(rng, split)
    line = rng.randrange(GRID)
    in_row = rng.random() < 0.5
    path = [line * GRID + step if in_row else step * GRID + line for step in range(GRID)]
    if rng.random() < 0.5:
        path.reverse()
    cells = [path[round(frame * (GRID - 1) / max(1, num_frames - 1))] for frame in range(num_frames)]
    return [dataclasses.replace(scene, things=(dataclasses.replace(scene.things[0], cell=cell),)) for cell in cells]
