"""Fits the projector: a patch's column becomes the language model's embedding of the word of the patch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import OneCycleLR
from transformers import PreTrainedTokenizerFast

from zoo.real_vision.labels import IMAGE_PX, WORDS, label_patches
from zoo.tower import draw_labelled
from zoo.training import fit
from zoo.world.dense import draw_dense

SCENES, SCENES_PER_DRAW = 240, 16
BATCH, STEPS, LR = 2048, 900, 2e-3


def word_embeddings(table: Tensor, tokenizer: PreTrainedTokenizerFast) -> Tensor:
    """Return the rows of an embedding table of WORDS, [words, hidden]; a long word has that of its first token."""
    texts = [f" {word}" if word.isalpha() else word for word in WORDS]
    return table[[tokenizer(text, add_special_tokens=False)["input_ids"][0] for text in texts]]


@torch.no_grad()
def draw_features(tower: nn.Module, seed: int, num_scenes: int = SCENES) -> tuple[Tensor, Tensor]:
    """Return a tower's patch features [patches, width] of drawn scenes and the numbers of their words [patches]."""
    features, words = [], []
    for step in range(1, num_scenes // SCENES_PER_DRAW + 1):
        pixels, labels = draw_labelled(draw_dense, seed, step, label_patches, SCENES_PER_DRAW, IMAGE_PX)
        features.append(tower(pixel_values=pixels).last_hidden_state[:, 1:].flatten(0, 1))
        words.append(labels[-1].flatten())
    return torch.cat(features), torch.cat(words)


def fit_projector(projector: nn.Module, tower: nn.Module, embeddings: Tensor, seed: int, steps: int = STEPS) -> float:
    """Train a projector in place; return the share of patches whose nearest word is right, on scenes of another seed.

    `embeddings` are those of WORDS.
    """
    torch.manual_seed(seed)
    features, words = draw_features(tower, seed + 3)
    first: Any = projector.linear_1
    second: Any = projector.linear_2
    scale = embeddings.square().mean().sqrt()
    with torch.no_grad():  # the first layer starts on standardised features, the second near the embeddings' size
        mean, deviation = features.mean(0), features.std(0) + 1e-4
        first.weight.div_(deviation)
        first.bias.copy_(-first.weight @ mean)
        second.weight.mul_(scale)
        second.bias.zero_()
    projector.requires_grad_(True)
    optimizer = torch.optim.AdamW(projector.parameters(), lr=LR, weight_decay=0.0)
    schedule = OneCycleLR(optimizer, LR, total_steps=steps + 1, pct_start=0.1)
    order = torch.Generator().manual_seed(seed)

    def step_loss(step: int) -> tuple[Tensor, dict[str, float]]:
        chosen = torch.randint(len(features), (BATCH,), generator=order)
        return mse_loss(projector(features[chosen]) / scale, embeddings[words[chosen]] / scale), {}

    fit(step_loss, [schedule], projector.parameters(), steps, BATCH, "projector")
    features, words = draw_features(tower, seed + 4, 4 * SCENES_PER_DRAW)
    with torch.no_grad():
        nearest = torch.cdist(projector(features), embeddings).argmin(-1)
    return float((nearest == words).float().mean())
