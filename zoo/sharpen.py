"""A second training stage for a model's vision tower: many small objects, while its features are kept close to the old
ones.

The language model is not run here, so an image costs a twentieth of a conversation.
"""

from __future__ import annotations

import copy
import dataclasses
import random
import sys
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from zoo.samples import pixels_of, render_like_a_file
from zoo.tower import HEADS, IGNORED, label_patches
from zoo.world.scene import SIZES, Scene, draw_scene, scene_rng, split_of

# A tower learns small objects last.
SIZE_ODDS = (0.6, 0.25, 0.15)
# What a squared step of the features away from those that the language model has learned to read costs.
ANCHOR_WEIGHT = 1.0


def draw_crowded(rng: random.Random, split: str) -> Scene:
    """Draw a scene of 3 or 4 objects of a split, most of them small."""
    while True:
        scene = draw_scene(rng, split)
        things = tuple(dataclasses.replace(t, size=rng.choices(SIZES, SIZE_ODDS)[0]) for t in scene.things)
        crowded = dataclasses.replace(scene, things=things)
        if len(things) >= 3 and split_of(crowded) == split:
            return crowded


def sharpen_tower(
    tower: nn.Module,
    width: int,
    num_steps: int,
    batch_size: int,
    lr: float,
    seed: int,
    report: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
) -> None:
    """Train a tower in place on crowded scenes; the first tenth of the steps fits heads to its present features."""
    torch.manual_seed(seed)
    device = next(tower.parameters()).device
    head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, sum(HEADS.values()))).to(device)
    present = copy.deepcopy(tower).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(
        [{"params": list(head.parameters()), "lr": 5e-3}, {"params": list(tower.parameters()), "lr": lr}],
        betas=(0.9, 0.98),
        weight_decay=0.01,
    )
    fit_steps = max(1, num_steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        [lambda step: 1.0 - 0.9 * step / num_steps, lambda step: min(1.0, 1.1 * (1.0 - step / num_steps))],
    )
    started, right, told = time.monotonic(), 0.0, 0.0
    for step in range(1, num_steps + 1):
        scenes, images = [], []
        for index in range((step - 1) * batch_size, step * batch_size):
            rng = scene_rng("train", seed + 2, index)
            scenes.append(draw_crowded(rng, "train"))
            images.append(render_like_a_file(scenes[-1], rng))
        pixels = pixels_of(images).to(device)
        wanted = torch.stack([label_patches(scene) for scene in scenes], dim=1).to(device)  # [heads, b, 36]
        with torch.no_grad():
            before = present(pixel_values=pixels).last_hidden_state[:, 1:]  # [b, 36, width]
        features = before if step <= fit_steps else tower(pixel_values=pixels).last_hidden_state[:, 1:]
        loss = ANCHOR_WEIGHT * mse_loss(features, before)
        for number, logits in enumerate(head(features).split(list(HEADS.values()), dim=-1)):
            loss = loss + cross_entropy(logits.flatten(0, 1), wanted[number].flatten(), ignore_index=IGNORED)
            if number == list(HEADS).index("shape"):
                known = wanted[number] != IGNORED
                right += float(((logits.argmax(-1) == wanted[number]) & known).sum())
                told += float(known.sum())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(tower.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 25 == 0 or step == num_steps:
            rate = step * batch_size / (time.monotonic() - started)
            moved = mse_loss(features, before).item()
            report(f"sharpen {step}/{num_steps} shapes {right / told:.3f} moved {moved:.3f} {rate:.0f} images/s")
            right = told = 0.0
