"""Generates the synthetic world: scenes, their pixels, their captions; see zoo/README.md."""

from __future__ import annotations

from PIL import Image

from zoo.world.grammar import PROMPTS, write_caption
from zoo.world.render import render_scene
from zoo.world.scene import Scene, draw_scene, scene_rng


def sample_scenes(split: str, n: int, seed: int, size_px: int = 336) -> list[tuple[Scene, Image.Image, str, str]]:
    """Return n (scene, image of size_px x size_px, one true caption, prompt) of a split, phrasings taking turns."""
    samples = []
    for index in range(n):
        rng = scene_rng(split, seed, index)
        scene = draw_scene(rng, split)
        phrasing = list(PROMPTS)[index % len(PROMPTS)]
        caption = write_caption(scene, phrasing, rng)
        samples.append((scene, render_scene(scene, size_px), caption, PROMPTS[phrasing]))
    return samples
