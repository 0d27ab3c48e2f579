"""Draws samples of the text pair: token ids with loss weights for training, held-out questions and their prompts."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from transformers import PreTrainedTokenizerFast

from zoo.pair import load_tokenizer
from zoo.samples import Batch, Encoded, draw_pools, encode_turn, pad_rows
from zoo.world import listing
from zoo.world.grammar import FILLER_ODDS, count_stated
from zoo.world.scene import Scene, scene_rng


def render(prompt: str) -> str:
    """Render one question by the chat template."""
    return f"<s>USER: {prompt} ASSISTANT:"


def held_out_questions(num: int, seed: int, split: str = "held_out") -> list[tuple[Scene, str]]:
    """Return `num` distinct (scene, phrasing) pairs of a split without training data, alternating phrasings."""
    phrasings = list(listing.ASKED)
    questions: dict[tuple[Scene, str], None] = {}
    index = 0
    while len(questions) < num:
        scene = listing.draw_listed_scene(scene_rng(f"listing/{split}", seed, index), split)
        questions.setdefault((scene, phrasings[len(questions) % len(phrasings)]))
        index += 1
    return list(questions)


def held_out_prompts(num: int, seed: int) -> list[str]:
    """Return `num` distinct prompts, rendered by the chat template, from a seed."""
    return [render(listing.write_prompt(*asked)) for asked in held_out_questions(num, seed)]


def attributes_right(scene: Scene, phrasing: str, text: str) -> tuple[int, int]:
    """Return how many attribute words equal the true answer's at the same position, and the larger of both counts."""
    return count_stated(listing.write_answer(scene, phrasing, scene_rng("held_out", 0, 0)), text)


def encode(prompt: str, answer: str, tokenizer: PreTrainedTokenizerFast) -> Encoded:
    """Return the ids of a conversation of one turn, laid out as by the chat template, and their loss weights."""
    return encode_turn(render(prompt), f" {answer}", tokenizer)


def draw_batches(seed: int, batch_size: int, odds: Sequence[float] = FILLER_ODDS) -> Iterator[Batch]:
    """Yield training batches without end; see `draw_pools`."""
    tokenizer = load_tokenizer("text_target")

    def draw(rng: random.Random) -> Encoded:
        scene, phrasing = listing.draw_listed_scene(rng, "train"), rng.choice(list(listing.ASKED))
        answer = listing.write_answer(scene, phrasing, rng, odds)
        return encode(listing.write_prompt(scene, phrasing), answer, tokenizer)

    for rows in draw_pools(draw, "listing/train", seed, batch_size):
        yield Batch(*pad_rows(rows, tokenizer.pad_token_id))
