"""Heads taught on a target: rows become teacher-forced batches, a head is trained, and measured on rows held out.

Owns what one process does with decoded rows. Knows no sources and no Ray; the losses are in `models.head_training`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from configs.training import MedusaHead, TrainDrafterJob
from decoding import Engine, Method, Request, Sampling
from decoding.acceptance import Exact
from decoding.contracts import Drafter, TreePolicy
from decoding.drafters import EagleDrafter, MedusaDrafter
from decoding.trees import DynamicTree, StaticTree, branching_paths
from models.eagle import EagleNetwork
from models.head_training import Report, eagle_logits, medusa_logits, teacher_states, train_eagle, train_medusa
from models.medusa import MedusaHeads
from models.target import Target

Head = EagleNetwork | MedusaHeads


@dataclass(frozen=True)
class Lesson:
    """One row: the rendered `prompt`, its images, and the `answer` that follows; `ids` (L,) of both together."""

    sample_id: str
    prompt: str
    images: tuple[NDArray[np.uint8], ...]
    ids: Tensor
    num_prompt_tokens: int
    pixels: Tensor | None


@dataclass(frozen=True)
class LessonBatch:
    """See `models.head_training.Batch`."""

    ids: Tensor
    weights: Tensor
    mask: Tensor
    pixels: Tensor | None

    def to(self, device: torch.device) -> LessonBatch:
        pixels = None if self.pixels is None else self.pixels.to(device)
        return LessonBatch(self.ids.to(device), self.weights.to(device), self.mask.to(device), pixels)


def make_lesson(
    target: Target, sample_id: str, prompt: str, images: tuple[NDArray[np.uint8], ...], answer: str
) -> Lesson:
    """Encode one row, the answer closed by EOS.

    Raises:
        PromptError: the processor refuses the row.
        ValueError: the family's processor returns more than pixels, which batches of this kind cannot hold.
    """
    inputs = target.front_end.encode(prompt, images)
    unknown = set(inputs) - {"input_ids", "attention_mask", "pixel_values"}
    if unknown:
        raise ValueError(
            f"heads can be taught on LLaVA-1.5 and text targets only: this one also needs {sorted(unknown)}"
        )
    told = target.front_end.tokenizer(answer, add_special_tokens=False)["input_ids"]
    ids = torch.cat([inputs["input_ids"][0], torch.tensor([*told, min(target.eos_ids)])])
    return Lesson(sample_id, prompt, images, ids, int(inputs["input_ids"].shape[1]), inputs.get("pixel_values"))


def collate(lessons: Sequence[Lesson]) -> LessonBatch:
    """Right-pad lessons into one batch; only answers are to be learned."""
    length = max(lesson.ids.shape[0] for lesson in lessons)
    ids = torch.zeros(len(lessons), length, dtype=torch.long)
    weights, mask = torch.zeros(len(lessons), length), torch.zeros(len(lessons), length, dtype=torch.long)
    for row, lesson in enumerate(lessons):
        size = lesson.ids.shape[0]
        ids[row, :size], mask[row, :size] = lesson.ids, 1
        weights[row, lesson.num_prompt_tokens : size] = 1.0
    pixels = [lesson.pixels for lesson in lessons if lesson.pixels is not None]
    return LessonBatch(ids, weights, mask, torch.cat(pixels) if pixels else None)


def batches(lessons: Sequence[Lesson], batch_rows: int, seed: int) -> Iterator[LessonBatch]:
    """Shuffled batches for ever, each of lessons of similar length."""
    rng = random.Random(seed)
    order = sorted(range(len(lessons)), key=lambda place: lessons[place].ids.shape[0])
    chunks = [order[start : start + batch_rows] for start in range(0, len(order), batch_rows)]
    while True:
        rng.shuffle(chunks)
        for chunk in chunks:
            yield collate([lessons[place] for place in chunk])


def teach(job: TrainDrafterJob, target: Target, lessons: Sequence[Lesson], report: Report) -> Head:
    """Train the configured head."""
    teaching = job.training
    samples = batches(lessons, teaching.batch_rows, teaching.seed)
    lr = teaching.learning_rate
    if isinstance(job.head, MedusaHead):
        return train_medusa(target.model, samples, teaching.num_steps, teaching.seed, job.head.num_heads, lr, report)
    return train_eagle(target.model, samples, teaching.num_steps, teaching.seed, lr, report)


@torch.inference_mode()
def accuracy(head: Head, target: Target, lessons: Sequence[Lesson], batch_rows: int) -> dict[str, float]:
    """Share of answer tokens that the head has first, and among its first three, one token ahead of the target."""
    right = {1: 0, 3: 0}
    total = 0
    for start in range(0, len(lessons), batch_rows):
        batch = collate(lessons[start : start + batch_rows]).to(target.device)
        embeds, hidden = teacher_states(target.model, batch)
        logits = (
            medusa_logits(head, hidden)
            if isinstance(head, MedusaHeads)
            else eagle_logits(head, target.head, embeds, hidden)
        )
        wanted = batch.weights[:, 2:] > 0
        best = logits[wanted].topk(3, dim=-1).indices
        true = batch.ids[:, 2:][wanted][:, None]
        for top in right:
            right[top] += int((best[:, :top] == true).any(dim=-1).sum())
        total += int(wanted.sum())
    return {f"top{top}_accuracy": count / max(1, total) for top, count in right.items()}


def acceptance(head: Head, target: Target, lessons: Sequence[Lesson], max_new_tokens: int) -> dict[str, float]:
    """Greedy acceptance length (bonus included) on the lessons' prompts, with a small tree."""
    drafter: Drafter
    tree: TreePolicy
    if isinstance(head, MedusaHeads):
        widths = [3, 2, 1, 1][: head.shape.num_heads]
        drafter, tree = MedusaDrafter(head), StaticTree(branching_paths(widths))
    else:
        drafter, tree = EagleDrafter(head, target.head), DynamicTree(4, 4, 25)
    longest = max(lesson.ids.shape[0] for lesson in lessons) + max_new_tokens
    engine = Engine(target, Method(drafter, tree, Exact()), min(16, len(lessons)), longest)
    sampling = Sampling(max_new_tokens=max_new_tokens)
    wanted = [Request(lesson.sample_id, lesson.prompt, lesson.images, sampling) for lesson in lessons]
    told: list[Any] = [completion.telemetry for completion in engine.run(wanted)]
    steps = sum(one.num_spec_steps for one in told)
    return {"mean_acceptance_length": 1 + sum(one.num_accepted_draft_tokens for one in told) / max(1, steps)}
