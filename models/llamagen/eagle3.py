"""Load EAGLE-3 heads for LlamaGen: `models.heads.eagle3` with the 2D rotary positions of the target."""

from __future__ import annotations

import torch

from models.heads.eagle3 import Eagle3Network, Eagle3Shape
from models.heads.eagle3_files import load_eagle3, read_eagle3_shape
from models.heads.files import head_folder, read_json
from models.heads.speculators import WEIGHT_NAMES
from models.llamagen.eagle import other_image, pair_rotary
from models.llamagen.gpt import Gpt
from models.llamagen.shape import GptShape
from models.loading.checkpoints import CheckpointError, CheckpointRef


def read_image_eagle3_shape(ref: CheckpointRef, gpt: GptShape) -> Eagle3Shape:
    """Read the shape of a head; raises CheckpointError if it does not fit a GPT of shape `gpt`."""
    shape = read_eagle3_shape(ref, gpt.num_layers)
    config = read_json(head_folder(ref, WEIGHT_NAMES, weights=False))
    if problem := _misfit(shape, gpt) or other_image(config, gpt):
        raise CheckpointError(f"{ref.path}: {problem}; take a drafter that was trained for this target")
    return shape


def load_image_eagle3(ref: CheckpointRef, gpt: Gpt, dtype: str, device: torch.device) -> Eagle3Network:
    """Load a head in evaluation mode; `dtype` is a key of `DTYPES`, or "auto" for the stored type."""
    shape = read_image_eagle3_shape(ref, gpt.shape)
    rotary = pair_rotary(gpt.shape, shape.layers.head_dim)
    return load_eagle3(ref, gpt.shape.num_layers, gpt.embed_tokens.weight, dtype, device, rotary)


def _misfit(shape: Eagle3Shape, gpt: GptShape) -> str | None:
    if shape.target_hidden_size != gpt.dim:
        return f"it reads states of width {shape.target_hidden_size}, and the target's are {gpt.dim} wide"
    if shape.vocab_size != gpt.vocab_size:
        return f"it knows {shape.vocab_size} codes, and the target {gpt.vocab_size}"
    if shape.layers.head_dim % 4:
        return f"its heads have {shape.layers.head_dim} dimensions, which rows and columns cannot share in pairs"
    return None
