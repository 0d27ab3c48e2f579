"""Training samples: the mixture of conversations, their pixels and their token ids with weights."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO

import numpy as np
import torch
from PIL import Image
from transformers import PreTrainedTokenizerFast

from zoo.pair import IMAGE_PX, NUM_VISUAL_TOKENS, SPECIALS
from zoo.world import dialogue, grammar
from zoo.world.render import render_scene
from zoo.world.scene import Scene, change_scene, draw_clip, draw_scene, scene_rng

CLIP_FRAMES = 3
FILLER_WORDS = {word for words in grammar.FILLERS.values() for word in words}
# Fillers cannot be predicted, so they are learned slowly: odds, not words. A lower weight keeps their noise down and
# leaves the odds that minimise the loss as they are.
FILLER_WEIGHT = 0.3
MIXTURE = {"caption": 0.78, "second": 0.09, "change": 0.06, "clip": 0.04, "text": 0.03}


@dataclass(frozen=True)
class Conversation:
    """Turns of (prompt, answer) about the images of some scenes; all images come before the first prompt."""

    scenes: tuple[Scene, ...]
    turns: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Batch:
    """Right-padded ids [b, L], weights of the loss per token [b, L], mask [b, L], pixels [num images, 3, 96, 96]."""

    ids: torch.Tensor
    weights: torch.Tensor
    mask: torch.Tensor
    pixels: torch.Tensor | None

    def to(self, device: torch.device) -> Batch:
        """Return the batch on a device."""
        pixels = None if self.pixels is None else self.pixels.to(device)
        return Batch(self.ids.to(device), self.weights.to(device), self.mask.to(device), pixels)


def draw_conversation(split: str, rng: random.Random, odds: Sequence[float] = grammar.FILLER_ODDS) -> Conversation:
    """Draw one conversation of the mixture from a split, its filler words with these odds."""
    task = rng.choices(list(MIXTURE), list(MIXTURE.values()))[0]
    if task == "text":
        return Conversation((), (dialogue.draw_text_only(rng),))
    if task == "clip":
        frames = draw_clip(rng, split, CLIP_FRAMES)
        return Conversation(tuple(frames), ((dialogue.CLIP_PROMPT, dialogue.write_clip(frames, rng, odds)),))
    scene = draw_scene(rng, split)
    if task == "change":
        after, kind, index = change_scene(rng, scene, split)
        answer = dialogue.write_change(scene, after, kind, index, rng, odds)
        return Conversation((scene, after), ((dialogue.CHANGE_PROMPT, answer),))
    if task == "second":
        return Conversation((scene,), tuple(dialogue.draw_second_turn(scene, rng, odds)))
    phrasing = rng.choice(list(grammar.PROMPTS))
    return Conversation((scene,), ((grammar.PROMPTS[phrasing], grammar.write_caption(scene, phrasing, rng, odds)),))


def render_like_a_file(scene: Scene, rng: random.Random) -> np.ndarray:
    """Render a scene as a file would reach the model: sometimes larger and scaled down, sometimes through JPEG."""
    size_px = IMAGE_PX if rng.random() < 0.7 else rng.randint(112, 256)
    image = render_scene(scene, size_px)
    if rng.random() < 0.2:
        buffer = BytesIO()
        image.save(buffer, "JPEG", quality=rng.randint(80, 95))
        image = Image.open(buffer)
    if size_px != IMAGE_PX:
        image = image.resize((IMAGE_PX, IMAGE_PX), Image.Resampling.BICUBIC)
    return np.asarray(image)


def pixels_of(images: list[np.ndarray]) -> torch.Tensor:
    """Normalise uint8 images [96, 96, 3] as the processor does, to float32 [n, 3, 96, 96]."""
    stacked = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float()
    return (stacked / 255.0 - 0.5) / 0.25


def encode(conversation: Conversation, tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], list[float]]:
    """Return the ids of a conversation, laid out as the chat template does, and the loss weight of each id."""
    ids: list[int] = [tokenizer.bos_token_id]
    weights: list[float] = [0.0]
    image = SPECIALS["image"]
    for turn, (prompt, answer) in enumerate(conversation.turns):
        images = (image * NUM_VISUAL_TOKENS + "\n") * len(conversation.scenes) if turn == 0 else ""
        asked = tokenizer(f"USER: {images}{prompt} ASSISTANT:", add_special_tokens=False)["input_ids"]
        told = tokenizer(f" {answer}", add_special_tokens=False)["input_ids"]
        words = [tokenizer.decode([token]).strip() for token in told]
        ids += [*asked, *told, tokenizer.eos_token_id]
        weights += [0.0] * len(asked) + [FILLER_WEIGHT if word in FILLER_WORDS else 1.0 for word in words] + [1.0]
    return ids, weights


def draw_batches(
    split: str,
    seed: int,
    batch_size: int,
    tokenizer: PreTrainedTokenizerFast,
    pool: int = 16,
    odds: Sequence[float] = grammar.FILLER_ODDS,
) -> Iterator[Batch]:
    """Yield batches for ever; samples are drawn `pool` batches at a time and sorted by length, so few pads remain."""
    index = 0
    while True:
        drawn = []
        for _ in range(pool * batch_size):
            rng = scene_rng(split, seed, index)
            index += 1
            conversation = draw_conversation(split, rng, odds)
            drawn.append((*encode(conversation, tokenizer), conversation, rng))
        drawn.sort(key=lambda sample: len(sample[0]))
        starts = [start * batch_size for start in range(pool)]
        scene_rng(split, seed, -index).shuffle(starts)
        for start in starts:
            yield _collate(drawn[start : start + batch_size], tokenizer.pad_token_id)


def _collate(samples: list[tuple[list[int], list[float], Conversation, random.Random]], pad: int) -> Batch:
    length = max(len(ids) for ids, *_ in samples)
    ids = torch.full((len(samples), length), pad)
    weights = torch.zeros(len(samples), length)
    mask = torch.zeros(len(samples), length, dtype=torch.long)
    images = []
    for row, (row_ids, row_weights, conversation, rng) in enumerate(samples):
        ids[row, : len(row_ids)] = torch.tensor(row_ids)
        weights[row, : len(row_ids)] = torch.tensor(row_weights)
        mask[row, : len(row_ids)] = 1
        images += [render_like_a_file(scene, rng) for scene in conversation.scenes]
    return Batch(ids, weights, mask, pixels_of(images) if images else None)
