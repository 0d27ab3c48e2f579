"""Trains the models of zoo/checkpoints from a seed: `python -m zoo.build NAME …`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from models.llamagen.checkpoints import save_gpt
from models.llamagen.vq_files import load_vq, save_vq
from models.loading.checkpoints import CheckpointRef
from zoo import samples, text, video
from zoo.heads import HEADS, build_head
from zoo.image.gpt import build_gpt, draw_scenes, encode_scenes, train_gpt
from zoo.image.text import load_t5, train_t5
from zoo.image.vq import polish_decoder, train_vq
from zoo.pair import CHECKPOINTS, build_model, save_model, seed_weights
from zoo.quality import load_captioner
from zoo.tower import draw_labelled, label_head, pretrain_tower, sharpen_tower
from zoo.training import Measured, Recipe, fit_adam, label_loss, lr_share, next_token_loss, report
from zoo.world.grammar import DRAFTER_FILLER_ODDS
from zoo.world.scene import draw_scene

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
POLISH_SHARE = 0.2
"""Learning rates of a caption model's last stage, relative to the stages before."""
DECODER_LR = 1.5e-3
"""Learning rate of the VQ model's decoder in its last stage."""
LABEL_WEIGHT = 0.2
"""Loss weight of the labels in a video model's second stage: enough that the tower keeps its features while the
language model learns to read them."""
BETAS, DECAY = (0.9, 0.98), 0.02


def build_caption(name: str, recipe: Recipe, seed: int, folder: Path) -> None:
    """Train one caption model: its tower on labels, then the whole; the target's tower and whole once more."""
    seed_weights(name.removeprefix("caption_"), seed)
    model = build_model(name)
    tower = model.model.vision_tower
    pretrain_tower(tower, recipe.tower_steps, seed, partial(draw_labelled, draw_scene, seed + 1))
    train_captions(model, recipe, seed)
    if recipe.sharpen_steps:
        sharpen_tower(tower, recipe.sharpen_steps, seed)
    if recipe.polish_steps:
        lr, tower_lr = recipe.lr * POLISH_SHARE, recipe.tuned_tower_lr * POLISH_SHARE
        train_captions(model, replace(recipe, steps=recipe.polish_steps, lr=lr, tuned_tower_lr=tower_lr), seed + 1)
    save_model(model, name, folder)


def train_captions(model: Any, recipe: Recipe, seed: int) -> None:
    """Train a model in place on the mixture of conversations."""
    torch.manual_seed(seed)
    rest = [p for name, p in model.named_parameters() if not name.startswith("model.vision_tower.")]
    tower = {"params": list(model.model.vision_tower.parameters()), "lr": recipe.tuned_tower_lr}
    train_tokens(model, samples.draw_batches, [tower, {"params": rest, "lr": recipe.lr}], recipe, seed, 200)


def build_text(name: str, recipe: Recipe, seed: int, folder: Path) -> None:
    """Train one model of the text pair."""
    seed_weights(name.replace("_", "-"), seed)
    model = build_model(name)
    train_tokens(model, text.draw_batches, [{"params": [*model.parameters()], "lr": recipe.lr}], recipe, seed, 100)
    save_model(model, name, folder)


def train_tokens(
    model: Any, draw: Callable[..., Any], groups: list[dict[str, Any]], recipe: Recipe, seed: int, max_warmup_steps: int
) -> None:
    """Train a language model in place on the tokens of batches."""
    batches = draw(seed, recipe.batch, recipe.filler_odds)
    share = lr_share(recipe.steps, min(max_warmup_steps, recipe.steps // 10 + 1))
    model.train()

    def step_loss(step: int) -> Measured:
        # bfloat16 GEMMs are twice as fast on CPUs with bfloat16 instructions; the weights stay in float32.
        with torch.autocast("cpu", torch.bfloat16):
            return next_token_loss(model, next(batches)), {}

    fit_adam(step_loss, groups, share, recipe.steps, clipped=model.parameters(), weight_decay=DECAY, betas=BETAS)


def build_video(name: str, recipe: Recipe, seed: int, folder: Path) -> None:
    """Train one model of the video pair: its tower on labels, then the whole model on captions and weighted labels."""
    seed_weights(name.replace("_", "-"), seed)
    model = build_model(name)
    batches = video.draw_batches(seed, recipe.batch, recipe.filler_odds)
    tower = model.model.visual
    model.train()

    def step_loss(step: int, head: nn.Module, with_captions: bool) -> Measured:
        batch = next(batches)
        assert batch.labels is not None
        with torch.autocast("cpu", torch.bfloat16):
            grids = batch.inputs["video_grid_thw"]
            features = tower(batch.inputs["pixel_values_videos"], grid_thw=grids).pooler_output
            loss, right = label_loss(head(features.float()), batch.labels, video.HEADS)
            return next_token_loss(model, batch) + LABEL_WEIGHT * loss if with_captions else loss, right

    for number in range(recipe.rounds):
        torch.manual_seed(seed)
        head = label_head(model.config.text_config.hidden_size, video.HEADS)
        for part, num_steps in ((tower, 0 if number else recipe.tower_steps), (model, recipe.steps)):
            losses = partial(step_loss, head=head, with_captions=part is model)
            learned = [*part.parameters(), *head.parameters()]
            share = lr_share(num_steps, min(100, num_steps // 10 + 1))
            fit_adam(losses, learned, share, num_steps, lr=recipe.lr, weight_decay=DECAY, betas=BETAS)
    save_model(model, name, folder)


def build_image(name: str, recipe: Recipe, seed: int, folder: Path) -> None:
    """Train one image model; a GPT needs the VQ model, and for prompts the T5, in `folder`."""
    if name == "image_vq":
        # The perceptual loss uses the captioner's tower, not the tower that measures quality.
        tower = load_captioner(CHECKPOINTS, "captioner").model.vision_tower
        vq = train_vq(tower, recipe, seed)
        polish_decoder(vq, tower, replace(recipe, steps=recipe.polish_steps, lr=DECODER_LR), seed + 1)
        save_vq(vq, folder / name, torch.bfloat16)
    elif name == "image_t5":
        save_model(train_t5(recipe, seed), name, folder)
    else:
        vq = load_vq(CheckpointRef(str(folder / "image_vq")), "float32", torch.device("cpu"))
        gpt = build_gpt(name, seed, vq.quantize.directions().detach())
        kind = gpt.shape.condition
        encoder = load_t5(folder) if kind == "text" else ()
        scenes = draw_scenes(kind, "train", recipe.num_images, seed)
        train_gpt(gpt, encode_scenes(kind, scenes, vq, *encoder), recipe, seed)
        save_gpt(gpt, folder / name, torch.bfloat16)


BUILDERS = {"caption": build_caption, "video": build_video, "text": build_text, "image": build_image}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m zoo.build", description="Train models of the zoo from a seed.")
    parser.add_argument("name", choices=(*BUILDERS, *RECIPES), nargs="+", metavar="NAME", help="a model or a part")
    parser.add_argument("--out", type=Path, default=CHECKPOINTS, help="folder to write (default: zoo/checkpoints)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    for name, recipe in RECIPES.items():
        part, role = name.split("_", 1)
        if {part, name} & {*options.name}:
            report(f"{name}: {recipe}")
            (build_head if role in HEADS else BUILDERS[part])(name, recipe, options.seed, options.out)
    report(f"trained in {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
