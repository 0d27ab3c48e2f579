"""Rebuilds the text pair of zoo/checkpoints from a seed: `python -m zoo.build_text`. Contains recipe and training
loop."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM

from zoo.allocation import keep_memory
from zoo.pair import CHECKPOINTS
from zoo.text_pair import build_model, build_tokenizer, save_model
from zoo.text_samples import TextBatch, draw_batches
from zoo.train import lr_share
from zoo.world.grammar import DRAFTER_FILLER_ODDS, FILLER_ODDS


@dataclass(frozen=True)
class TextRecipe:
    """Steps, conversations in a batch, learning rate, and the odds of filler words."""

    steps: int
    batch: int
    lr: float
    filler_odds: tuple[float, ...] = FILLER_ODDS


RECIPES = {
    "target": TextRecipe(1500, 24, 1e-3),
    "drafter": TextRecipe(1000, 24, 3e-3, filler_odds=DRAFTER_FILLER_ODDS),
}
QUICK_SHARE = 0.01
"""The part of the steps that `--quick` runs."""


def loss_of(model: LlamaForCausalLM, batch: TextBatch) -> torch.Tensor:
    """The weighted next-token loss of a batch; logits are computed only where a token is to be learned."""
    hidden = model.model(input_ids=batch.ids, attention_mask=batch.mask, use_cache=False).last_hidden_state
    weights = batch.weights[:, 1:]
    wanted = weights > 0
    logits = model.lm_head(hidden[:, :-1][wanted]).float()  # [learned tokens, V]
    losses = cross_entropy(logits, batch.ids[:, 1:][wanted], reduction="none")
    return (losses * weights[wanted]).sum() / weights.sum()


def train_text_model(
    model: LlamaForCausalLM,
    batches: Iterator[TextBatch],
    num_steps: int,
    lr: float,
    autosave: Path | None = None,
    report: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
) -> None:
    """Train a model in place; `autosave` gets its weights every 250 steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.02, betas=(0.9, 0.98))
    share = partial(lr_share, num_steps=num_steps, warmup_steps=min(100, num_steps // 10 + 1))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
    started, total = time.monotonic(), 0.0
    model.train()
    for step in range(1, num_steps + 1):
        # bfloat16 GEMMs are twice as fast on CPUs with bfloat16 instructions; the weights stay in float32.
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, next(batches))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        total += loss.item()
        if step % 50 == 0:
            rate = step / (time.monotonic() - started)
            left_s = (num_steps - step) / rate
            report(f"step {step}/{num_steps} loss {total / 50:.4f} {rate:.2f} steps/s, {left_s:.0f} s left")
            total = 0.0
        if autosave is not None and step % 250 == 0:
            save_file({name: value.contiguous() for name, value in model.state_dict().items()}, autosave)
    model.eval()


def build_one(role: str, recipe: TextRecipe, seed: int, folder: Path) -> None:
    """Train one model of the pair from a seed and save it under `folder`."""
    tokenizer = build_tokenizer()
    model = build_model(role, tokenizer, seed)
    batches = draw_batches(seed, recipe.batch, tokenizer, recipe.filler_odds)
    partial_file = folder / f"text_{role}.partial.safetensors"
    train_text_model(model, batches, recipe.steps, recipe.lr, partial_file)
    save_model(model, tokenizer, folder / f"text_{role}")
    partial_file.unlink(missing_ok=True)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m zoo.build_text", description=__doc__.split("\n")[0])
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
                recipe = replace(recipe, steps=max(1, round(QUICK_SHARE * recipe.steps)))
            print(f"{role}: {recipe}", file=sys.stderr)
            build_one(role, recipe, options.seed, options.out)
    print(f"trained in {time.monotonic() - started:.0f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
