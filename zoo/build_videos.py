"""Rebuilds the video pair of zoo/checkpoints from a seed: `python -m zoo.build_videos`. Contains the recipe."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from zoo.allocation import keep_memory
from zoo.pair import CHECKPOINTS
from zoo.video_pair import build_model, build_processor, build_tokenizer, save_model
from zoo.video_samples import draw_batches
from zoo.video_train import train_video_model
from zoo.world.grammar import DRAFTER_FILLER_ODDS, FILLER_ODDS


@dataclass(frozen=True)
class VideoRecipe:
    """Steps of the tower and of the whole, clips in a batch, learning rate, how often the whole is taught from warm-up
    to the end, and the odds of filler words."""

    tower_steps: int
    steps: int
    batch: int
    lr: float
    rounds: int = 1
    filler_odds: tuple[float, ...] = FILLER_ODDS


RECIPES = {
    "target": VideoRecipe(700, 1400, 24, 1.5e-3, rounds=2),
    "drafter": VideoRecipe(300, 700, 24, 2e-3, filler_odds=DRAFTER_FILLER_ODDS),
}
QUICK_SHARE = 0.01
"""The part of every number of steps that `--quick` runs."""


def build_one(role: str, recipe: VideoRecipe, seed: int, folder: Path) -> None:
    """Train one model of the pair from a seed and save it under `folder`."""
    tokenizer = build_tokenizer()
    processor = build_processor(tokenizer)
    model = build_model(role, tokenizer, seed)
    batches = draw_batches("train", seed, recipe.batch, tokenizer, processor.video_processor, recipe.filler_odds)
    partial = folder / f"video_{role}.partial.safetensors"
    for tower_steps in (recipe.tower_steps, *[0] * (recipe.rounds - 1)):
        train_video_model(model, batches, tower_steps, recipe.steps, recipe.lr, seed, partial)
    save_model(model, processor, folder / f"video_{role}")
    partial.unlink(missing_ok=True)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m zoo.build_videos", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=CHECKPOINTS, help="folder to write (default: zoo/checkpoints)")
    parser.add_argument("--quick", action="store_true", help="a short run that checks the recipe; needs --out")
    parser.add_argument("--only", choices=list(RECIPES), help="train one, keep the other as it is in --out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args(arguments)
    if options.quick and options.out == CHECKPOINTS:
        parser.error("--quick makes a poor pair: name another folder with --out")
    keep_memory()
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    for role, recipe in RECIPES.items():
        if options.only in (None, role):
            if options.quick:
                counts = {name: max(1, round(QUICK_SHARE * getattr(recipe, name))) for name in ("tower_steps", "steps")}
                recipe = replace(recipe, **counts)
            print(f"{role}: {recipe}", file=sys.stderr)
            build_one(role, recipe, options.seed, options.out)
    print(f"trained in {time.monotonic() - started:.0f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
