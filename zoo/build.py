"""Rebuilds zoo/checkpoints from a seed and prints the pair's quality table: `python -m zoo.build`.

Contains the recipe: the order of steps and their lengths.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast

from models.heads.eagle import save_eagle
from models.heads.files import keep_as_safetensors
from models.heads.medusa import save_medusa
from models.heads.teacher import Lesson
from models.heads.training import Pace, Trainer, fresh_eagle, fresh_medusa
from models.loading.checkpoints import CheckpointRef
from models.target import Target
from zoo.allocation import keep_memory
from zoo.pair import (
    ARCHITECTURES,
    CHECKPOINTS,
    NUM_VISUAL_TOKENS,
    build_model,
    build_processor,
    build_tokenizer,
    save_model,
)
from zoo.quality import measure_pair, quality_table, write_quality
from zoo.samples import Batch, draw_batches
from zoo.sharpen import sharpen_tower
from zoo.tower import pretrain_tower
from zoo.train import train_model
from zoo.world.grammar import DRAFTER_FILLER_ODDS, FILLER_ODDS


@dataclass(frozen=True)
class Recipe:
    """Steps, batch sizes and rates of one model: its vision tower, the whole, the tower again, the whole again.

    The last two stages are left out where they have no steps.
    """

    tower_steps: int
    tower_batch: int
    tower_lr: float
    steps: int
    batch: int
    lr: float
    tuned_tower_lr: float
    sharpen_steps: int = 0
    polish_steps: int = 0
    filler_odds: tuple[float, ...] = FILLER_ODDS


RECIPES = {
    "target": Recipe(2000, 64, 1e-3, 3000, 32, 1e-3, 3e-4, sharpen_steps=1000, polish_steps=400),
    "drafter": Recipe(800, 64, 1e-3, 2000, 32, 2e-3, 5e-4, filler_odds=DRAFTER_FILLER_ODDS),
    # The captioner of the context `caption`: between target and drafter in size and quality.
    "captioner": Recipe(800, 64, 1e-3, 1400, 32, 1.5e-3, 5e-4),
}
# Heads on the finished target: steps of 32 conversations each.
HEADS = {"eagle": 1200, "medusa": 800}
NUM_MEDUSA_HEADS = 4
HEAD_BATCH = 32
HEAD_LR = 1e-3
SHARPEN_LR = 3e-4
# The learning rate of the last stage in parts of the second's.
POLISH_SHARE = 0.2
# The part of every number of steps that `--quick` runs.
QUICK_SHARE = 0.12
QUICK_HEAD_SHARE = 0.03


def build_one(
    role: str, recipe: Recipe, tokenizer: PreTrainedTokenizerFast, seed: int, folder: Path, device: torch.device
) -> None:
    """Train one model of the pair from a seed and save it under `folder`."""
    model = build_model(role, tokenizer, seed).to(device)
    width = ARCHITECTURES[role]["vision"]
    pretrain_tower(model.model.vision_tower, width, recipe.tower_steps, recipe.tower_batch, recipe.tower_lr, seed)
    train_model(
        model,
        tokenizer,
        num_steps=recipe.steps,
        batch_size=recipe.batch,
        lr=recipe.lr,
        tower_lr=recipe.tuned_tower_lr,
        seed=seed,
        odds=recipe.filler_odds,
        autosave=folder / f"{role}.partial.safetensors",
    )
    if recipe.sharpen_steps:
        sharpen_tower(model.model.vision_tower, width, recipe.sharpen_steps, recipe.tower_batch, SHARPEN_LR, seed)
    if recipe.polish_steps:
        train_model(
            model,
            tokenizer,
            num_steps=recipe.polish_steps,
            batch_size=recipe.batch,
            lr=recipe.lr * POLISH_SHARE,
            tower_lr=recipe.tuned_tower_lr * POLISH_SHARE,
            seed=seed + 1,
            odds=recipe.filler_odds,
        )
    save_model(model.cpu(), build_processor(tokenizer), folder / f"caption_{role}")
    (folder / f"{role}.partial.safetensors").unlink(missing_ok=True)


def build_head(kind: str, steps: int, tokenizer: PreTrainedTokenizerFast, seed: int, folder: Path) -> None:
    """Train one head for the target in `folder`, and save it beside it."""
    target = Target.load(CheckpointRef(str(folder / "caption_target")), "float32", "cpu")
    samples = draw_batches("train", seed + 7 + list(HEADS).index(kind), HEAD_BATCH, tokenizer)
    pace = Pace(
        steps,
        HEAD_LR,
        seed,
        warmup_steps=steps // 10,
        schedule="cosine",
        clip="norm",
        clip_limit=1.0,
        noise_tokens=None,
    )
    out = folder / f"caption_{kind}"
    if kind == "eagle":
        eagle = fresh_eagle(target, seed)
        teach_head(Trainer(target, eagle, pace), samples)
        save_eagle(eagle.network, out, torch.bfloat16)
    else:
        medusa = fresh_medusa(target, seed, NUM_MEDUSA_HEADS)
        teach_head(Trainer(target, medusa, pace), samples)
        save_medusa(medusa.heads, out, torch.bfloat16)
    keep_as_safetensors(out)


def teach_head(trainer: Trainer, samples: Iterator[Batch]) -> None:
    """Teach a head batches of conversations, as the job `jobs.train_drafter` does with rows of a source."""
    total = 0.0
    for step, batch in enumerate(islice(samples, trainer.pace.num_steps), start=1):
        lessons = lessons_of(batch, trainer.target)
        first = (step - 1) * len(lessons)
        total += trainer.learn(list(enumerate(lessons, start=first))) or 0.0
        if step % 100 == 0 or step == trainer.pace.num_steps:
            print(f"step {step}/{trainer.pace.num_steps} loss {total / (step % 100 or 100):.4f}", file=sys.stderr)
            total = 0.0


def lessons_of(batch: Batch, target: Target) -> list[Lesson]:
    """The conversations of a batch, one by one, without their pads."""
    lessons, used = [], 0
    for row, size in enumerate(batch.mask.sum(dim=1).tolist()):
        ids = batch.ids[row, :size]
        num_images = int((ids == target.model.config.image_token_id).sum()) // NUM_VISUAL_TOKENS
        inputs = {"input_ids": ids[None], "attention_mask": torch.ones(1, size, dtype=torch.long)}
        if num_images:
            assert batch.pixels is not None
            inputs["pixel_values"] = batch.pixels[used : used + num_images]
        used += num_images
        lessons.append(Lesson(target.prefix(inputs), batch.weights[row, :size] > 0))
    return lessons


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m zoo.build", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=CHECKPOINTS, help="folder to write (default: zoo/checkpoints)")
    parser.add_argument("--quick", action="store_true", help="a short run that checks the recipe; needs --out")
    parser.add_argument("--only", choices=[*RECIPES, *HEADS], help="train one, keep the others as they are in --out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(arguments)
    if options.quick and options.out == CHECKPOINTS:
        parser.error("--quick makes a poor pair: name another folder with --out")
    keep_memory()
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer(0)
    started = time.monotonic()
    for role, recipe in RECIPES.items():
        # A quick run leaves the captioner out: its stages are the drafter's.
        if options.only not in (None, role) or (options.quick and role == "captioner" and options.only is None):
            continue
        if options.quick:
            counts = ("tower_steps", "steps", "sharpen_steps", "polish_steps")
            recipe = replace(recipe, **{name: round(QUICK_SHARE * getattr(recipe, name)) for name in counts})
        print(f"{role}: {recipe}", file=sys.stderr)
        build_one(role, recipe, tokenizer, options.seed, options.out, torch.device(options.device))
    for kind, steps in HEADS.items():
        if options.only in (None, kind):
            if options.quick:
                steps = max(1, round(QUICK_HEAD_SHARE * steps))
            print(f"{kind}: {steps} steps", file=sys.stderr)
            build_head(kind, steps, tokenizer, options.seed, options.out)
    print(f"trained in {time.monotonic() - started:.0f} s", file=sys.stderr)
    measured = measure_pair(options.out, num=100 if options.quick else 500, num_other=20 if options.quick else 100)
    write_quality(measured, options.out / "quality.json")
    print(quality_table(measured))
    return 0


if __name__ == "__main__":
    sys.exit(main())
