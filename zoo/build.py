"""Trains the models of zoo/checkpoints from a seed: `python -m zoo.build PART`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import LlavaForConditionalGeneration, Qwen2_5_VLForConditionalGeneration

from models.llamagen.checkpoints import save_gpt
from models.llamagen.vq_files import load_vq, save_vq
from models.loading.checkpoints import CheckpointRef
from zoo import pair
from zoo.heads import HEADS, build_head
from zoo.image.gpt import SHAPES_OF, build_gpt, draw_scenes, encode_scenes, train_gpt
from zoo.image.text import load_t5, train_t5
from zoo.image.vq import polish_decoder, train_vq
from zoo.pair import CHECKPOINTS
from zoo.quality import load_captioner
from zoo.samples import Batch, draw_batches
from zoo.text import pair as text_pair
from zoo.text import samples as text_samples
from zoo.tower import pretrain_tower, sharpen_tower
from zoo.training import Recipe, fit, label_loss, lr_share, next_token_loss, report
from zoo.video import pair as video_pair
from zoo.video import samples as video_samples
from zoo.world.grammar import DRAFTER_FILLER_ODDS

RECIPES = {
    "caption_target": Recipe(3000, 32, 1e-3, 2000, tuned_tower_lr=3e-4, sharpen_steps=1000, polish_steps=400),
    "caption_drafter": Recipe(2000, 32, 2e-3, 800, tuned_tower_lr=5e-4, filler_odds=DRAFTER_FILLER_ODDS),
    # The model of the context `caption`: between target and drafter in size and quality.
    "caption_captioner": Recipe(1400, 32, 1.5e-3, 800, tuned_tower_lr=5e-4),
    "caption_eagle": Recipe(1200, 32, 1e-3),
    "caption_medusa": Recipe(800, 32, 1e-3),
    "caption_eagle3": Recipe(1200, 16, 1e-3),
    "caption_block": Recipe(1200, 16, 1e-3),
    "video_target": Recipe(1400, 24, 1.5e-3, tower_steps=700, rounds=2),
    "video_drafter": Recipe(700, 24, 2e-3, tower_steps=300, filler_odds=DRAFTER_FILLER_ODDS),
    "video_eagle": Recipe(600, 16, 1e-3),
    "video_eagle3": Recipe(600, 16, 1e-3),
    "video_block": Recipe(600, 16, 1e-3),
    "text_target": Recipe(1500, 24, 1e-3),
    "text_drafter": Recipe(1000, 24, 3e-3, filler_odds=DRAFTER_FILLER_ODDS),
    "image_vq": Recipe(1400, 16, 2.5e-3, polish_steps=900),
    "image_t5": Recipe(1800, 128, 2e-3),
    "image_target": Recipe(3000, 32, 2e-3, num_images=20000),
    "image_drafter": Recipe(1200, 16, 3e-3, num_images=20000),
    "image_class_target": Recipe(2000, 16, 3e-3, num_images=8000),
}
QUICK_SHARES = {"caption": 0.12, "video": 0.01, "text": 0.01, "image": 0.02}
"""Share of all numbers of steps and images that `--quick` runs."""
POLISH_SHARE = 0.2
"""Learning rates of a caption model's last stage, relative to the stages before."""
DECODER_LR = 1.5e-3
"""Learning rate of the VQ model's decoder in its last stage."""
LABEL_WEIGHT = 0.2
"""Loss weight of the labels in a video model's second stage: enough that the tower keeps its features while the
language model learns to read them."""


def build_caption(role: str, recipe: Recipe, seed: int, folder: Path) -> None:
    """Train one caption model, or one head for the target in `folder`."""
    if role in HEADS:
        build_head("caption", role, recipe, seed, folder)
        return
    model = pair.build_model(role, pair.build_tokenizer(), seed)
    tower, width = model.model.vision_tower, pair.ARCHITECTURES[role]["vision"]
    pretrain_tower(tower, width, recipe.tower_steps, seed)
    train_captions(model, recipe, seed)
    if recipe.sharpen_steps:
        sharpen_tower(tower, width, recipe.sharpen_steps, seed)
    if recipe.polish_steps:
        lr, tower_lr = recipe.lr * POLISH_SHARE, recipe.tuned_tower_lr * POLISH_SHARE
        polish = replace(recipe, steps=recipe.polish_steps, lr=lr, tuned_tower_lr=tower_lr)
        train_captions(model, polish, seed + 1)
    pair.save_model(model, pair.build_processor(pair.build_tokenizer()), folder / f"caption_{role}")


def train_captions(model: LlavaForConditionalGeneration, recipe: Recipe, seed: int) -> None:
    """Train a model in place on the mixture of conversations."""
    torch.manual_seed(seed)
    tower = list(model.model.vision_tower.parameters())
    rest = [p for name, p in model.named_parameters() if not name.startswith("model.vision_tower.")]
    groups = [{"params": tower, "lr": recipe.tuned_tower_lr}, {"params": rest, "lr": recipe.lr}]
    batches = draw_batches("train", seed, recipe.batch, pair.build_tokenizer(), recipe.filler_odds)
    fit_tokens(model, batches, groups, recipe, max_warmup_steps=200)


def build_text(role: str, recipe: Recipe, seed: int, folder: Path) -> None:
    """Train one model of the text pair."""
    tokenizer = text_pair.build_tokenizer()
    model = text_pair.build_model(role, tokenizer, seed)
    batches = text_samples.draw_batches(seed, recipe.batch, tokenizer, recipe.filler_odds)
    fit_tokens(model, batches, [{"params": [*model.parameters()], "lr": recipe.lr}], recipe, max_warmup_steps=100)
    text_pair.save_model(model, tokenizer, folder / f"text_{role}")


