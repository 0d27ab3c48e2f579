"""Measures pairs by the engine: right texts and attributes, acceptance length; for captions also certainty on words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from transformers import LlavaForConditionalGeneration

from decoding import Completion, Engine, Method, Request, Sampling
from decoding.acceptance import Exact
from decoding.contexts import Full
from decoding.drafters import ModelDrafter, NoDrafter
from decoding.trees import Chain
from models.contract import TargetModel
from models.loading.checkpoints import CheckpointRef, load_weights, read_config
from models.target import Target
from zoo.pair import CHECKPOINTS
from zoo.samples import CLIP_FRAMES, FILLER_WORDS
from zoo.world import dialogue, grammar, sample_scenes
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

ATTRIBUTE_WORDS = {*SIZES, *COLOURS, *SHAPES, *TONES, *TEXTURES, *(w for p in grammar.PLACES for w in p.split())}
NUM_DRAFTED = 5
SLOTS = 25
CONTEXT_TOKENS = 1024


def load_target(folder: Path, name: str) -> Target:
    """Load one model in float32."""
    return Target.load(CheckpointRef(str(folder / name)), "float32")


def load_targets(folder: Path, part: str) -> dict[str, Target]:
    """Load both models of a pair in float32, by role."""
    return {role: load_target(folder, f"{part}_{role}") for role in ("target", "drafter")}


def decode(model: TargetModel, requests: Sequence[Request], drafter: TargetModel | None = None) -> list[Completion]:
    """Return completions in the order of their requests, decoded plainly or with a drafter's chains. Raises
    RuntimeError if a request failed."""
    method = Method(NoDrafter(), Chain(1), Exact())
    if drafter is not None:
        method = Method(ModelDrafter(drafter, [Full()], model.vocab_size), Chain(NUM_DRAFTED), Exact())
    done = {one.sample_id: one for one in Engine(model, method, SLOTS, CONTEXT_TOKENS).run(requests)}
    failed = [one.error for one in done.values() if one.error]
    if failed:
        raise RuntimeError(f"{len(failed)} requests failed, the first with: {failed[0]}")
    return [done[request.sample_id] for request in requests]


def count_stated(truth: str, text: str) -> tuple[int, int]:
    """Return how many attribute words equal the true text's at the same position, and the larger of both counts."""
    true, found = grammar.stated(truth), grammar.stated(text)
    return sum(one == other for one, other in zip(true, found)), max(len(true), len(found))


def measure_texts(
    pair: dict[str, Target],
    requests: Sequence[Request],
    score: Callable[[int, str], tuple[bool, tuple[int, int]]],
    noun: str,
) -> tuple[dict[str, float], list[Completion]]:
    """Measure both models and the acceptance length of the pair; return the numbers and the target's completions.

    `score` maps a request's index and a text to (whether it is right, (right attributes, all attributes)).

    Raises:
        RuntimeError: a request failed, or speculative texts differ from plain ones.
    """
    plain = {role: decode(model, requests) for role, model in pair.items()}
    found: dict[str, float] = {}
    for role, done in plain.items():
        right, counts = zip(*(score(index, one.text) for index, one in enumerate(done)))
        found[f"{role}_{noun}s_right"] = sum(right) / len(done)
        found[f"{role}_attributes_right"] = sum(one for one, _ in counts) / sum(whole for _, whole in counts)
    found[f"mean_{noun}_tokens"] = sum(len(one.token_ids) for one in plain["target"]) / len(requests)
    drafted = decode(pair["target"], requests, pair["drafter"])
    if [one.text for one in drafted] != [one.text for one in plain["target"]]:
        raise RuntimeError(f"speculative {noun}s differ from plain ones")
    steps = sum(one.telemetry.num_spec_steps for one in drafted)
    found["mean_acceptance_length"] = 1 + sum(one.telemetry.num_accepted_draft_tokens for one in drafted) / steps
    return found, plain["target"]


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


def load_captioner(folder: Path, role: str) -> LlavaForConditionalGeneration:
    """Load one model in float32."""
    ref = CheckpointRef(str(folder / f"caption_{role}"))
    model = load_weights(ref, read_config(ref), "float32", torch.device("cpu"))
    assert isinstance(model, LlavaForConditionalGeneration), type(model)
    return model


