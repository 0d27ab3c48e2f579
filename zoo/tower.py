"""Pre-training of a vision tower on attribute labels: every patch predicts the contents of its cell.

The prediction heads are discarded afterwards.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from zoo.pair import IMAGE_PX, PATCH_PX
from zoo.samples import pixels_of, render_like_a_file
from zoo.world.scene import COLOURS, GRID, MAX_OBJECTS, SHAPES, SIZES, TEXTURES, TONES, Scene, draw_scene, scene_rng

# What a patch names: the rank of its cell's object in reading order (0: empty), that object's attributes, the ground's.
HEADS = {
    "rank": MAX_OBJECTS + 1, "size": len(SIZES), "colour": len(COLOURS), "shape": len(SHAPES),
    "tone": len(TONES), "texture": len(TEXTURES),
}  # fmt: skip
IGNORED = -100


def label_patches(scene: Scene) -> torch.Tensor:
    """Return the labels of a scene's patches, int64 [6 heads, 36 patches]; attributes of an empty cell are ignored."""
    per_side = IMAGE_PX // PATCH_PX
    labels = torch.full((len(HEADS), per_side, per_side), IGNORED)
    labels[0] = 0
    labels[4], labels[5] = TONES.index(scene.tone), TEXTURES.index(scene.texture)
    step = per_side // GRID
    for rank, thing in enumerate(scene.things, start=1):
        row, column = thing.cell // GRID * step, thing.cell % GRID * step
        told = (rank, SIZES.index(thing.size), COLOURS.index(thing.colour), SHAPES.index(thing.shape))
        labels[:4, row : row + step, column : column + step] = torch.tensor(told)[:, None, None]
    return labels.flatten(1)


def pretrain_tower(
    tower: nn.Module,
    width: int,
    num_steps: int,
    batch_size: int,
    lr: float,
    seed: int,
    report: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
) -> None:
    """Train a CLIP tower in place until its patch features name the attributes."""
    torch.manual_seed(seed)
    head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, sum(HEADS.values())))
    device = next(tower.parameters()).device
    head = head.to(device)
    parameters = [*tower.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=0.01, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=num_steps + 1, pct_start=0.1)
    started, right, told = time.monotonic(), torch.zeros(len(HEADS)), torch.zeros(len(HEADS))
    tower.train()
    for step in range(1, num_steps + 1):
        images, labels = [], []
        for index in range((step - 1) * batch_size, step * batch_size):
            rng = scene_rng("train", seed + 1, index)
            scene = draw_scene(rng, "train")
            images.append(render_like_a_file(scene, rng))
            labels.append(label_patches(scene))
        features = tower(pixel_values=pixels_of(images).to(device)).last_hidden_state[:, 1:]  # [b, 36, width]
        wanted = torch.stack(labels, dim=1).to(device)  # [heads, b, 36]
        loss = torch.zeros((), device=device)
        for number, logits in enumerate(head(features).split(list(HEADS.values()), dim=-1)):
            loss = loss + cross_entropy(logits.flatten(0, 1), wanted[number].flatten(), ignore_index=IGNORED)
            known = wanted[number] != IGNORED
            right[number] += ((logits.argmax(-1) == wanted[number]) & known).sum().cpu()
            told[number] += known.sum().cpu()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == num_steps:
            shares = " ".join(f"{name} {share:.3f}" for name, share in zip(HEADS, (right / told).tolist()))
            rate = step * batch_size / (time.monotonic() - started)
            report(f"tower {step}/{num_steps} loss {loss.item():.3f} {shares} {rate:.0f} images/s")
            right.zero_()
            told.zero_()
