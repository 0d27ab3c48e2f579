"""Measures models of the zoo on held-out scenes by the engine: `python -m zoo.quality PART`.

Right texts and attributes, acceptance length of pairs, and for captions also certainty on words. Writes the numbers to
zoo/quality.json and prints them as tables; with `--table` it prints those of the committed file for zoo/README.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import LlavaForConditionalGeneration

from decoding import Completion, Engine, Method, Request, Sampling
from decoding.acceptance import Exact
from decoding.contexts import Full
from decoding.drafters import ModelDrafter, NoDrafter
from decoding.trees import Chain
from docgen.markdown import table
from models.contract import TargetModel
from models.loading.checkpoints import CheckpointRef, load_weights, read_config
from models.target import Target
from zoo import text, video
from zoo.pair import CHECKPOINTS
from zoo.samples import CLIP_FRAMES, FILLER_WORDS
from zoo.world import dense, dialogue, grammar, listing, motion, sample_scenes
from zoo.world.render import render_scene
from zoo.world.scene import (
    COLOURS,
    SHAPES,
    SIZES,
    TEXTURES,
    TONES,
    Scene,
    Thing,
    change_scene,
    draw_clip,
    draw_scene,
    scene_rng,
)

REPORT = Path(__file__).with_name("quality.json")
ATTRIBUTE_WORDS = {*SIZES, *COLOURS, *SHAPES, *TONES, *TEXTURES, *(w for p in grammar.PLACES for w in p.split())}
NUM_DRAFTED, SLOTS, CONTEXT_TOKENS = 5, 25, 1024
NUM_OTHER = 100
DENSE_PX, MAX_DENSE_TOKENS = 256, 240
"""Size of the images and length of the captions of the vision pair of `zoo.real_vision`."""
Score = Callable[[int, str], tuple[bool, tuple[int, int]]]
"""Maps a request's index and a text to (whether it is right, (right attributes, all attributes))."""


def load_target(folder: Path, name: str) -> Target:
    """Load one model in float32."""
    return Target.load(CheckpointRef(str(folder / name)), "float32")


def load_captioner(folder: Path, role: str) -> LlavaForConditionalGeneration:
    """Load transformers' model of one caption model in float32."""
    ref = CheckpointRef(str(folder / f"caption_{role}"))
    model = load_weights(ref, read_config(ref), "float32", torch.device("cpu"))
    assert isinstance(model, LlavaForConditionalGeneration), type(model)
    return model


def decode(model: TargetModel, requests: Sequence[Request], drafter: TargetModel | None = None) -> list[Completion]:
    """Return completions in the order of their requests, decoded plainly or with a drafter's chains. Raises
    RuntimeError if a request failed."""
    method = Method(NoDrafter(), Chain(1), Exact())
    if drafter is not None:
        method = Method(ModelDrafter(drafter, [Full()], model.vocab_size), Chain(NUM_DRAFTED), Exact())
    done = {
        completion.sample_id: completion for completion in Engine(model, method, SLOTS, CONTEXT_TOKENS).run(requests)
    }
    failed = [completion.error for completion in done.values() if completion.error]
    if failed:
        raise RuntimeError(f"{len(failed)} requests failed, the first with: {failed[0]}")
    return [done[request.sample_id] for request in requests]


@dataclass(frozen=True)
class Question:
    """A conversation up to the requested answer: messages, images, and the true answer."""

    messages: list[dict[str, object]]
    images: list[Image.Image]
    answer: str


def ask(prompt: str, images: list[Image.Image], answer: str) -> Question:
    """Return a question of one turn."""
    content: list[dict[str, str]] = [{"type": "image"} for _ in images] + [{"type": "text", "text": prompt}]
    return Question([{"role": "user", "content": content}], images, answer)


def requests_of(questions: list[Question], model: Target, max_new_tokens: int = 160) -> list[Request]:
    """Return one greedy request for each question."""
    sampling = Sampling(max_new_tokens=max_new_tokens)
    prompts = [model.front_end.render(question.messages) for question in questions]
    images = [tuple(np.asarray(image.convert("RGB")) for image in question.images) for question in questions]
    return [
        Request(f"question-{index}", *inputs, sampling)
        for index, inputs in enumerate(zip(prompts, images, strict=True))
    ]


def answer_all(model: Target, questions: list[Question]) -> list[str]:
    """Answer questions greedily."""
    return [completion.text for completion in decode(model, requests_of(questions, model))]


def count_attributes(scene: Scene, phrasing: str, caption: str) -> tuple[int, int]:
    """Return the number of right attributes, and of stated ones: tone, texture and four attributes per object (cell,
    size, colour, shape). In a text in another phrasing all attributes of the truth are wrong."""
    parsed = grammar.parse_caption(caption)
    if parsed is None or parsed[0] != phrasing:
        return 0, 2 + 4 * len(scene.things)
    things, tone, texture = parsed[1]
    right = (tone == scene.tone) + (texture == scene.texture) + count_matching(things, scene.things)
    return right, 2 + 4 * len(things)


