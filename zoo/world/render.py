"""Renders a scene at any size; the pixels depend on the scene alone."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw

from zoo.world.scene import GRID, Scene, Thing

NATIVE_PX = 96
OVERSAMPLE = 2

RGB = {
    "red": (214, 34, 34), "orange": (245, 134, 20), "yellow": (242, 220, 36), "green": (40, 160, 52),
    "teal": (20, 170, 170), "blue": (36, 70, 220), "purple": (132, 44, 172), "pink": (250, 130, 190),
}  # fmt: skip
# Two greys per tone: the ground and the mark of its texture.
GREYS = {"pale": (232, 206), "grey": (150, 124), "dark": (52, 80)}
# Half the width of an object, relative to its cell.
HALF_WIDTH = {"small": 0.20, "medium": 0.29, "large": 0.43}


Position = tuple[float, float]
"""Column and row of the middle of an object, in cells; whole numbers are the middles of the grid's cells."""


def place_of(thing: Thing, grid: int = GRID) -> Position:
    """Return the middle of an object's cell."""
    return thing.cell % grid, thing.cell // grid


def render_frames(scene: Scene, positions: Sequence[Sequence[Position]], size_px: int = NATIVE_PX) -> list[Image.Image]:
    """Render one frame per entry of `positions`, with the objects at these positions and the same ground and looks."""
    side = size_px * OVERSAMPLE
    rng = random.Random(scene.look_seed)
    ground = Image.fromarray(_ground(scene, side, rng))
    looks = rng.getstate()
    frames = []
    for frame in positions:
        rng.setstate(looks)
        image = ground.copy()
        draw = ImageDraw.Draw(image)
        for thing, position in zip(scene.things, frame, strict=True):
            _draw_thing(draw, thing, side / scene.grid, rng, position)
        frames.append(image.resize((size_px, size_px), Image.Resampling.BOX))
    return frames


def render_scene(scene: Scene, size_px: int = NATIVE_PX) -> Image.Image:
    """Render a scene as an RGB image of size_px x size_px; the same scene and size give the same bytes."""
    return render_frames(scene, [[place_of(thing, scene.grid) for thing in scene.things]], size_px)[0]


def _ground(scene: Scene, side: int, rng: random.Random) -> np.ndarray:
    """Return the textured ground, uint8 [side, side, 3]; one period is an eighth to a sixth of the side."""
    base, mark = (grey + rng.randint(-8, 8) for grey in GREYS[scene.tone])
    period, phase_x, phase_y = side / rng.choice((6, 7, 8)), rng.random(), rng.random()
    u = np.arange(side)[None, :] / period + phase_x  # [1, side]
    v = np.arange(side)[:, None] / period + phase_y  # [side, 1]
    marked = {
        "plain": np.zeros((side, side), dtype=bool),
        "striped": ((u + v) % 1.0) < 0.5,
        "dotted": ((u % 1.0) - 0.5) ** 2 + ((v % 1.0) - 0.5) ** 2 < 0.09,
        "checked": ((np.floor(u) + np.floor(v)) % 2) < 1,
    }[scene.texture]
    grey = np.where(marked, mark, base).astype(np.uint8)
    return np.repeat(grey[:, :, None], 3, axis=2)


def _draw_thing(
    draw: ImageDraw.ImageDraw, thing: Thing, cell_px: float, rng: random.Random, position: Position
) -> None:
    half = HALF_WIDTH[thing.size] * cell_px * rng.uniform(0.95, 1.05)
    slack = max(0.0, min(0.12 * cell_px, cell_px / 2 - half - 1))
    x = (position[0] + 0.5) * cell_px + rng.uniform(-slack, slack)
    y = (position[1] + 0.5) * cell_px + rng.uniform(-slack, slack)
    fill = tuple(max(0, min(255, value + rng.randint(-12, 12))) for value in RGB[thing.colour])
    box = (x - half, y - half, x + half, y + half)
    if thing.shape == "circle":
        draw.ellipse(box, fill=fill)
    elif thing.shape == "square":
        draw.rectangle(box, fill=fill)
    elif thing.shape == "ring":
        draw.ellipse(box, outline=fill, width=max(2, round(half * 0.42)))
    elif thing.shape == "triangle":
        draw.polygon([(x, y - half), (x + half, y + half), (x - half, y + half)], fill=fill)
    elif thing.shape == "cross":
        arm = half * 0.33
        draw.rectangle((x - half, y - arm, x + half, y + arm), fill=fill)
        draw.rectangle((x - arm, y - half, x + arm, y + half), fill=fill)
    else:
        radii = [half * (1.0 if k % 2 == 0 else 0.42) for k in range(10)]
        turns = [k * math.pi / 5 for k in range(10)]
        points = [(x + radius * math.sin(turn), y - radius * math.cos(turn)) for radius, turn in zip(radii, turns)]
        draw.polygon(points, fill=fill)
