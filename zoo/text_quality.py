"""Quality of the text pair: right answers, attributes and tokens on held-out scenes, and agreement of the two models.

`python -m zoo.text_quality` measures the shipped pair and writes zoo/text_quality.json; with `--table` it prints the
table of the committed file.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from decoding import Completion, Engine, Method, Request, Sampling
from decoding.acceptance import Exact
from decoding.contexts import Full
from decoding.drafters import ModelDrafter, NoDrafter
from decoding.trees import Chain
from models.loading.checkpoints import CheckpointRef
from models.target import Target
from zoo.allocation import keep_memory
from zoo.pair import CHECKPOINTS
from zoo.text_pair import render
from zoo.text_samples import encode, held_out_questions
from zoo.world import listing
from zoo.world.scene import Scene, scene_rng

QUALITY_JSON = Path(__file__).parent / "text_quality.json"
NUM_DRAFTED = 5
MAX_NEW_TOKENS = 200
SLOTS = 25

ROWS = (
    ("answers right, target", "target_answers_right"),
    ("answers right, drafter", "drafter_answers_right"),
    ("stated attributes right, target", "target_attributes_right"),
    ("stated attributes right, drafter", "drafter_attributes_right"),
    ("tokens of true answers that are the top 1, filler words left out, target", "target_tokens_right"),
    ("tokens of true answers that are the top 1, filler words left out, drafter", "drafter_tokens_right"),
    ("mean acceptance length, 5 drafted", "mean_acceptance_length"),
    ("mean tokens of an answer", "mean_answer_tokens"),
)

Question = tuple[Scene, str]


def true_answer(scene: Scene, phrasing: str) -> str:
    """One answer that is right."""
    return listing.write_answer(scene, phrasing, scene_rng("held_out", 0, 0))


def answer(model: Target, asked: list[Question], drafter: Target | None = None) -> list[Completion]:
    """Greedy answers in order: plain, or drafted by a chain.

    Raises:
        RuntimeError: a question failed.
    """
    method = Method(NoDrafter(), Chain(1), Exact())
    if drafter is not None:
        method = Method(ModelDrafter(drafter, [Full()], model.vocab_size), Chain(NUM_DRAFTED), Exact())
    sampling = Sampling(max_new_tokens=MAX_NEW_TOKENS)
    wanted = [
        Request(f"text-{index}", render(listing.write_prompt(*one)), (), sampling) for index, one in enumerate(asked)
    ]
    done = {one.sample_id: one for one in Engine(model, method, SLOTS, 512).run(wanted)}
    failed = [one.error for one in done.values() if one.error]
    if failed:
        raise RuntimeError(f"{len(failed)} questions failed, the first with: {failed[0]}")
    return [done[f"text-{index}"] for index in range(len(asked))]


def attributes_right(scene: Scene, phrasing: str, text: str) -> tuple[int, int]:
    """Attribute words at the positions of the true answer, and the number of its attribute words."""
    true, said = listing.stated(true_answer(scene, phrasing)), listing.stated(text)
    return sum(one == other for one, other in zip(true, said)), max(len(true), len(said))


@torch.no_grad()
def tokens_right(model: Target, asked: list[Question]) -> float:
    """The share of true answers' tokens, filler words left out, that are the first choice after all that precede."""
    right = total = 0
    for scene, phrasing in asked:
        prompt, told = listing.write_prompt(scene, phrasing), true_answer(scene, phrasing)
        ids, weights = encode(prompt, told, model.front_end.tokenizer)
        row = torch.tensor([ids])
        best = model.model(input_ids=row, use_cache=False).logits[0, :-1].argmax(-1)
        counted = torch.tensor(weights[1:]) == 1.0
        right += int((best == row[0, 1:])[counted].sum())
        total += int(counted.sum())
    return right / total


def measure(folder: Path = CHECKPOINTS, num: int = 300, seed: int = 0) -> dict[str, float]:
    """Measure a saved pair; the result is what zoo/text_quality.json holds.

    Raises:
        RuntimeError: a question failed, or a speculative answer is not the plain one.
    """
    asked = held_out_questions(num, seed)
    pair = {role: Target.load(CheckpointRef(str(folder / f"text_{role}")), "float32") for role in ("target", "drafter")}
    found: dict[str, float] = {"num_questions": num}
    # Before an engine owns the models, which then run under it only.
    found |= {f"{role}_tokens_right": tokens_right(model, asked) for role, model in pair.items()}
    plain = {role: answer(model, asked) for role, model in pair.items()}
    for role, done in plain.items():
        told = [(scene, phrasing, one.text) for (scene, phrasing), one in zip(asked, done, strict=True)]
        counts = [attributes_right(*one) for one in told]
        found[f"{role}_answers_right"] = sum(listing.states(*one) for one in told) / num
        found[f"{role}_attributes_right"] = sum(one for one, _ in counts) / sum(whole for _, whole in counts)
    found["mean_answer_tokens"] = sum(len(one.token_ids) for one in plain["target"]) / num
    drafted = answer(pair["target"], asked, pair["drafter"])
    if [one.text for one in drafted] != [one.text for one in plain["target"]]:
        raise RuntimeError("speculative answers differ from plain ones")
    steps = sum(one.telemetry.num_spec_steps for one in drafted)
    found["mean_acceptance_length"] = 1 + sum(one.telemetry.num_accepted_draft_tokens for one in drafted) / steps
    return {name: round(value, 4) for name, value in found.items()}


def quality_table(measured: dict[str, float]) -> str:
    """The measured numbers as a Markdown table."""
    lines = ["| measured on held-out scenes | value |", "|---|---|"]
    return "\n".join([*lines, *(f"| {said} | {measured[key]:.3f} |" for said, key in ROWS)])


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m zoo.text_quality", description="Measure the text pair.")
    parser.add_argument("--table", action="store_true", help="print the table of the committed file, measure nothing")
    parser.add_argument("--checkpoints", type=Path, default=CHECKPOINTS)
    parser.add_argument("--json", type=Path, default=QUALITY_JSON, help="file that is read or written")
    parser.add_argument("--num", type=int, default=300, help="questions to measure on")
    options = parser.parse_args(arguments)
    if not options.table:
        keep_memory()
        options.json.write_text(json.dumps(measure(options.checkpoints, options.num), indent=1) + "\n")
    print(quality_table(json.loads(options.json.read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
