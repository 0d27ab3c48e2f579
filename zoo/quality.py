"""Measures a caption pair: right captions and attributes, certainty on attributes and fillers, agreement.

The acceptance length is computed by a teacher-forced walk over the target's own greedy output.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, LlavaForConditionalGeneration, LlavaProcessor

from zoo.pair import CHECKPOINTS
from zoo.samples import CLIP_FRAMES, FILLER_WORDS
from zoo.scoring import NUM_DRAFTED, ROLES, markdown_table
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

QUALITY_JSON = Path(__file__).parent / "quality.json"
ATTRIBUTE_WORDS = {*SIZES, *COLOURS, *SHAPES, *TONES, *TEXTURES, *(w for p in grammar.PLACES for w in p.split())}


@dataclass(frozen=True)
class Question:
    """A conversation up to the requested answer: messages, images, and the true answer."""

    messages: list[dict[str, object]]
    images: list[Image.Image]
    answer: str


@dataclass(frozen=True)
class Answer:
    """A greedy output: the prompt's ids, the output's ids (eos included) and the text."""

    prompt_ids: list[int]
    ids: list[int]
    text: str


def ask(prompt: str, images: list[Image.Image], answer: str) -> Question:
    """Return a question of one turn."""
    content: list[dict[str, str]] = [{"type": "image"} for _ in images] + [{"type": "text", "text": prompt}]
    return Question([{"role": "user", "content": content}], images, answer)


def load_captioner(folder: Path, role: str) -> LlavaForConditionalGeneration:
    """Load one model in float32, through the Auto class."""
    return AutoModelForImageTextToText.from_pretrained(folder / f"caption_{role}", dtype=torch.float32).eval()


def load_pair(folder: Path = CHECKPOINTS) -> tuple[LlavaProcessor, dict[str, LlavaForConditionalGeneration]]:
    """Load the processor and both models in float32, through the Auto classes."""
    models = {role: load_captioner(folder, role) for role in ROLES}
    return AutoProcessor.from_pretrained(folder / "caption_target"), models


@torch.no_grad()
def answer_all(
    model: LlavaForConditionalGeneration, processor: LlavaProcessor, questions: list[Question], batch_size: int = 50
) -> list[Answer]:
    """Answer questions greedily with transformers' own `generate`; all must have images, or none."""
    answers = []
    for start in range(0, len(questions), batch_size):
        some = questions[start : start + batch_size]
        texts = [processor.apply_chat_template(q.messages, add_generation_prompt=True) for q in some]
        images = [q.images for q in some]
        inputs = processor(text=texts, images=images if any(images) else None, padding=True, return_tensors="pt")
        written = model.generate(**inputs, max_new_tokens=160)[:, inputs["input_ids"].shape[1] :]
        for row, ids in enumerate(written.tolist()):
            eos = processor.tokenizer.eos_token_id
            ids = ids[: ids.index(eos) + 1] if eos in ids else ids
            prompt = inputs["input_ids"][row][inputs["attention_mask"][row].bool()].tolist()
            text = processor.tokenizer.decode(ids, skip_special_tokens=True).strip()
            answers.append(Answer(prompt, ids, text))
    return answers


def count_attributes(scene: Scene, phrasing: str, text: str) -> tuple[int, int]:
    """Return the number of right attributes, and of stated attributes.

    A caption states its tone, its texture and four attributes per object (cell, size, colour, shape), each compared
    with the object in the stated cell. A text in no known phrasing counts as if it stated as many attributes as the
    truth, all wrong.
    """
    parsed = grammar.parse_caption(text)
    if parsed is None or parsed[0] != phrasing:
        return 0, 2 + 4 * len(scene.things)
    things, tone, texture = parsed[1]
    right = (tone == scene.tone) + (texture == scene.texture) + count_matching(things, scene.things)
    return right, 2 + 4 * len(things)


def count_matching(things: Iterable[Thing], others: Iterable[Thing]) -> int:
    """Return how many attributes (cell, size, colour, shape) of `things` match the object of `others` in the same
    cell."""
    by_cell = {other.cell: other for other in others}
    pairs = [(thing, by_cell[thing.cell]) for thing in things if thing.cell in by_cell]
    return sum(1 + (a.size == b.size) + (a.colour == b.colour) + (a.shape == b.shape) for a, b in pairs)


def mask_fillers(text: str) -> str:
    """Return a text with every filler word replaced by `*`, so that two answers compare by their attributes."""
    words = (word.strip(".,:;") for word in text.split())
    return " ".join("*" if word in FILLER_WORDS else raw for word, raw in zip(words, text.split()))


@torch.no_grad()
def top_tokens(
    model: LlavaForConditionalGeneration, processor: LlavaProcessor, question: Question, answer: Answer
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a model's top-1 probability and top-1 token before each token of an answer, both [tokens]."""
    ids = torch.tensor([answer.prompt_ids + answer.ids])
    pixels = processor.image_processor(question.images, return_tensors="pt")["pixel_values"]
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=pixels).logits[0]
    first = len(answer.prompt_ids) - 1
    best = logits[first : first + len(answer.ids)].softmax(-1).max(-1)
    return best.values, best.indices


