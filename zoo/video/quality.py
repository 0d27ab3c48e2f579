"""Measures the video pair: right captions and attributes on held-out clips, and agreement of the two models."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from decoding import Request, Sampling
from models.inputs.clip import Clip
from models.target import Target
from zoo.pair import CHECKPOINTS
from zoo.quality import count_stated, load_targets, measure_texts
from zoo.video.pair import NUM_FRAMES
from zoo.world.motion import PROMPTS, Motion, draw_motion, render_motion, states, write_motion
from zoo.world.scene import scene_rng

CLIP_S = 3.0
RENDERED_PX = 192


def held_out_clips(num: int, seed: int) -> list[tuple[Motion, str, Clip]]:
    """Return held-out motions, the phrasing requested for each, and a clip of eight frames over three seconds."""
    drawn = []
    for index in range(num):
        rng = scene_rng("held_out", seed, index)
        motion = draw_motion(rng, "held_out")
        frames = np.stack([np.asarray(frame) for frame in render_motion(motion, NUM_FRAMES, RENDERED_PX)])
        times_s = tuple(CLIP_S * (frame + 0.5) / NUM_FRAMES for frame in range(NUM_FRAMES))
        drawn.append((motion, list(PROMPTS)[index % len(PROMPTS)], Clip(frames, times_s, NUM_FRAMES / CLIP_S)))
    return drawn


def requests(model: Target, clips: list[tuple[Motion, str, Clip]]) -> list[Request]:
    """Return one greedy request for each clip."""
    wanted = []
    for index, (_, phrasing, clip) in enumerate(clips):
        content = [{"type": "video"}, {"type": "text", "text": PROMPTS[phrasing]}]
        prompt = model.front_end.render([{"role": "user", "content": content}])
        wanted.append(Request(f"clip-{index}", prompt, (), Sampling(max_new_tokens=120), videos=(clip,)))
    return wanted


def attributes_right(motion: Motion, phrasing: str, text: str) -> tuple[int, int]:
    """Return how many attribute words equal the true caption's at the same position, and the larger of both counts."""
    return count_stated(write_motion(motion, phrasing, scene_rng("held_out", 0, 0)), text)


def measure(folder: Path = CHECKPOINTS, num: int = 300, seed: int = 0) -> dict[str, float]:
    """Measure a saved pair; return the contents of zoo/video_quality.json. Raises RuntimeError if a clip failed, or
    speculative captions differ from plain ones."""
    clips = held_out_clips(num, seed)

    def score(index: int, text: str) -> tuple[bool, tuple[int, int]]:
        motion, phrasing, _ = clips[index]
        return states(motion, phrasing, text), attributes_right(motion, phrasing, text)

    pair = load_targets(folder, "video")
    found, _ = measure_texts(pair, requests(pair["target"], clips), score, "caption")
    return {"num_clips": num, **{name: round(value, 4) for name, value in found.items()}}
