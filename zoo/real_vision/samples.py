"""Draws training samples: a scene's image with all its captions in one sequence.

The captions of a sequence do not attend to each other, and each continues the positions of the image: losses are those
of separate sequences, but the image's columns are computed once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from zoo.real_vision.labels import IMAGE_PX, NUM_VISUAL_TOKENS
from zoo.real_vision.model import IMAGE_TOKEN, SYSTEM
from zoo.samples import encode_turn, render_like_a_file
from zoo.world.dense import PROMPTS, draw_dense, write_description
from zoo.world.scene import Scene, scene_rng

BEFORE = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n"


@dataclass(frozen=True)
class Packed:
    """One sequence: ids, loss weights, positions and number of the caption of each token (0: the shared beginning),
    all [L]; the scene and its image, uint8 [256, 256, 3]."""

    ids: Tensor
    weights: Tensor
    positions: Tensor
    captions: Tensor
    scene: Scene
    image: np.ndarray

    @property
    def mask(self) -> Tensor:
        """Return which tokens each token attends to, bool [1, 1, L, L]."""
        shared, own = self.captions[None] == 0, self.captions[:, None] == self.captions[None]
        return torch.tril(shared | own)[None, None]


def pack(scene: Scene, image: np.ndarray, captions: dict[str, str], tokenizer: PreTrainedTokenizerFast) -> Packed:
    """Encode the captions of an image, by their phrasing, as the chat template lays them out."""
    start = tokenizer(BEFORE, add_special_tokens=False)["input_ids"]
    start = start + [tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)] * NUM_VISUAL_TOKENS
    ids, weights, positions, numbers = list(start), [0.0] * len(start), [*range(len(start))], [0] * len(start)
    for number, (phrasing, caption) in enumerate(captions.items(), start=1):
        asked = f"\n{PROMPTS[phrasing]}<|im_end|>\n<|im_start|>assistant\n"
        caption_ids, caption_weights = encode_turn(asked, caption, tokenizer)
        ids += caption_ids
        weights += caption_weights
        positions += range(len(start), len(start) + len(caption_ids))
        numbers += [number] * len(caption_ids)
    encoded = [torch.tensor(one) for one in (ids, weights, positions, numbers)]
    return Packed(encoded[0], encoded[1], encoded[2], encoded[3], scene, image)


def draw_packed(split: str, seed: int, index: int, tokenizer: PreTrainedTokenizerFast) -> Packed:
    """Draw sample `index` of a split: a dense scene with one caption in every phrasing."""
    rng = scene_rng(split, seed, index)
    scene = draw_dense(rng, split)
    image = render_like_a_file(scene, rng, IMAGE_PX)
    return pack(scene, image, {name: write_description(scene, name, rng) for name in PROMPTS}, tokenizer)
