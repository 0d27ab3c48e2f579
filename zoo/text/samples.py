"""Draws samples of the text pair: token ids with loss weights for training, and held-out prompts for benchmarks."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from transformers import PreTrainedTokenizerFast

from zoo.samples import Batch, draw_pools, encode_turn, pad_rows
from zoo.text.pair import render
from zoo.world import listing
from zoo.world.grammar import FILLER_ODDS
from zoo.world.scene import Scene, scene_rng


def held_out_questions(num: int, seed: int, split: str = "held_out") -> list[tuple[Scene, str]]:
    """Return `num` distinct (scene, phrasing) pairs of a split without training data, alternating phrasings."""
    phrasings = list(listing.ASKED)
    found: dict[tuple[Scene, str], None] = {}
    index = 0
    while len(found) < num:
        scene = listing.draw_listed_scene(scene_rng(f"listing/{split}", seed, index), split)
        found.setdefault((scene, phrasings[len(found) % len(phrasings)]))
        index += 1
    return list(found)


def held_out_prompts(num: int, seed: int) -> list[str]:
    """Return `num` distinct prompts, rendered by the chat template, from a seed."""
    return [render(listing.write_prompt(*asked)) for asked in held_out_questions(num, seed)]


def encode(prompt: str, answer: str, tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], list[float]]:
    """Return the ids of a conversation of one turn, laid out as by the chat template, and their loss weights."""
    return encode_turn(render(prompt), f" {answer}", tokenizer)


def draw_batches(
    seed: int, batch_size: int, tokenizer: PreTrainedTokenizerFast, odds: Sequence[float] = FILLER_ODDS
) -> Iterator[Batch]:
    """Yield training batches without end; see `draw_pools`."""

    def draw(rng: random.Random) -> tuple[list[int], list[float]]:
        scene, phrasing = listing.draw_listed_scene(rng, "train"), rng.choice(list(listing.ASKED))
        answer = listing.write_answer(scene, phrasing, rng, odds)
        return encode(listing.write_prompt(scene, phrasing), answer, tokenizer)

    for rows in draw_pools(draw, "listing/train", seed, batch_size):
        yield Batch(*pad_rows(rows, tokenizer.pad_token_id))
