"""Draws training samples: the mixture of conversations, their pixels, and their token ids with loss weights."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from itertools import chain
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast

from zoo.pair import IMAGE_PX, NUM_VISUAL_TOKENS, load_tokenizer
from zoo.world import dialogue, grammar
from zoo.world.render import render_scene
from zoo.world.scene import Scene, change_scene, draw_clip, draw_scene, scene_rng

CLIP_FRAMES = 3
FILLER_WORDS = {word for words in grammar.FILLERS.values() for word in words}
# Fillers cannot be predicted: a lower weight reduces gradient noise and does not change the optimal probabilities.
FILLER_WEIGHT = 0.3
POOL = 16
"""Batches that are drawn together and sorted by length."""
MIXTURE = {"caption": 0.78, "second": 0.09, "change": 0.06, "clip": 0.04, "text": 0.03}


Encoded = tuple[list[int], list[float]]
"""Ids of tokens and the loss weight of each."""


@dataclass(frozen=True)
class Conversation:
    """Turns of (prompt, answer) about the images of some scenes; all images come before the first prompt."""

    scenes: tuple[Scene, ...]
    turns: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Batch:
    """Right-padded ids [b, L], weights of the loss per token [b, L], mask [b, L], and the model's other inputs by name.

    `labels` [heads, tokens] are the attribute labels of the visual tokens of videos.
    """

    ids: Tensor
    weights: Tensor
    mask: Tensor
    inputs: dict[str, Tensor] = field(default_factory=dict)
    labels: Tensor | None = None


def draw_conversation(split: str, rng: random.Random, odds: Sequence[float] = grammar.FILLER_ODDS) -> Conversation:
    """Draw one conversation of the mixture from a split; `odds` are those of the filler words."""
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


def render_like_a_file(scene: Scene, rng: random.Random, size_px: int = IMAGE_PX) -> np.ndarray:
    """Render a scene with the artefacts of image files: sometimes downscaled, sometimes JPEG-compressed."""
    image = render_scene(scene, size_px if rng.random() < 0.7 else size_px + rng.randint(16, 160))
    return as_from_file(image, rng.randint(80, 95) if rng.random() < 0.2 else None, size_px)


def as_from_file(image: Image.Image, quality: int | None, size_px: int = IMAGE_PX) -> np.ndarray:
    """Return an image of any size as uint8 [size_px, size_px, 3], compressed as JPEG if `quality` is given."""
    if quality is not None:
        buffer = BytesIO()
        image.save(buffer, "JPEG", quality=quality)
        image = Image.open(buffer)
    if image.size != (size_px, size_px):
        image = image.resize((size_px, size_px), Image.Resampling.BICUBIC)
    return np.asarray(image)


def pixels_of(images: list[np.ndarray]) -> Tensor:
    """Normalise uint8 images [size, size, 3] as the processor does, to float32 [n, 3, size, size]."""
    stacked = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float()
    return (stacked / 255.0 - 0.5) / 0.25


def encode_turn(
    prompt: str, answer: str, tokenizer: PreTrainedTokenizerFast, fillers: Collection[str] = FILLER_WORDS
) -> Encoded:
    """Return the ids of a rendered prompt and of its answer, eos included, and the loss weight of each id."""
    asked, answered = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, answer))
    words = [tokenizer.decode([token]).strip() for token in answered]
    weights = [FILLER_WEIGHT if word in fillers else 1.0 for word in words]
    return [*asked, *answered, tokenizer.eos_token_id], [*[0.0] * len(asked), *weights, 1.0]


def encode(conversation: Conversation, tokenizer: PreTrainedTokenizerFast) -> Encoded:
    """Return the ids of a conversation, laid out as the chat template does, and the loss weight of each id."""
    before = tokenizer.bos_token + "USER: " + ("<image>" * NUM_VISUAL_TOKENS + "\n") * len(conversation.scenes)
    turns = []
    for prompt, answer in conversation.turns:
        turns.append(encode_turn(f"{before}{prompt} ASSISTANT:", f" {answer}", tokenizer))
        before = "USER: "
    ids, weights = zip(*turns)
    return [*chain(*ids)], [*chain(*weights)]


def pad_rows(rows: Iterable[Encoded], pad: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return right-padded ids, weights and mask [b, L] of encoded rows."""
    ids, weights = ([torch.tensor(part) for part in parts] for parts in zip(*rows))
    masks = [torch.ones_like(row) for row in ids]
    padded = [pad_sequence(part, True, value) for part, value in ((ids, pad), (weights, 0.0), (masks, 0))]
    return padded[0], padded[1], padded[2]


def draw_pools(
    draw: Callable[[random.Random], tuple[list[int], *tuple[Any, ...]]], stream: str, seed: int, size: int
) -> Iterator[list[tuple[Any, ...]]]:
    """Yield lists of `size` samples without end; pools of 16 · `size` samples are sorted by length against padding."""
    for index in itertools.count(step=POOL * size):
        samples = [draw(scene_rng(stream, seed, index + number)) for number in range(POOL * size)]
        samples.sort(key=lambda sample: len(sample[0]))
        starts = list(range(0, POOL * size, size))
        scene_rng(stream, seed, -index - POOL * size).shuffle(starts)
        yield from (samples[start : start + size] for start in starts)


def draw_batches(seed: int, batch_size: int, odds: Sequence[float] = grammar.FILLER_ODDS) -> Iterator[Batch]:
    """Yield training batches of `batch_size` conversations without end, grouped by length (see `draw_pools`). Equal
    arguments give equal batches; `odds` are those of the filler words."""
    tokenizer = load_tokenizer("caption_target")

    def draw(rng: random.Random) -> tuple[list[int], list[float], Conversation, random.Random]:
        conversation = draw_conversation("train", rng, odds)
        return *encode(conversation, tokenizer), conversation, rng

    for samples in draw_pools(draw, "train", seed, batch_size):
        images = [render_like_a_file(scene, rng) for *_, conversation, rng in samples for scene in conversation.scenes]
        inputs = {"pixel_values": pixels_of(images)} if images else {}
        yield Batch(*pad_rows([sample[:2] for sample in samples], tokenizer.pad_token_id), inputs)


def grammar_texts(num_scenes: int = 800, seed: int = 0) -> list[str]:
    """Return texts in which every word of the grammar, of the dialogues and of the prompts occurs."""
    texts = [*grammar.PROMPTS.values(), *dialogue.SECOND_PROMPTS.values(), dialogue.CHANGE_PROMPT, dialogue.CLIP_PROMPT]
    texts += ["USER: ", "ASSISTANT: ", *(f" {word}" for words in grammar.FILLERS.values() for word in words)]
    for index in range(num_scenes):
        rng = scene_rng("train", seed, index)
        scene = draw_scene(rng, "train")
        texts += [grammar.write_caption(scene, phrasing, rng) for phrasing in grammar.PROMPTS]
        texts += [dialogue.write_second(scene, question) for question in dialogue.SECOND_PROMPTS]
        after, kind, changed = change_scene(rng, scene, "train")
        texts.append(dialogue.write_change(scene, after, kind, changed, rng))
        texts.append(dialogue.write_clip(draw_clip(rng, "train", CLIP_FRAMES), rng))
        texts += dialogue.draw_text_only(rng)
    # A prompt follows a line break, an answer follows a space.
    return texts + [f" {text}" for text in texts if not text.startswith(" ")]
