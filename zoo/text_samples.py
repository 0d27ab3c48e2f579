"""Samples of the text pair: token ids with weights for training, and held-out prompts for benchmarks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerFast

from zoo.samples import FILLER_WEIGHT, FILLER_WORDS
from zoo.text_pair import render
from zoo.world import listing
from zoo.world.grammar import FILLER_ODDS
from zoo.world.scene import Scene, scene_rng


@dataclass(frozen=True)
class TextBatch:
    """Right-padded ids [b, L], weights of the loss per token [b, L], mask [b, L]."""

    ids: torch.Tensor
    weights: torch.Tensor
    mask: torch.Tensor


def held_out_questions(num: int, seed: int, split: str = "held_out") -> list[tuple[Scene, str]]:
    """`num` distinct (scene, phrasing) of a split that was not trained on, the phrasings taking turns."""
    phrasings, found, seen = list(listing.ASKED), [], set()
    index = 0
    while len(found) < num:
        scene = listing.draw_listed_scene(scene_rng(f"listing/{split}", seed, index), split)
        asked = (scene, phrasings[len(found) % len(phrasings)])
        index += 1
        if asked not in seen:
            seen.add(asked)
            found.append(asked)
    return found


def held_out_prompts(num: int, seed: int) -> list[str]:
    """`num` distinct prompts, rendered as the chat template does (the tokenizer adds the bos), from a seed."""
    return [render(listing.write_prompt(*asked)) for asked in held_out_questions(num, seed)]


def encode(prompt: str, answer: str, tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], list[float]]:
    """The ids of a conversation of one turn, laid out as the chat template does, and the loss weight of each id."""
    asked = tokenizer(render(prompt))["input_ids"]
    told = tokenizer(f" {answer}", add_special_tokens=False)["input_ids"]
    words = [tokenizer.decode([token]).strip() for token in told]
    weights = [0.0] * len(asked) + [FILLER_WEIGHT if word in FILLER_WORDS else 1.0 for word in words] + [1.0]
    return [*asked, *told, tokenizer.eos_token_id], weights


def draw_batches(
    seed: int,
    batch_size: int,
    tokenizer: PreTrainedTokenizerFast,
    odds: Sequence[float] = FILLER_ODDS,
    pool: int = 16,
) -> Iterator[TextBatch]:
    """Yield training batches for ever; samples are drawn `pool` batches at a time and sorted by length."""
    index = 0
    while True:
        drawn = []
        for _ in range(pool * batch_size):
            rng = scene_rng("listing/train", seed, index)
            index += 1
            scene, phrasing = listing.draw_listed_scene(rng, "train"), rng.choice(list(listing.ASKED))
            answer = listing.write_answer(scene, phrasing, rng, odds)
            drawn.append(encode(listing.write_prompt(scene, phrasing), answer, tokenizer))
        drawn.sort(key=lambda sample: len(sample[0]))
        starts = [start * batch_size for start in range(pool)]
        scene_rng("listing/train", seed, -index).shuffle(starts)
        for start in starts:
            yield _collate(drawn[start : start + batch_size], tokenizer.pad_token_id)


def _collate(samples: list[tuple[list[int], list[float]]], pad: int) -> TextBatch:
    length = max(len(ids) for ids, _ in samples)
    ids = torch.full((len(samples), length), pad)
    weights = torch.zeros(len(samples), length)
    mask = torch.zeros(len(samples), length, dtype=torch.long)
    for row, (row_ids, row_weights) in enumerate(samples):
        ids[row, : len(row_ids)] = torch.tensor(row_ids)
        weights[row, : len(row_ids)] = torch.tensor(row_weights)
        mask[row, : len(row_ids)] = 1
    return TextBatch(ids, weights, mask)