def count_matching(things: Iterable[Thing], others: Iterable[Thing]) -> int:
    """Return how many attributes (cell, size, colour, shape) of `things` match the other object in the same cell."""
    by_cell = {other.cell: other for other in others}
    pairs = [(thing, by_cell[thing.cell]) for thing in things if thing.cell in by_cell]
    return sum(1 + (a.size == b.size) + (a.colour == b.colour) + (a.shape == b.shape) for a, b in pairs)


def mask_fillers(answer: str) -> str:
    """Return a text with every filler word replaced by `*`, so that two answers compare by their attributes."""
    return " ".join("*" if raw.strip(".,:;") in FILLER_WORDS else raw for raw in answer.split())


def other_questions(num: int, seed: int) -> dict[str, list[Question]]:
    """Return held-out questions besides single captions, by kind; the second turn carries the true first answer."""
    asked: dict[str, list[Question]] = {"change": [], "clip": [], "second": [], "text": []}
    for index in range(num):
        rng = scene_rng("held_out", seed + 1, index)
        scene = draw_scene(rng, "held_out")
        after, kind, changed = change_scene(rng, scene, "held_out")
        answer = dialogue.write_change(scene, after, kind, changed, rng)
        asked["change"].append(ask(dialogue.CHANGE_PROMPT, [render_scene(scene), render_scene(after)], answer))
        frames = draw_clip(rng, "held_out", CLIP_FRAMES)
        answer = dialogue.write_clip(frames, rng)
        asked["clip"].append(ask(dialogue.CLIP_PROMPT, [render_scene(frame) for frame in frames], answer))
        (prompt, first), (second, answer) = dialogue.draw_second_turn(scene, rng)
        turns: list[dict[str, object]] = [{"role": "assistant", "content": first}, {"role": "user", "content": second}]
        question = ask(prompt, [render_scene(scene)], answer)
        asked["second"].append(Question([*question.messages, *turns], question.images, answer))
        prompt, answer = dialogue.draw_text_only(rng)
        asked["text"].append(ask(prompt, [], answer))
    return asked


def dense_requests(
    model: Target, asked: list[tuple[Scene, str]], max_new_tokens: int = MAX_DENSE_TOKENS
) -> list[Request]:
    """Return one greedy request for each dense scene."""
    questions = [ask(dense.PROMPTS[phrasing], [render_scene(scene, DENSE_PX)], "") for scene, phrasing in asked]
    return requests_of(questions, model, max_new_tokens)


def ask_caption(model: Target, num: int, seed: int) -> tuple[list[Request], Score]:
    """Return requests for captions of single images, rendered at 336 px, and their score."""
    drawn = sample_scenes("held_out", num, seed)
    phrasing_of = {prompt: phrasing for phrasing, prompt in grammar.PROMPTS.items()}

    def score(index: int, caption: str) -> tuple[bool, tuple[int, int]]:
        scene, phrasing = drawn[index][0], phrasing_of[drawn[index][3]]
        return grammar.parse_caption(caption) == (phrasing, scene.truth), count_attributes(scene, phrasing, caption)

    return requests_of([ask(prompt, [image], caption) for _, image, caption, prompt in drawn], model), score


def ask_text(model: Target, num: int, seed: int) -> tuple[list[Request], Score]:
    """Return requests for descriptions of listed scenes, and their score."""
    asked = text.held_out_questions(num, seed)
    sampling = Sampling(max_new_tokens=200)
    prompts = [text.render(listing.write_prompt(*question)) for question in asked]
    requests = [Request(f"text-{index}", prompt, (), sampling) for index, prompt in enumerate(prompts)]
    return requests, lambda i, answer: (listing.states(*asked[i], answer), text.attributes_right(*asked[i], answer))


def ask_video(model: Target, num: int, seed: int) -> tuple[list[Request], Score]:
    """Return requests for captions of clips, and their score."""
    clips = video.held_out_clips(num, seed)
    asked = [(moved, phrasing) for moved, phrasing, _ in clips]
    sampling, requests = Sampling(max_new_tokens=120), []
    for index, (_, phrasing, clip) in enumerate(clips):
        content = [{"type": "video"}, {"type": "text", "text": motion.PROMPTS[phrasing]}]
        prompt = model.front_end.render([{"role": "user", "content": content}])
        requests.append(Request(f"clip-{index}", prompt, (), sampling, videos=(clip,)))
    return requests, lambda i, answer: (motion.states(*asked[i], answer), video.attributes_right(*asked[i], answer))


def ask_dense(model: Target, num: int, seed: int) -> tuple[list[Request], Score]:
    """Return requests for captions of dense scenes, and their score."""
    asked = dense.draw_asked("held_out", num, seed)
    true = [dense.write_description(*question, scene_rng("held_out", seed, 0)) for question in asked]
    return dense_requests(model, asked), lambda i, answer: (
        dense.states(*asked[i], answer),
        grammar.count_stated(true[i], answer),
    )


