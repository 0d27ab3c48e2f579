"""Generates the world of the image models: scenes of one or two objects on grainy ground, and their prompts.

The grain is brightness noise at three scales, drawn from the scene's seed. No prompt states it and no model can predict
it. As in photographs, many codes therefore fit any position of an image equally well.
"""

from __future__ import annotations

import random

import numpy as np
from PIL import Image

from zoo.world.grammar import PLACES, kind_of, read_things
from zoo.world.render import NATIVE_PX, render_scene
from zoo.world.scene import TONES, Scene, Thing, draw_scene, scene_rng

# Small objects would be one and a half codes wide.
SIZES = ("medium", "large")
MAX_OBJECTS = 2
# Number of noise blotches per image side → standard deviation of the brightness noise, in 8-bit levels.
GRAIN = {24: 13.0, 48: 8.0, 96: 4.0}


def draw_grainy_scene(rng: random.Random, split: str, num_objects: int | None = None) -> Scene:
    """Draw a scene of 1 or 2 objects (or of `num_objects`) that belongs to `split`; all grounds are plain."""
    return draw_scene(rng, split, num_objects, MAX_OBJECTS, SIZES, "plain")


def render_grainy(scene: Scene) -> np.ndarray:
    """Render a scene with its grain, uint8 [96, 96, 3]; the same scene gives the same bytes."""
    rng = np.random.default_rng(scene.look_seed)
    pixels = np.asarray(render_scene(scene)).astype(np.float32)
    for cells, deviation in GRAIN.items():
        noise = Image.fromarray(rng.standard_normal((cells, cells), dtype=np.float32))
        if cells != NATIVE_PX:
            noise = noise.resize((NATIVE_PX, NATIVE_PX), Image.Resampling.BICUBIC)
        pixels += deviation * np.asarray(noise)[:, :, None]
    return np.clip(np.rint(pixels), 0, 255).astype(np.uint8)


def write_prompt(scene: Scene) -> str:
    """Write the prompt of a scene: everything that the image shows, except for the grain."""
    things = " and ".join(f"a {kind_of(thing)} at the {PLACES[thing.cell]}" for thing in scene.things)
    return f"{things} on {scene.tone} ground"


def parse_prompt(text: str) -> tuple[tuple[Thing, ...], str] | None:
    """Parse a prompt to its objects in reading order and its tone; None if `write_prompt` cannot write it."""
    text = text.strip().lower()
    things = read_things(text, "a {size} {colour} {shape} at the {place}")
    tone = next((tone for tone in TONES if text.endswith(f" on {tone} ground")), "")
    fits = len({thing.cell for thing in things}) == len(things) <= MAX_OBJECTS and {t.size for t in things} <= {*SIZES}
    if not things or not fits or write_prompt(Scene(tuple(things), tone, "plain", 0)) != text:
        return None
    return tuple(sorted(things)), tone


def sample_grainy(split: str, num: int, seed: int, start: int = 0) -> list[tuple[Scene, np.ndarray, str]]:
    """Return (scene, pixels uint8 [96, 96, 3], prompt) of samples start … start + num - 1 of a split."""
    scenes = [draw_grainy_scene(scene_rng(f"grain/{split}", seed, start + index), split) for index in range(num)]
    return [(scene, render_grainy(scene), write_prompt(scene)) for scene in scenes]
