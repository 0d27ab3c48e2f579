"""Measures the target on held-out dense scenes: attribute words, whole captions, and tokens per caption."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from decoding import Request, Sampling
from models.loading.checkpoints import CheckpointRef
from models.target import Target
from zoo.quality import count_stated, decode
from zoo.real_vision.labels import IMAGE_PX
from zoo.world.dense import PROMPTS, draw_dense, states, write_description
from zoo.world.render import render_scene
from zoo.world.scene import Scene, scene_rng

MAX_NEW_TOKENS = 240
Asked = tuple[Scene, str]


def draw_asked(split: str, num: int, seed: int) -> list[Asked]:
    """Return scenes of a split, each with a phrasing of PROMPTS in turn."""
    phrasings = list(PROMPTS)
    return [
        (draw_dense(scene_rng(split, seed, index), split), phrasings[index % len(phrasings)]) for index in range(num)
    ]


def requests_of(model: Target, asked: list[Asked], max_new_tokens: int = MAX_NEW_TOKENS) -> list[Request]:
    """Return one greedy request for each scene."""
    requests = []
    for index, (scene, phrasing) in enumerate(asked):
        content: list[dict[str, Any]] = [{"type": "image"}, {"type": "text", "text": PROMPTS[phrasing]}]
        prompt = model.front_end.render([{"role": "user", "content": content}])
        images = (np.asarray(render_scene(scene, IMAGE_PX)),)
        requests.append(Request(f"scene-{index}", prompt, images, Sampling(max_new_tokens=max_new_tokens)))
    return requests


def measure(folder: Path, num: int = 150, seed: int = 0) -> dict[str, float]:
    """Return the target's shares of right captions, by phrasing, and attribute words, and its mean tokens per caption.

    Attribute words count as right at the position of the true caption's; the larger count of both is the whole.
    Raises RuntimeError if a request failed.
    """
    model = Target.load(CheckpointRef(str(folder)), "float32")
    asked = draw_asked("held_out", num, seed)
    done = decode(model, requests_of(model, asked))
    counts = [
        count_stated(write_description(scene, phrasing, scene_rng("held_out", seed, 0)), one.text)
        for (scene, phrasing), one in zip(asked, done, strict=True)
    ]
    right = [(name, states(scene, name, one.text)) for (scene, name), one in zip(asked, done, strict=True)]
    by_phrasing = {name: [is_right for other, is_right in right if other == name] for name in PROMPTS}
    return {
        "num_captions": num,
        "captions_right": round(sum(is_right for _, is_right in right) / num, 4),
        **{f"captions_right_{name}": round(sum(some) / len(some), 4) for name, some in by_phrasing.items()},
        "attributes_right": round(sum(one for one, _ in counts) / sum(total for _, total in counts), 4),
        "mean_caption_tokens": round(sum(len(one.token_ids) for one in done) / num, 1),
    }
