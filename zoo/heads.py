"""Trains EAGLE and Medusa heads for the finished caption target."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch

from models.heads.eagle import save_eagle
from models.heads.files import keep_as_safetensors
from models.heads.medusa import save_medusa
from models.heads.teacher import TrainingSample
from models.heads.training import Pace, Trainer, fresh_eagle, fresh_medusa
from models.loading.checkpoints import CheckpointRef
from models.target import Target
from zoo.pair import NUM_VISUAL_TOKENS, build_tokenizer
from zoo.samples import Batch, draw_batches
from zoo.training import Recipe, report

NUM_MEDUSA_HEADS = 4


def build_head(kind: str, recipe: Recipe, seed: int, folder: Path) -> None:
    """Train one head for the target in `folder`, and save it in the same folder."""
    target = Target.load(CheckpointRef(str(folder / "caption_target")), "float32", "cpu")
    samples = draw_batches("train", seed + (7 if kind == "eagle" else 8), recipe.batch, build_tokenizer())
    settings = {"schedule": "cosine", "clip": "norm", "clip_limit": 1.0, "noise_tokens": None}
    pace = Pace(recipe.steps, recipe.lr, seed, warmup_steps=recipe.steps // 10, **settings)
    out = folder / f"caption_{kind}"
    head = fresh_eagle(target, seed) if kind == "eagle" else fresh_medusa(target, seed, NUM_MEDUSA_HEADS)
    teach_head(Trainer(target, head, pace), samples)
    if kind == "eagle":
        save_eagle(head.network, out, torch.bfloat16)
    else:
        save_medusa(head.heads, out, torch.bfloat16)
    keep_as_safetensors(out)


def teach_head(trainer: Trainer, samples: Iterator[Batch]) -> None:
    """Train a head on batches of conversations, as the job `jobs.train_drafter` does on rows of a source."""
    total, steps = 0.0, trainer.pace.num_steps
    for step, batch in enumerate(islice(samples, steps), start=1):
        training_samples = training_samples_of(batch, trainer.target)
        total += trainer.learn(list(enumerate(training_samples, start=(step - 1) * len(training_samples)))) or 0.0
        if step % 100 == 0 or step == steps:
            report(f"step {step}/{steps} loss {total / (step % 100 or 100):.4f}")
            total = 0.0


def training_samples_of(batch: Batch, target: Target) -> list[TrainingSample]:
    """Return the conversations of a batch one by one, without padding."""
    training_samples, used = [], 0
    for row, size in enumerate(batch.mask.sum(dim=1).tolist()):
        ids = batch.ids[row, :size]
        num_images = int((ids == target.model.config.image_token_id).sum()) // NUM_VISUAL_TOKENS
        inputs = {"input_ids": ids[None], "attention_mask": torch.ones(1, size, dtype=torch.long)}
        if num_images:
            inputs["pixel_values"] = batch.inputs["pixel_values"][used : used + num_images]
        used += num_images
        training_samples.append(TrainingSample(target.prefix(inputs), batch.weights[row, :size] > 0))
    return training_samples
