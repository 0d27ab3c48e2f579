"""Training samples of toy targets: random answers of different lengths after prompts with and without images."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from models.contract import TargetModel
from models.heads.training.teacher import States, TrainingSample, make_training_sample, teach_rows
from models.kv.feature_layers import LAST
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


def teach_states(
    target: TargetModel, training_samples: Sequence[TrainingSample], feature_layers: tuple[int, ...] = (LAST,)
) -> States:
    """Run the target as `teach_rows` and return the padded batch."""
    return States.of(teach_rows(target, training_samples, feature_layers), target.device)
