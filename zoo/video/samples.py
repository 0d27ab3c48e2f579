"""Draws training samples of the video pair: clips as processor outputs, their labels, and conversations about them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from models.inputs.video import VideoProcessor
from zoo.samples import Batch, as_from_file, encode_turn, pad_rows
from zoo.training import IGNORED
from zoo.video.pair import FRAME_PX, NUM_FRAMES, TEMPORAL
from zoo.world.grammar import FILLER_ODDS
from zoo.world.motion import FILLERS, PROMPTS, Motion, draw_motion, place_at, render_motion, write_motion
from zoo.world.render import place_of
from zoo.world.scene import COLOURS, GRID, SHAPES, SIZES, TEXTURES, TONES, scene_rng

RATES_FPS = (2.0, 4.0)
"""Bounds of the sampled frame rate of clips: eight frames of a file of two to four seconds."""
NEAR_CELLS = 0.35
"""Maximum distance of an object from a cell's middle at which it counts as the object of the cell."""
HEADS = {
    "filled": 2, "size": len(SIZES), "colour": len(COLOURS), "shape": len(SHAPES),
    "tone": len(TONES), "texture": len(TEXTURES),
}  # fmt: skip
"""Labels of a visual token and their sizes: whether its cell is filled, that object's attributes, the ground's."""
FILLER_WORDS = {word for words in FILLERS.values() for word in words}
PHRASING_ODDS = {"describe": 0.5, "detailed": 0.4, "moved": 0.1}


def label_tokens(motion: Motion) -> Tensor:
    """Return the labels [6 heads, tokens] of a clip's visual tokens; each token is one grid cell in two frames."""
    labels = torch.full((len(HEADS), NUM_FRAMES // TEMPORAL, GRID, GRID), IGNORED)
    labels[0] = 0
    labels[4], labels[5] = TONES.index(motion.scene.tone), TEXTURES.index(motion.scene.texture)
    for step, index in itertools.product(range(NUM_FRAMES // TEMPORAL), range(len(motion.scene.things))):
        thing = motion.scene.things[index]
        moments = [(step * TEMPORAL + i) / (NUM_FRAMES - 1) for i in range(TEMPORAL)]
        places = [place_at(motion, moment) if index == motion.mover else place_of(thing) for moment in moments]
        values = torch.tensor([1, SIZES.index(thing.size), COLOURS.index(thing.colour), SHAPES.index(thing.shape)])
        for row, column in itertools.product(range(GRID), repeat=2):
            distances = [max(abs(x - column), abs(y - row)) for x, y in places]
            if max(distances) < NEAR_CELLS:
                labels[:4, step, row, column] = values
            elif min(distances) < 1.0 and index == motion.mover:
                labels[0, step, row, column] = IGNORED
    return labels.flatten(1)


def encode(
    prompt: str, answer: str, tokenizer: PreTrainedTokenizerFast, num_visual_tokens: int
) -> tuple[list[int], list[float]]:
    """Return the ids of a conversation, laid out as by the chat template, and the loss weight of each id."""
    clip = f"<|vision_start|>{'<|video_pad|>' * num_visual_tokens}<|vision_end|>"
    rendered = f"<|im_start|>user\n{clip}{prompt}<|im_end|>\n<|im_start|>assistant\n"
    return encode_turn(rendered, answer, tokenizer, FILLER_WORDS)


def draw_batches(
    split: str,
    seed: int,
    batch_size: int,
    tokenizer: PreTrainedTokenizerFast,
    videos: VideoProcessor,
    odds: Sequence[float] = FILLER_ODDS,
) -> Iterator[Batch]:
    """Yield training batches without end; `inputs` has the clips of a batch as the processor returns them."""
    video_token = tokenizer.convert_tokens_to_ids("<|video_pad|>")
    for start in itertools.count(step=batch_size):
        rows, clips, seconds, labels = [], [], [], []
        for index in range(start, start + batch_size):
            rng = scene_rng(split, seed, index)
            motion = draw_motion(rng, split)
            phrasing = rng.choices(list(PHRASING_ODDS), list(PHRASING_ODDS.values()))[0]
            size_px = FRAME_PX if rng.random() < 0.7 else rng.randint(112, 192)
            frames = render_motion(motion, NUM_FRAMES, size_px)
            quality = rng.randint(50, 92) if rng.random() < 0.5 else None
            clips.append(videos([np.stack([as_from_file(frame, quality) for frame in frames])], [None]))
            seconds.append(TEMPORAL / rng.uniform(*RATES_FPS))
            labels.append(label_tokens(motion))
            answer = write_motion(motion, phrasing, rng, odds)
            rows.append(encode(PROMPTS[phrasing], answer, tokenizer, labels[-1].shape[1]))
        ids, weights, mask = pad_rows(rows, tokenizer.pad_token_id)
        inputs = {name: torch.cat([clip[name] for clip in clips]) for name in ("pixel_values_videos", "video_grid_thw")}
        inputs["second_per_grid_ts"] = torch.tensor(seconds)
        inputs["mm_token_type_ids"] = (ids == video_token).long() * 2
        yield Batch(ids, weights, mask, inputs, torch.cat(labels, dim=1))
