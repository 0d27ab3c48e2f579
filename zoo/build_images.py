"""Rebuilds the image models of zoo/checkpoints from a seed: `python -m zoo.build_images`.

Contains the recipe: the order of steps and their lengths. `jobs/train_drafter.py` trains their EAGLE drafters on rows
of `zoo.synthesis_rows`; see zoo/README.md.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForImageTextToText

from models.llamagen.checkpoints import save_gpt
from models.llamagen.vq import Vq
from models.llamagen.vq_files import load_vq, save_vq
from models.loading.checkpoints import CheckpointRef
from zoo.allocation import keep_memory
from zoo.image_gpt import SHAPES_OF, build_gpt, draw_scenes, encode_scenes, train_gpt
from zoo.image_text import load_t5, save_t5, train_t5
from zoo.image_vq import polish_decoder, train_vq
from zoo.pair import CHECKPOINTS
from zoo.synthesis_quality import QUALITY_JSON, measure_synthesis, synthesis_table, write_quality


@dataclass(frozen=True)
class Recipe:
    """Steps, images or prompts per step, learning rate; for a GPT also how many images are encoded for it."""

    steps: int
    batch: int
    lr: float
    num_images: int = 0


RECIPES = {
    "vq": Recipe(1400, 16, 2.5e-3),
    "polish": Recipe(900, 16, 1.5e-3),
    "t5": Recipe(1800, 128, 2e-3),
    "target": Recipe(3000, 32, 2e-3, num_images=20000),
    "drafter": Recipe(1200, 16, 3e-3, num_images=20000),
    "class_target": Recipe(2000, 16, 3e-3, num_images=8000),
}
STAGES = ("vq", "t5", *SHAPES_OF)
# The part of every number of steps and images that `--quick` runs.
QUICK_SHARE = 0.02


def load_tower(folder: Path) -> nn.Module:
    """Load the vision tower that judges likeness in training: the captioner's, not the one that measures quality."""
    model = AutoModelForImageTextToText.from_pretrained(folder / "caption_captioner", dtype=torch.float32)
    tower: nn.Module = model.model.vision_tower
    return tower


def build_vq(recipes: dict[str, Recipe], seed: int, folder: Path) -> None:
    """Train the VQ model, then its decoder for longer, and save it under `folder`."""
    tower, partial = load_tower(CHECKPOINTS), folder / "vq.partial.safetensors"
    vq, polish = recipes["vq"], recipes["polish"]
    trained = train_vq(tower, vq.steps, vq.batch, vq.lr, seed, partial)
    polish_decoder(trained, tower, polish.steps, polish.batch, polish.lr, seed + 1, partial)
    save_vq(trained, folder / "image_vq", torch.bfloat16)
    partial.unlink(missing_ok=True)


def build_gpt_on(role: str, recipe: Recipe, seed: int, folder: Path) -> None:
    """Train one GPT on codes of the VQ model in `folder`, and save it beside it."""
    kind, partial = SHAPES_OF[role].condition, folder / f"{role}.partial.safetensors"
    vq: Vq = load_vq(CheckpointRef(str(folder / "image_vq")), "float32", torch.device("cpu"))
    t5, tokenizer = load_t5(folder) if kind == "text" else (None, None)
    codes = encode_scenes(kind, draw_scenes(kind, "train", recipe.num_images, seed), vq, t5, tokenizer)
    gpt = build_gpt(role, seed, vq.quantize.directions().detach())
    train_gpt(gpt, codes, recipe.steps, recipe.batch, recipe.lr, seed, partial)
    save_gpt(gpt, folder / f"image_{role}", torch.bfloat16)
    partial.unlink(missing_ok=True)


def shorten(recipe: Recipe) -> Recipe:
    """Return the recipe of a quick run."""
    fewer = (max(4, round(QUICK_SHARE * number)) for number in (recipe.steps, recipe.num_images))
    steps, images = fewer
    return Recipe(steps, recipe.batch, recipe.lr, max(images, recipe.batch) if recipe.num_images else 0)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m zoo.build_images", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=CHECKPOINTS, help="folder to write (default: zoo/checkpoints)")
    parser.add_argument("--quick", action="store_true", help="a few steps that check the recipe; needs --out")
    parser.add_argument("--only", choices=STAGES, help="train one, keep the others as they are in --out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args(arguments)
    if options.quick and options.out == CHECKPOINTS:
        parser.error("--quick makes poor models: name another folder with --out")
    keep_memory()
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    recipes = {name: shorten(recipe) if options.quick else recipe for name, recipe in RECIPES.items()}
    started = time.monotonic()
    for stage in STAGES if options.only is None else (options.only,):
        recipe = recipes[stage]
        print(f"{stage}: {recipe}", file=sys.stderr)
        if stage == "vq":
            build_vq(recipes, options.seed, options.out)
        elif stage == "t5":
            t5, tokenizer = train_t5(recipe.steps, recipe.batch, recipe.lr, options.seed)
            save_t5(t5, tokenizer, options.out / "image_t5")
        else:
            build_gpt_on(stage, recipe, options.seed, options.out)
    print(f"trained in {time.monotonic() - started:.0f} s", file=sys.stderr)
    if options.only is None and not options.quick:
        measured = measure_synthesis(options.out)
        write_quality(measured, QUALITY_JSON if options.out == CHECKPOINTS else options.out / QUALITY_JSON.name)
        print(synthesis_table(measured))
    return 0


if __name__ == "__main__":
    sys.exit(main())