def fit_tokens(
    model: nn.Module, batches: Iterator[Batch], groups: list[dict[str, Any]], recipe: Recipe, max_warmup_steps: int
) -> None:
    """Train a language model in place on the tokens of batches."""
    optimizer = torch.optim.AdamW(groups, weight_decay=0.02, betas=(0.9, 0.98))
    warmup_steps = min(max_warmup_steps, recipe.steps // 10 + 1)
    share = partial(lr_share, num_steps=recipe.steps, warmup_steps=warmup_steps)
    model.train()

    def step_loss(step: int) -> tuple[Tensor, dict[str, float]]:
        # bfloat16 GEMMs are twice as fast on CPUs with bfloat16 instructions; the weights stay in float32.
        with torch.autocast("cpu", torch.bfloat16):
            return next_token_loss(model, next(batches)), {}

    fit(step_loss, [LambdaLR(optimizer, share)], model.parameters(), recipe.steps, recipe.batch)


def build_video(role: str, recipe: Recipe, seed: int, folder: Path) -> None:
    """Train one model of the video pair, or one head for the target in `folder`."""
    if role in HEADS:
        build_head("video", role, recipe, seed, folder)
        return
    tokenizer = video_pair.build_tokenizer()
    processor = video_pair.build_processor(tokenizer)
    model = video_pair.build_model(role, tokenizer, seed)
    videos = processor.video_processor
    batches = video_samples.draw_batches("train", seed, recipe.batch, tokenizer, videos, recipe.filler_odds)
    for number in range(recipe.rounds):
        train_videos(model, batches, recipe, 0 if number else recipe.tower_steps, seed)
    video_pair.save_model(model, processor, folder / f"video_{role}")


def train_videos(
    model: Qwen2_5_VLForConditionalGeneration, batches: Iterator[Batch], recipe: Recipe, tower_steps: int, seed: int
) -> None:
    """Train the tower in place on labels, then the whole model on captions and weighted labels."""
    torch.manual_seed(seed)
    tower, width = model.model.visual, model.config.text_config.hidden_size
    head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, sum(video_samples.HEADS.values())))
    model.train()

    def step_loss(step: int, with_captions: bool) -> tuple[Tensor, dict[str, float]]:
        batch = next(batches)
        assert batch.labels is not None
        with torch.autocast("cpu", torch.bfloat16):
            grids = batch.inputs["video_grid_thw"]
            features = tower(batch.inputs["pixel_values_videos"], grid_thw=grids).pooler_output
            loss, right = label_loss(head(features.float()), batch.labels, video_samples.HEADS)
            return next_token_loss(model, batch) + LABEL_WEIGHT * loss if with_captions else loss, right

    for name, part, num_steps in (("tower", tower, tower_steps), ("whole", model, recipe.steps)):
        learned = [*part.parameters(), *head.parameters()]
        optimizer = torch.optim.AdamW(learned, lr=recipe.lr, weight_decay=0.02, betas=(0.9, 0.98))
        share = partial(lr_share, num_steps=num_steps, warmup_steps=min(100, num_steps // 10 + 1))
        losses = partial(step_loss, with_captions=name == "whole")
        fit(losses, [LambdaLR(optimizer, share)], learned, num_steps, recipe.batch, name)


def build_image(role: str, recipe: Recipe, seed: int, folder: Path) -> None:
    """Train one image model; a GPT needs the VQ model, and for prompts the T5, in `folder`."""
    if role == "vq":
        # The perceptual loss uses the captioner's tower, not the tower that measures quality.
        tower = load_captioner(CHECKPOINTS, "captioner").model.vision_tower
        vq = train_vq(tower, recipe, seed)
        polish_decoder(vq, tower, replace(recipe, steps=recipe.polish_steps, lr=DECODER_LR), seed + 1)
        save_vq(vq, folder / "image_vq", torch.bfloat16)
    elif role == "t5":
        pair.save_model(*train_t5(recipe, seed), folder / "image_t5")
    else:
        kind = SHAPES_OF[role].condition
        vq = load_vq(CheckpointRef(str(folder / "image_vq")), "float32", torch.device("cpu"))
        encoder = load_t5(folder) if kind == "text" else ()
        codes = encode_scenes(kind, draw_scenes(kind, "train", recipe.num_images, seed), vq, *encoder)
        gpt = build_gpt(role, seed, vq.quantize.directions().detach())
        train_gpt(gpt, codes, recipe, seed)
        save_gpt(gpt, folder / f"image_{role}", torch.bfloat16)


BUILDERS = {"caption": build_caption, "video": build_video, "text": build_text, "image": build_image}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m zoo.build", description="Train models of the zoo from a seed.")
    parser.add_argument("part", choices=BUILDERS)
    parser.add_argument("--out", type=Path, default=CHECKPOINTS, help="folder to write (default: zoo/checkpoints)")
    parser.add_argument("--quick", action="store_true", help="a short run that checks the recipe; needs --out")
    parser.add_argument("--only", choices=RECIPES, help="train one model, keep the others as they are in --out")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    if options.quick and options.out == CHECKPOINTS:
        parser.error("--quick makes poor models: name another folder with --out")
    options.out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    for name, recipe in RECIPES.items():
        part, role = name.split("_", 1)
        if part == options.part and options.only in (None, name):
            recipe = recipe.shorten(QUICK_SHARES[part]) if options.quick else recipe
            report(f"{name}: {recipe}")
            BUILDERS[part](role, recipe, options.seed, options.out)
    report(f"trained in {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
