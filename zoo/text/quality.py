"""Measures the text pair: right answers, attributes and tokens on held-out scenes, agreement of the two models."""

from __future__ import annotations

from pathlib import Path

import torch

from decoding import Request, Sampling
from models.target import Target
from zoo.pair import CHECKPOINTS
from zoo.quality import count_stated, load_targets, measure_texts
from zoo.text.pair import render
from zoo.text.samples import encode, held_out_questions
from zoo.world import listing
from zoo.world.scene import Scene, scene_rng

MAX_NEW_TOKENS = 200


def true_answer(scene: Scene, phrasing: str) -> str:
    """Return one right answer."""
    return listing.write_answer(scene, phrasing, scene_rng("held_out", 0, 0))


def attributes_right(scene: Scene, phrasing: str, text: str) -> tuple[int, int]:
    """Return how many attribute words equal the true answer's at the same position, and the larger of both counts."""
    return count_stated(true_answer(scene, phrasing), text)


@torch.no_grad()
def tokens_right(model: Target, asked: list[tuple[Scene, str]]) -> float:
    """Return the share of the true answers' tokens, without filler words, that are the model's top-1."""
    right = total = 0
    for scene, phrasing in asked:
        answer = true_answer(scene, phrasing)
        ids, weights = encode(listing.write_prompt(scene, phrasing), answer, model.front_end.tokenizer)
        row = torch.tensor([ids])
        best = model.model(input_ids=row, use_cache=False).logits[0, :-1].argmax(-1)
        counted = torch.tensor(weights[1:]) == 1.0
        right += int((best == row[0, 1:])[counted].sum())
        total += int(counted.sum())
    return right / total


def measure(folder: Path = CHECKPOINTS, num: int = 300, seed: int = 0) -> dict[str, float]:
    """Measure a saved pair; return the contents of zoo/text_quality.json. Raises RuntimeError if a question failed, or
    speculative answers differ from plain ones."""
    asked = held_out_questions(num, seed)
    pair = load_targets(folder, "text")
    # Measured before an engine takes over the models.
    found = {f"{role}_tokens_right": tokens_right(model, asked) for role, model in pair.items()}
    prompts = [render(listing.write_prompt(*question)) for question in asked]
    sampling = Sampling(max_new_tokens=MAX_NEW_TOKENS)
    requests = [Request(f"text-{index}", prompt, (), sampling) for index, prompt in enumerate(prompts)]

    def score(index: int, text: str) -> tuple[bool, tuple[int, int]]:
        return listing.states(*asked[index], text), attributes_right(*asked[index], text)

    texts, _ = measure_texts(pair, requests, score, "answer")
    found |= texts
    return {"num_questions": num, **{name: round(value, 4) for name, value in found.items()}}
