"""Training samples of toy targets: random answers of different lengths after prompts with and without images."""

from __future__ import annotations

import torch

from models.heads.training.teacher import TrainingSample, make_training_sample
from models.target import Target
from tests import toys


def training_samples(family: str = "llava", count: int = 6) -> tuple[Target, list[TrainingSample]]:
    """A target and `count` samples, whose answers have 6, 9 or 12 tokens."""
    target = toys.target(family)
    generator = torch.Generator().manual_seed(1)
    made = []
    for seed in range(count):
        prompt, pictures = toys.prompt(family, seed)
        answer = torch.randint(4, toys.VOCAB_SIZE, (6 + 3 * (seed % 3),), generator=generator).tolist()
        made.append(make_training_sample(target, target.encode(prompt, pictures), answer))
    return target, made