def requests_of(questions: list[Question], model: Target) -> list[Request]:
    """Return one greedy request for each question."""
    return [
        Request(
            f"question-{index}",
            model.front_end.render(question.messages),
            tuple(np.asarray(image.convert("RGB")) for image in question.images),
            Sampling(max_new_tokens=160),
        )
        for index, question in enumerate(questions)
    ]


def answer_all(model: Target, questions: list[Question]) -> list[str]:
    """Answer questions greedily."""
    return [one.text for one in decode(model, requests_of(questions, model))]


def count_attributes(scene: Scene, phrasing: str, text: str) -> tuple[int, int]:
    """Return the number of right attributes, and of stated ones: tone, texture and four attributes per object (cell,
    size, colour, shape). In a text in another phrasing all attributes of the truth are wrong."""
    parsed = grammar.parse_caption(text)
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


def mask_fillers(text: str) -> str:
    """Return a text with every filler word replaced by `*`, so that two answers compare by their attributes."""
    words = (word.strip(".,:;") for word in text.split())
    return " ".join("*" if word in FILLER_WORDS else raw for word, raw in zip(words, text.split()))


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
        one = ask(prompt, [render_scene(scene)], answer)
        asked["second"].append(Question([*one.messages, *turns], one.images, answer))
        prompt, answer = dialogue.draw_text_only(rng)
        asked["text"].append(ask(prompt, [], answer))
    return asked


def measure_captions(pair: dict[str, Target], num: int, seed: int, folder: Path = CHECKPOINTS) -> dict[str, float]:
    """Measure single-image captions of `num` held-out scenes, rendered at 336 px, for both models and for the pair."""
    samples = sample_scenes("held_out", num, seed)
    phrasing_of = {prompt: phrasing for phrasing, prompt in grammar.PROMPTS.items()}

    def score(index: int, text: str) -> tuple[bool, tuple[int, int]]:
        scene, phrasing = samples[index][0], phrasing_of[samples[index][3]]
        return grammar.parse_caption(text) == (phrasing, scene.truth), count_attributes(scene, phrasing, text)

    requests = requests_of([ask(prompt, [image], caption) for _, image, caption, prompt in samples], pair["target"])
    found, captions = measure_texts(pair, requests, score, "caption")
    # Loaded again, because the engine has changed the pair's modules.
    model, front_end = load_captioner(folder, "target"), pair["target"].front_end
    top1: dict[str, list[float]] = {"attribute": [], "filler": []}
    for request, caption in zip(requests, captions):
        probabilities = top_probabilities(model, front_end.encode(request.prompt, request.images), caption)
        for token, probability in zip(caption.token_ids, probabilities):
            word = front_end.tokenizer.decode([token]).strip()
            if word in FILLER_WORDS:
                top1["filler"].append(probability)
            elif word in ATTRIBUTE_WORDS:
                top1["attribute"].append(probability)
    for kind, values in top1.items():
        found[f"{kind}_top1_mean"] = sum(values) / len(values)
        for percent in (5, 95):
            found[f"{kind}_top1_p{percent:02}"] = sorted(values)[int(percent / 100 * len(values))]
    return found


@torch.no_grad()
def top_probabilities(
    model: LlavaForConditionalGeneration, inputs: dict[str, torch.Tensor], caption: Completion
) -> list[float]:
    """Return a model's largest probability before each token of a caption."""
    ids = torch.cat([inputs["input_ids"], torch.tensor([caption.token_ids])], dim=1)
    logits = model(input_ids=ids, pixel_values=inputs["pixel_values"]).logits[0, inputs["input_ids"].shape[1] - 1 : -1]
    probabilities: list[float] = logits.softmax(-1).amax(-1).tolist()
    return probabilities


def measure(folder: Path = CHECKPOINTS, num: int = 500, num_other: int = 100, seed: int = 0) -> dict[str, float]:
    """Measure a saved pair on held-out scenes; return the contents of zoo/quality.json."""
    pair = load_targets(folder, "caption")
    found = {"num_captions": num, "num_other": num_other, **measure_captions(pair, num, seed, folder)}
    for kind, questions in other_questions(num_other, seed).items():
        for role, model in pair.items():
            answers = answer_all(model, questions)
            right = sum(mask_fillers(text) == mask_fillers(one.answer) for one, text in zip(questions, answers))
            found[f"{role}_{kind}_right"] = right / num_other
    return found
