"""Trains a CLIP vision tower on attribute labels: every patch predicts the contents of its cell.

Two stages: `pretrain_tower` before the whole model is trained, `sharpen_tower` after it on many small objects, with
features kept close to those that the language model reads. The prediction heads are discarded afterwards.
"""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from zoo.pair import IMAGE_PX, PATCH_PX
from zoo.samples import pixels_of, render_like_a_file
from zoo.training import IGNORED, Measured, fit, label_loss
from zoo.world.scene import (
    COLOURS,
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

GROUND_HEADS = {"tone": len(TONES), "texture": len(TEXTURES)}
THING_HEADS = {"size": len(SIZES), "colour": len(COLOURS), "shape": len(SHAPES)}
HEADS = {"rank": MAX_OBJECTS + 1, **THING_HEADS, **GROUND_HEADS}
"""Labels of a patch: rank of its cell's object in reading order (0: empty), that object's attributes, the ground's."""
CROWDED_SIZE_ODDS = (0.6, 0.25, 0.15)
"""Mostly small objects, which a tower learns last."""
BATCH, LR, SHARPEN_LR = 64, 1e-3, 3e-4


def label_patches(scene: Scene) -> Tensor:
    """Return the labels of a scene's patches, int64 [6 heads, 36 patches]; attributes of an empty cell are ignored."""
    return label_cells(scene, IMAGE_PX // PATCH_PX, len(HEADS), lambda rank: rank).flatten(1)


def label_cells(scene: Scene, side: int, num_heads: int, filled: Callable[[int], int]) -> Tensor:
    """Return labels [num_heads, side, side]: `filled` of an object's rank (0: empty), then size, colour, shape, tone,
    texture; further heads are ignored."""
    labels = torch.full((num_heads, side, side), IGNORED)
    labels[0] = 0
    labels[4], labels[5] = TONES.index(scene.tone), TEXTURES.index(scene.texture)
    step = side // scene.grid
    for rank, thing in enumerate(scene.things, start=1):
        row, column = thing.cell // scene.grid * step, thing.cell % scene.grid * step
        values = (filled(rank), SIZES.index(thing.size), COLOURS.index(thing.colour), SHAPES.index(thing.shape))
        labels[:4, row : row + step, column : column + step] = torch.tensor(values)[:, None, None]
    return labels


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
    num_steps: int,
    seed: int,
    draw_step: Callable[[int], tuple[Tensor, Tensor]],
    heads: Mapping[str, int] = HEADS,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Train a tower in place to predict the labels `heads`; `draw_step` returns pixels and labels of a step, `dtype` is
    that of the tower's GEMMs."""
    torch.manual_seed(seed)
    head = label_head(tower.config.hidden_size, heads)  # type: ignore[union-attr,arg-type]
    parameters = [*tower.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=LR, weight_decay=0.01, betas=(0.9, 0.98))
    tower.train()

    def step_loss(step: int) -> Measured:
        pixels, labels = draw_step(step)
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            features = tower(pixel_values=pixels).last_hidden_state[:, 1:]  # [b, patches, width]
        return label_loss(head(features.float()), labels, heads)

    schedule = OneCycleLR(optimizer, LR, total_steps=num_steps + 1, pct_start=0.1)
    fit(step_loss, [schedule], parameters, num_steps, "tower")


def sharpen_tower(tower: nn.Module, num_steps: int, seed: int) -> None:
    """Train a tower in place on crowded scenes; the first tenth of the steps fits heads to its present features."""
    torch.manual_seed(seed)
    head = label_head(tower.config.hidden_size)  # type: ignore[union-attr,arg-type]
    present = copy.deepcopy(tower).eval().requires_grad_(False)
    groups = [{"params": [*head.parameters()], "lr": 5e-3}, {"params": [*tower.parameters()], "lr": SHARPEN_LR}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=0.01)
    rates = [lambda step: 1.0 - 0.9 * step / num_steps, lambda step: min(1.0, 1.1 * (1.0 - step / num_steps))]

    def step_loss(step: int) -> Measured:
        pixels, labels = draw_labelled(draw_crowded, seed + 2, step)
        with torch.no_grad():
            before = present(pixel_values=pixels).last_hidden_state[:, 1:]  # [b, 36, width]
        is_fitted = step > max(1, num_steps // 10)
        features = tower(pixel_values=pixels).last_hidden_state[:, 1:] if is_fitted else before
        loss, right = label_loss(head(features), labels, HEADS)
        moved = mse_loss(features, before)
        return moved + loss, {**right, "moved": moved.item()}

    fit(step_loss, [LambdaLR(optimizer, rates)], tower.parameters(), num_steps, "sharpen")