def walk_acceptance(agrees: list[bool], num_drafted: int = NUM_DRAFTED) -> list[int]:
    """Return the number of tokens that each step of greedy speculative decoding commits, the bonus token included.

    agrees[i] is whether the drafter's top-1 token after the target's first i tokens is the target's. Up to the first
    mismatch the drafts are the target's own tokens, so this teacher-forced walk commits the tokens of the real loop.
    The first token comes from the prefill.
    """
    committed, position = [], 1
    while position < len(agrees):
        kept = 0
        while kept < num_drafted and position + kept < len(agrees) and agrees[position + kept]:
            kept += 1
        step = min(kept + 1, len(agrees) - position)
        committed.append(step)
        position += step
    return committed


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


def measure_captions(
    processor: LlavaProcessor, models: dict[str, LlavaForConditionalGeneration], num: int, seed: int
) -> dict[str, float]:
    """Measure single-image captions of `num` held-out scenes, rendered at 336 px, for both models and for the pair."""
    samples = sample_scenes("held_out", num, seed)
    phrasing_of = {prompt: phrasing for phrasing, prompt in grammar.PROMPTS.items()}
    questions = [ask(prompt, [image], caption) for _, image, caption, prompt in samples]
    found: dict[str, float] = {}
    written = {role: answer_all(model, processor, questions) for role, model in models.items()}
    for role, answers in written.items():
        texts = [(scene, phrasing_of[prompt], answer.text) for (scene, _, _, prompt), answer in zip(samples, answers)]
        whole = [grammar.parse_caption(text) == (phrasing, scene.truth) for scene, phrasing, text in texts]
        right, stated = map(sum, zip(*(count_attributes(*one) for one in texts)))
        found[f"{role}_captions_right"] = sum(whole) / num
        found[f"{role}_attributes_right"] = right / stated
    top1: dict[str, list[float]] = {"attribute": [], "filler": []}
    steps: list[int] = []
    for question, answer in zip(questions, written["target"]):
        probabilities, _ = top_tokens(models["target"], processor, question, answer)
        for token, probability in zip(answer.ids, probabilities.tolist()):
            word = processor.tokenizer.decode([token]).strip()
            if word in FILLER_WORDS:
                top1["filler"].append(probability)
            elif word in ATTRIBUTE_WORDS:
                top1["attribute"].append(probability)
        _, drafted = top_tokens(models["drafter"], processor, question, answer)
        steps += walk_acceptance([d == t for d, t in zip(drafted.tolist(), answer.ids)])
    for kind, values in top1.items():
        found[f"{kind}_top1_mean"] = sum(values) / len(values)
        for percent in (5, 95):
            found[f"{kind}_top1_p{percent:02}"] = sorted(values)[int(percent / 100 * len(values))]
    found["mean_acceptance_length"] = sum(steps) / len(steps)
    found["mean_caption_tokens"] = sum(len(answer.ids) for answer in written["target"]) / num
    return found


def measure(folder: Path = CHECKPOINTS, num: int = 500, num_other: int = 100, seed: int = 0) -> dict[str, float]:
    """Measure a saved pair on held-out scenes; return the contents of zoo/quality.json."""
    processor, models = load_pair(folder)
    found = {"num_captions": num, "num_other": num_other, **measure_captions(processor, models, num, seed)}
    for kind, questions in other_questions(num_other, seed).items():
        for role, model in models.items():
            answers = answer_all(model, processor, questions)
            right = sum(mask_fillers(a.text) == mask_fillers(q.answer) for q, a in zip(questions, answers))
            found[f"{role}_{kind}_right"] = right / num_other
    return found


# Rows of the table: the measure, its key or keys in zoo/quality.json, and the goal.
ROWS = (
    ("captions right, target", "target_captions_right", "at least 0.95"),
    ("captions right, drafter", "drafter_captions_right", ""),
    ("stated attributes right, target", "target_attributes_right", "at least 0.99"),
    ("stated attributes right, drafter", "drafter_attributes_right", "at least 0.10 below the target"),
    ("mean acceptance length, 5 drafted", "mean_acceptance_length", "2 to 4.5"),
    ("target's top-1 probability on attributes, mean", "attribute_top1_mean", "at least 0.95"),
    ("target's top-1 probability on attributes, 5th percentile", "attribute_top1_p05", ""),
    ("target's top-1 probability on fillers, mean", "filler_top1_mean", "at most 0.6"),
    ("target's top-1 probability on fillers, 95th percentile", "filler_top1_p95", ""),
    ("mean tokens of a caption", "mean_caption_tokens", "30 to 150"),
    ("what changed between two images, target", "target_change_right", ""),
    ("what changed between two images, drafter", "drafter_change_right", ""),
    ("a clip of three frames, target", "target_clip_right", ""),
    ("a clip of three frames, drafter", "drafter_clip_right", ""),
    ("a second turn, target", "target_second_right", ""),
    ("a second turn, drafter", "drafter_second_right", ""),
    ("text-only questions, target", "target_text_right", ""),
    ("text-only questions, drafter", "drafter_text_right", ""),
)


def quality_table(measured: dict[str, float]) -> str:
    """Render the measured numbers as a Markdown table."""
    rows = [(name, f"{measured[key]:.3f}", aim) for name, key, aim in ROWS]
    return markdown_table(("measured on held-out scenes", "value", "aim"), rows)
