"""The shipped checkpoints: their folder, their processors, and untrained models of their configs.

Recipes train new weights for the config, the tokenizer and the processor that ship in a model's folder.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from models.loading.checkpoints import CheckpointRef, read_config, read_processor

CHECKPOINTS = Path(__file__).parent / "checkpoints"
IMAGE_PX, PATCH_PX = 96, 16
NUM_VISUAL_TOKENS = (IMAGE_PX // PATCH_PX) ** 2
"""Visual tokens of an image of the models `caption_*`."""


def load_processor(name: str) -> Any:
    """Load the processor of a shipped model, or the tokenizer of a text model."""
    ref = CheckpointRef(str(CHECKPOINTS / name))
    return read_processor(ref, read_config(ref))


def load_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """Load the tokenizer of a shipped model; both models of a pair have the same."""
    processor = load_processor(name)
    tokenizer: PreTrainedTokenizerFast = getattr(processor, "tokenizer", processor)
    return tokenizer


def seed_weights(name: str, seed: int) -> None:
    """Seed the random weights of one model; every model has a different stream."""
    torch.manual_seed(random.Random(f"{name}/{seed}").getrandbits(62))


def build_model(name: str) -> Any:
    """Build an untrained float32 model of a shipped config; its weights are drawn from torch's random stream."""
    config = read_config(CheckpointRef(str(CHECKPOINTS / name)))
    return getattr(transformers, config.architectures[0])(config)


def save_model(model: PreTrainedModel, name: str, folder: Path) -> None:
    """Save a model in bfloat16 below `folder`, with the other files of the shipped one."""
    others = {path.name: path.read_bytes() for path in (CHECKPOINTS / name).iterdir() if path.suffix != ".safetensors"}
    model.to(torch.bfloat16).save_pretrained(folder / name)
    for file, content in others.items():
        (folder / name / file).write_bytes(content)
