"""Trains a caption model's vision tower on attribute labels: every patch predicts the contents of its cell.

Two stages: `pretrain_tower` before the whole model is trained, `sharpen_tower` after it on many small objects, with
features kept close to those that the language model reads. The prediction heads are discarded afterwards.
"""

from __future__ import annotations

import copy
import dataclasses
import random
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from zoo.pair import IMAGE_PX, PATCH_PX
from zoo.samples import pixels_of, render_like_a_file
from zoo.training import IGNORED, fit, label_loss, load_training, save_training
from zoo.world.scene import (
    COLOURS,
    GRID,
    MAX_OBJECTS,
    SHAPES,
    SIZES,
    TEXTURES,
    TONES,
    Scene,
    draw_scene,
    scene_rng,
    split_of,
)

# Labels of a patch: rank of its cell's object in reading order (0: empty), that object's attributes, the ground's.
HEADS = {
    "rank": MAX_OBJECTS + 1, "size": len(SIZES), "colour": len(COLOURS), "shape": len(SHAPES),
    "tone": len(TONES), "texture": len(TEXTURES),
}  # fmt: skip
# Mostly small objects, which a tower learns last.
CROWDED_SIZE_ODDS = (0.6, 0.25, 0.15)
BATCH, LR, SHARPEN_LR = 64, 1e-3, 3e-4
SAVE_S = 120.0


def label_patches(scene: Scene) -> Tensor:
    """Return the labels of a scene's patches, int64 [6 heads, 36 patches]; attributes of an empty cell are ignored."""
    per_side = IMAGE_PX // PATCH_PX
    labels = torch.full((len(HEADS), per_side, per_side), IGNORED)
    labels[0] = 0
    labels[4], labels[5] = TONES.index(scene.tone), TEXTURES.index(scene.texture)
    step = per_side // GRID
    for rank, thing in enumerate(scene.things, start=1):
        row, column = thing.cell // GRID * step, thing.cell % GRID * step
        values = (rank, SIZES.index(thing.size), COLOURS.index(thing.colour), SHAPES.index(thing.shape))
        labels[:4, row : row + step, column : column + step] = torch.tensor(values)[:, None, None]
    return labels.flatten(1)


def draw_crowded(rng: random.Random, split: str) -> Scene:
    """Draw a scene of 3 or 4 objects of a split, most of them small."""
    while True:
        scene = draw_scene(rng, split)
        things = tuple(dataclasses.replace(t, size=rng.choices(SIZES, CROWDED_SIZE_ODDS)[0]) for t in scene.things)
        crowded = dataclasses.replace(scene, things=things)
        if len(things) >= 3 and split_of(crowded) == split:
            return crowded


def draw_labelled(
    draw: Callable[[random.Random, str], Scene],
    seed: int,
    step: int,
    label: Callable[[Scene], Tensor] = label_patches,
    batch: int = BATCH,
    image_px: int = IMAGE_PX,
) -> tuple[Tensor, Tensor]:
    """Return the pixels [b, 3, image_px, image_px] and labels [heads, b, patches] of a training step."""
    images, labels = [], []
    for index in range((step - 1) * batch, step * batch):
        rng = scene_rng("train", seed, index)
        scene = draw(rng, "train")
        images.append(render_like_a_file(scene, rng, image_px))
        labels.append(label(scene))
    return pixels_of(images), torch.stack(labels, dim=1)


def label_head(width: int, heads: Mapping[str, int] = HEADS) -> nn.Module:
    """Build a head from features [..., width] to the logits of all labels."""
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, sum(heads.values())))


def pretrain_tower(
    tower: nn.Module,
    width: int,
    num_steps: int,
    seed: int,
    heads: Mapping[str, int] = HEADS,
    draw_step: Callable[[int], tuple[Tensor, Tensor]] | None = None,
    batch: int = BATCH,
    dtype: torch.dtype = torch.float32,
    checkpoint: Path | None = None,
) -> None:
    """Train a CLIP tower in place to predict the labels `heads` from its patch features.

    `draw_step` returns the pixels and labels of a step (default: scenes of the caption pair); `dtype` is that of the
    tower's GEMMs. With `checkpoint`, a file, training continues from it and writes it every SAVE_S seconds.
    """
    torch.manual_seed(seed)
    draw_step = draw_step or partial(draw_labelled, draw_scene, seed + 1)
    head = label_head(width, heads)
    named = dict(nn.ModuleDict({"tower": tower, "head": head}).named_parameters())
    parameters = [*tower.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=LR, weight_decay=0.01, betas=(0.9, 0.98))
    schedule = OneCycleLR(optimizer, LR, total_steps=num_steps + 1, pct_start=0.1)
    done_steps = 0
    if checkpoint and checkpoint.exists():
        done_steps = int(load_training(checkpoint, named, optimizer)["step"])
        schedule = OneCycleLR(optimizer, LR, total_steps=num_steps + 1, pct_start=0.1, last_epoch=done_steps - 1)
    saved_s = time.monotonic()
    tower.train()

    def step_loss(step: int) -> tuple[Tensor, dict[str, float]]:
        pixels, labels = draw_step(step)
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            features = tower(pixel_values=pixels).last_hidden_state[:, 1:]  # [b, patches, width]
        return label_loss(head(features.float()), labels, heads)

    def after_step(step: int) -> None:
        nonlocal saved_s
        if checkpoint and (step == num_steps or time.monotonic() - saved_s > SAVE_S):
            save_training(checkpoint, named, optimizer, step=str(step))
            saved_s = time.monotonic()

    fit(step_loss, [schedule], parameters, num_steps, batch, "tower", done_steps, after_step)


def sharpen_tower(tower: nn.Module, width: int, num_steps: int, seed: int) -> None:
    """Train a tower in place on crowded scenes; the first tenth of the steps fits heads to its present features."""
    torch.manual_seed(seed)
    head = label_head(width)
    present = copy.deepcopy(tower).eval().requires_grad_(False)
    groups = [{"params": [*head.parameters()], "lr": 5e-3}, {"params": [*tower.parameters()], "lr": SHARPEN_LR}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=0.01)
    rates = [lambda step: 1.0 - 0.9 * step / num_steps, lambda step: min(1.0, 1.1 * (1.0 - step / num_steps))]

    def step_loss(step: int) -> tuple[Tensor, dict[str, float]]:
        pixels, labels = draw_labelled(draw_crowded, seed + 2, step)
        with torch.no_grad():
            before = present(pixel_values=pixels).last_hidden_state[:, 1:]  # [b, 36, width]
        is_fitted = step > max(1, num_steps // 10)
        features = tower(pixel_values=pixels).last_hidden_state[:, 1:] if is_fitted else before
        loss, right = label_loss(head(features), labels, HEADS)
        moved = mse_loss(features, before)
        return moved + loss, {**right, "moved": moved.item()}

    fit(step_loss, [LambdaLR(optimizer, rates)], tower.parameters(), num_steps, BATCH, "sharpen")