PARTS: dict[str, tuple[str, int, Callable[[Target, int, int], tuple[list[Request], Score]]]] = {
    "caption": ("caption", 500, ask_caption),
    "video": ("caption", 300, ask_video),
    "text": ("answer", 300, ask_text),
    "real_vision": ("caption", 150, ask_dense),
}
"""Part → noun of its texts, number of requests, and the requests."""


def measure(part: str, folder: Path = CHECKPOINTS, num: int | None = None, seed: int = 0) -> dict[str, float]:
    """Measure both models of a pair (of `real_vision` the target) on held-out scenes.

    Raises:
        RuntimeError: a request failed, or speculative texts differ from plain ones.
    """
    noun, default, draw = PARTS[part]
    num = num or default
    is_pair = part != "real_vision"
    prefix = f"{part}_" if is_pair else ""
    pair = {role: load_target(folder, prefix + role) for role in (("target", "drafter") if is_pair else ("target",))}
    requests, score = draw(pair["target"], num, seed)
    plain = {role: decode(model, requests) for role, model in pair.items()}
    results: dict[str, float] = {"num_cases": num}
    for role, done in plain.items():
        right, counts = zip(*(score(index, completion.text) for index, completion in enumerate(done)))
        results[f"{role}_{noun}s_right"] = sum(right) / num
        results[f"{role}_attributes_right"] = sum(hits for hits, _ in counts) / sum(total for _, total in counts)
    results[f"mean_{noun}_tokens"] = sum(len(completion.token_ids) for completion in plain["target"]) / num
    if is_pair:
        drafted = decode(pair["target"], requests, pair["drafter"])
        if [completion.text for completion in drafted] != [completion.text for completion in plain["target"]]:
            raise RuntimeError(f"speculative {noun}s differ from plain ones")
        steps = sum(completion.telemetry.num_spec_steps for completion in drafted)
        results["mean_acceptance_length"] = (
            1 + sum(completion.telemetry.num_accepted_draft_tokens for completion in drafted) / steps
        )
    if part == "caption":
        results |= certainty(load_captioner(folder, "target"), pair["target"].front_end, requests, plain["target"])
        results |= measure_others(pair, min(num, NUM_OTHER), seed)
    return {name: round(value, 4) for name, value in results.items()}


@torch.no_grad()
def certainty(
    model: LlavaForConditionalGeneration, front_end: Any, requests: list[Request], captions: list[Completion]
) -> dict[str, float]:
    """Return a model's mean top-1 probability on attribute words and on filler words of its captions."""
    top1: dict[str, list[float]] = {"attribute": [], "filler": []}
    for request, caption in zip(requests, captions, strict=True):
        inputs = front_end.encode(request.prompt, request.images)
        asked = inputs["input_ids"]
        ids = torch.cat([asked, torch.tensor([caption.token_ids])], dim=1)
        logits = model(input_ids=ids, pixel_values=inputs["pixel_values"]).logits[0, asked.shape[1] - 1 : -1]
        for token, probability in zip(caption.token_ids, logits.softmax(-1).amax(-1).tolist(), strict=True):
            word = front_end.tokenizer.decode([token]).strip()
            if word in FILLER_WORDS or word in ATTRIBUTE_WORDS:
                top1["filler" if word in FILLER_WORDS else "attribute"].append(probability)
    return {f"{kind}_top1_mean": sum(values) / len(values) for kind, values in top1.items()}


def measure_others(pair: dict[str, Target], num: int, seed: int) -> dict[str, float]:
    """Return each model's share of right answers to other questions, by kind."""
    results: dict[str, float] = {"num_other": num}
    for kind, questions in other_questions(num, seed).items():
        for role, model in pair.items():
            answers = zip(questions, answer_all(model, questions), strict=True)
            results[f"{role}_{kind}_right"] = sum(mask_fillers(a) == mask_fillers(q.answer) for q, a in answers) / num
    return results


def quality_table(measured: dict[str, float]) -> str:
    """Render measured numbers as Markdown tables: one column per model, then the other numbers."""
    roles = [role for role in ("target", "drafter") if any(key.startswith(f"{role}_") for key in measured)]
    names = [key.removeprefix("target_") for key in measured if key.startswith("target_")]
    rows = [[name.replace("_", " "), *(f"{measured[f'{role}_{name}']:.3f}" for role in roles)] for name in names]
    others = [key for key in measured if not key.startswith(("target_", "drafter_"))]
    shared = [[key.replace("_", " "), f"{measured[key]:.3f}".removesuffix(".000")] for key in others]
    return f"{table(('by model', *roles), rows)}\n\n{table(('', 'value'), shared)}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m zoo.quality", description="Measure models of the zoo.")
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--table", action="store_true", help="print the table of the committed file, measure nothing")
    parser.add_argument("--checkpoints", type=Path, help="folder of the models (default: the shipped ones)")
    options = parser.parse_args(argv)
    report = json.loads(REPORT.read_text())
    if not options.table:
        shipped = Path("out/real_vision") if options.part == "real_vision" else CHECKPOINTS
        report[options.part] = measure(options.part, options.checkpoints or shipped)
        REPORT.write_text(json.dumps(report, indent=1) + "\n")
    print(quality_table(report[options.part]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
