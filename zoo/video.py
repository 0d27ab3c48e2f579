"""Draws training samples of the video pair: clips as processor outputs, their labels, and conversations about them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from models.inputs.clip import Clip
from zoo.pair import IMAGE_PX, load_processor
from zoo.samples import Batch, Encoded, as_from_file, encode_turn, pad_rows
from zoo.training import IGNORED
from zoo.world.grammar import FILLER_ODDS, count_stated
from zoo.world.motion import FILLERS, PROMPTS, Motion, draw_motion, place_at, render_motion, write_motion
from zoo.world.render import place_of
from zoo.world.scene import COLOURS, GRID, SHAPES, SIZES, TEXTURES, TONES, scene_rng

NUM_FRAMES, TEMPORAL = 8, 2
"""Frames per clip in training; every two frames have 9 visual tokens, one for each cell."""
RATES_FPS = (2.0, 4.0)
"""Bounds of the sampled frame rate of clips: eight frames of a file of two to four seconds."""
NEAR_CELLS = 0.35
"""Maximum distance of an object from a cell's middle at which it counts as the object of the cell."""
HEADS = {
    "filled": 2, "size": len(SIZES), "colour": len(COLOURS), "shape": len(SHAPES),
    "tone": len(TONES), "texture": len(TEXTURES),
}  # fmt: skip
"""Labels of a visual token and their sizes: whether its cell is filled, that object's attributes, the ground's."""
CLIP_S, HELD_OUT_PX = 3.0, 192
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
        positions = [place_at(motion, moment) if index == motion.mover else place_of(thing) for moment in moments]
        values = torch.tensor([1, SIZES.index(thing.size), COLOURS.index(thing.colour), SHAPES.index(thing.shape)])
        for row, column in itertools.product(range(GRID), repeat=2):
            distances = [max(abs(x - column), abs(y - row)) for x, y in positions]
            if max(distances) < NEAR_CELLS:
                labels[:4, step, row, column] = values
            elif min(distances) < 1.0 and index == motion.mover:
                labels[0, step, row, column] = IGNORED
    return labels.flatten(1)


def held_out_clips(num: int, seed: int) -> list[tuple[Motion, str, Clip]]:
    """Return held-out motions, the phrasing requested for each, and a clip of eight frames over three seconds."""
    drawn = []
    for index in range(num):
        motion = draw_motion(scene_rng("held_out", seed, index), "held_out")
        frames = np.stack([np.asarray(frame) for frame in render_motion(motion, NUM_FRAMES, HELD_OUT_PX)])
        times_s = tuple(CLIP_S * (frame + 0.5) / NUM_FRAMES for frame in range(NUM_FRAMES))
        drawn.append((motion, list(PROMPTS)[index % len(PROMPTS)], Clip(frames, times_s, NUM_FRAMES / CLIP_S)))
    return drawn


def attributes_right(motion: Motion, phrasing: str, text: str) -> tuple[int, int]:
    """Return how many attribute words equal the true caption's at the same position, and the larger of both counts."""
    return count_stated(write_motion(motion, phrasing, scene_rng("held_out", 0, 0)), text)


def encode(prompt: str, answer: str, tokenizer: PreTrainedTokenizerFast, num_visual_tokens: int) -> Encoded:
    """Return the ids of a conversation, laid out as by the chat template, and the loss weight of each id."""
    clip = f"<|vision_start|>{'<|video_pad|>' * num_visual_tokens}<|vision_end|>"
    rendered = f"<|im_start|>user\n{clip}{prompt}<|im_end|>\n<|im_start|>assistant\n"
    return encode_turn(rendered, answer, tokenizer, FILLER_WORDS)


def draw_batches(seed: int, batch_size: int, odds: Sequence[float] = FILLER_ODDS) -> Iterator[Batch]:
    """Yield training batches without end; `inputs` has the clips of a batch as the processor returns them."""
    processor = load_processor("video_target")
    tokenizer, videos = processor.tokenizer, processor.video_processor
    video_token = tokenizer.convert_tokens_to_ids("<|video_pad|>")
    for start in itertools.count(step=batch_size):
        rows, clips, seconds, labels = [], [], [], []
        for index in range(start, start + batch_size):
            rng = scene_rng("train", seed, index)
            motion = draw_motion(rng, "train")
            phrasing = rng.choices(list(PHRASING_ODDS), list(PHRASING_ODDS.values()))[0]
            size_px = IMAGE_PX if rng.random() < 0.7 else rng.randint(112, 192)
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


def grammar_texts(num_clips: int = 800) -> list[str]:
    """Return texts in which every word of the captions of videos occurs."""
    texts = [f" {word}" for words in FILLERS.values() for word in words]
    for index in range(num_clips):
        rng = scene_rng("train", 0, index)
        drawn = draw_motion(rng, "train")
        texts += [write_motion(drawn, phrasing, rng) for phrasing in PROMPTS]
    return texts
