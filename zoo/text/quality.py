"""Measures the text pair: right answers, attributes and tokens on held-out scenes, agreement of the two models."""

from __future__ import annotations

from pathlib import Path

from decoding import Request, Sampling
from zoo.pair import CHECKPOINTS
from zoo.quality import count_stated, load_targets, measure_texts
from zoo.text.pair import render
from zoo.text.samples import held_out_questions
from zoo.world import listing
from zoo.world.scene import Scene, scene_rng

MAX_NEW_TOKENS = 200


def attributes_right(scene: Scene, phrasing: str, text: str) -> tuple[int, int]:
    """Return how many attribute words equal the true answer's at the same position, and the larger of both counts."""
    return count_stated(listing.write_answer(scene, phrasing, scene_rng("held_out", 0, 0)), text)


def measure(folder: Path = CHECKPOINTS, num: int = 300, seed: int = 0) -> dict[str, float]:
    """Measure a saved pair; return the contents of zoo/text_quality.json. Raises RuntimeError if a question failed, or
    speculative answers differ from plain ones."""
    asked = held_out_questions(num, seed)
    prompts = [render(listing.write_prompt(*question)) for question in asked]
    sampling = Sampling(max_new_tokens=MAX_NEW_TOKENS)
    requests = [Request(f"text-{index}", prompt, (), sampling) for index, prompt in enumerate(prompts)]

    def score(index: int, text: str) -> tuple[bool, tuple[int, int]]:
        return listing.states(*asked[index], text), attributes_right(*asked[index], text)

    found, _ = measure_texts(load_targets(folder, "text"), requests, score, "answer")
    return {"num_questions": num, **{name: round(value, 4) for name, value in found.items()}}
