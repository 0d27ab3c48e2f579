"""Training samples of the video pair: clips as processor outputs, and conversations about them.

Contains the layout of a conversation and the augmentation of clips.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from models.inputs.video import VideoProcessor
from zoo.samples import FILLER_WEIGHT
from zoo.video_pair import FRAME_PX, NUM_FRAMES, TEMPORAL
from zoo.world.grammar import FILLER_ODDS
from zoo.world.motion import FILLERS, PROMPTS, Motion, draw_motion, place_at, render_motion, write_motion
from zoo.world.scene import COLOURS, GRID, SHAPES, SIZES, TEXTURES, TONES, scene_rng

RATES_FPS = (2.0, 4.0)
"""Bounds of a clip's sampled rate: eight frames of a file of two to four seconds."""
NEAR_CELLS = 0.35
"""Maximum distance of an object from a cell's middle at which it counts as the object of the cell."""
HEADS = {
    "filled": 2, "size": len(SIZES), "colour": len(COLOURS), "shape": len(SHAPES),
    "tone": len(TONES), "texture": len(TEXTURES),
}  # fmt: skip
"""What a visual token names: whether its cell is filled, that object's attributes, the ground's."""
IGNORED = -100
FILLER_WORDS = {word for words in FILLERS.values() for word in words}
PHRASING_ODDS = {"describe": 0.5, "detailed": 0.4, "moved": 0.1}


@dataclass(frozen=True)
class VideoBatch:
    """Right-padded ids [b, L], weights of the loss per token [b, L], mask [b, L], and clips: patches of all of them
    [patches, values], grids [b, 3], seconds per visual step [b]; labels of their visual tokens [6 heads, tokens]."""

    ids: Tensor
    weights: Tensor
    mask: Tensor
    patches: Tensor
    grids: Tensor
    seconds: Tensor
    labels: Tensor


def wear(frames: Sequence[Image.Image], rng: random.Random) -> list[np.ndarray]:
    """Frames as in a file: often through a lossy codec, in the model's size."""
    quality = rng.randint(50, 92) if rng.random() < 0.5 else None
    worn = []
    for frame in frames:
        if quality is not None:
            buffer = BytesIO()
            frame.save(buffer, "JPEG", quality=quality)
            frame = Image.open(buffer)
        if frame.size != (FRAME_PX, FRAME_PX):
            frame = frame.resize((FRAME_PX, FRAME_PX), Image.Resampling.BICUBIC)
        worn.append(np.asarray(frame))
    return worn


def label_tokens(motion: Motion) -> Tensor:
    """Labels [6 heads, tokens] of a clip's visual tokens, two frames and one cell of the grid each."""
    steps = NUM_FRAMES // TEMPORAL
    labels = torch.full((len(HEADS), steps, GRID, GRID), IGNORED)
    labels[0] = 0
    labels[4], labels[5] = TONES.index(motion.scene.tone), TEXTURES.index(motion.scene.texture)
    for step in range(steps):
        for index, thing in enumerate(motion.scene.things):
            moments = [(step * TEMPORAL + i) / (NUM_FRAMES - 1) for i in range(TEMPORAL)]
            moving = index == motion.mover
            places = [place_at(motion, m) if moving else (thing.cell % GRID, thing.cell // GRID) for m in moments]
            told = (1, SIZES.index(thing.size), COLOURS.index(thing.colour), SHAPES.index(thing.shape))
            for row in range(GRID):
                for column in range(GRID):
                    far = max(max(abs(x - column), abs(y - row)) for x, y in places)
                    if far < NEAR_CELLS:
                        labels[:4, step, row, column] = torch.tensor(told)
                    elif min(max(abs(x - column), abs(y - row)) for x, y in places) < 1.0 and moving:
                        labels[0, step, row, column] = IGNORED
    return labels.flatten(1)


def encode(
    prompt: str, answer: str, tokenizer: PreTrainedTokenizerFast, num_visual_tokens: int
) -> tuple[list[int], list[float]]:
    """Ids of a conversation, laid out as the chat template does, and the loss weight of each id."""
    clip = f"<|vision_start|>{'<|video_pad|>' * num_visual_tokens}<|vision_end|>"
    asked = tokenizer(f"<|im_start|>user\n{clip}{prompt}<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
    told = tokenizer(answer)["input_ids"]
    words = [tokenizer.decode([token]).strip() for token in told]
    weights = [FILLER_WEIGHT if word in FILLER_WORDS else 1.0 for word in words]
    return [*asked, *told, tokenizer.eos_token_id], [*[0.0] * len(asked), *weights, 1.0]


def draw_batches(
    split: str,
    seed: int,
    batch_size: int,
    tokenizer: PreTrainedTokenizerFast,
    videos: VideoProcessor,
    odds: Sequence[float] = FILLER_ODDS,
) -> Iterator[VideoBatch]:
    """Batches for ever."""
    index = 0
    while True:
        rows, patches, grids, seconds, labels = [], [], [], [], []
        for _ in range(batch_size):
            rng = scene_rng(split, seed, index)
            index += 1
            motion = draw_motion(rng, split)
            phrasing = rng.choices(list(PHRASING_ODDS), list(PHRASING_ODDS.values()))[0]
            size_px = FRAME_PX if rng.random() < 0.7 else rng.randint(112, 192)
            frames = np.stack(wear(render_motion(motion, NUM_FRAMES, size_px), rng))
            sent = videos([frames], [None])
            patches.append(sent["pixel_values_videos"])
            grids.append(sent["video_grid_thw"])
            seconds.append(TEMPORAL / rng.uniform(*RATES_FPS))
            labels.append(label_tokens(motion))
            answer = write_motion(motion, phrasing, rng, odds)
            rows.append(encode(PROMPTS[phrasing], answer, tokenizer, labels[-1].shape[1]))
        length = max(len(ids) for ids, _ in rows)
        ids = torch.full((batch_size, length), tokenizer.pad_token_id)
        weights, mask = torch.zeros(batch_size, length), torch.zeros(batch_size, length, dtype=torch.long)
        for row, (row_ids, row_weights) in enumerate(rows):
            ids[row, : len(row_ids)] = torch.tensor(row_ids)
            weights[row, : len(row_ids)] = torch.tensor(row_weights)
            mask[row, : len(row_ids)] = 1
        yield VideoBatch(
            ids, weights, mask, torch.cat(patches), torch.cat(grids), torch.tensor(seconds), torch.cat(labels, dim=1)
        )
