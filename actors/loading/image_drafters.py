"""Checks and loads the parts of an image pair: LlamaGen models, text encoders, EAGLE and Medusa heads.

`actors.loading.image_pair` combines them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from actors.loading.method import num_medusa_levels
from configs.drafters import EagleDrafter, MedusaDrafter
from configs.load import ConfigError
from configs.schema import Checkpoint, Weights
from configs.synthesis import SynthesizeJob, TextEncoder
from models.backends.select import resolve_device
from models.heads.eagle import EagleNetwork
from models.heads.medusa import MedusaHeads, MedusaShape, load_medusa, read_medusa_shape
from models.llamagen.checkpoints import load_gpt, read_gpt_shape
from models.llamagen.condition import T5Condition, load_t5
from models.llamagen.eagle import load_image_eagle, read_image_eagle_shape
from models.llamagen.shape import GptShape
from models.llamagen.target import LlamaGenTarget
from models.loading.checkpoints import CheckpointError, CheckpointRef

Found = TypeVar("Found")
ImageDrafter = LlamaGenTarget | EagleNetwork | MedusaHeads


def read_at(where: str, weights: Weights, read: Callable[[CheckpointRef], Found]) -> Found:
    """What `read` finds at a checkpoint; its complaint under the dotted path `where`."""
    brings_code = isinstance(weights, Checkpoint) and weights.allow_remote_code
    try:
        return read(CheckpointRef(weights.path, weights.revision, brings_code))
    except CheckpointError as error:
        raise ConfigError(f"{where}: {error}") from None


def place_of(weights: Weights) -> torch.device:
    """The device that a checkpoint is loaded onto; `auto` is the first CUDA device where there is one."""
    return resolve_device(weights.device)


def check_drafter(config: SynthesizeJob, drafter: Weights, target: GptShape) -> None:
    """Compare a drafter's sizes with the target's, without reading its weights.

    Raises:
        ConfigError: it is missing or unreadable, was made for another target, or is too shallow for the tree.
    """
    kind = config.method.drafting.drafter
    if isinstance(kind, EagleDrafter):
        read_at("model.drafter", drafter, lambda ref: read_image_eagle_shape(ref, target))
        return
    if isinstance(kind, MedusaDrafter):
        heads = read_at("model.drafter", drafter, read_medusa_shape)
        if heads is not None:
            _check_medusa(config, drafter.path, heads, target)
        return
    own = read_at("model.drafter", drafter, read_gpt_shape)
    for name, what in (
        ("vocab_size", "codes"),
        ("grid", "codes along a side"),
        ("condition", "as its kind of condition"),
        ("num_condition_tokens", "condition columns"),
        ("condition_dim" if target.condition == "text" else "num_classes", "as what it is conditioned on"),
    ):
        if getattr(own, name) != getattr(target, name):
            raise ConfigError(
                f"model.drafter: {drafter.path} has {getattr(own, name)} {what} ({name}), and the target "
                f"{getattr(target, name)}; drafts would mean other images"
            )


def _check_medusa(config: SynthesizeJob, path: str, heads: MedusaShape, target: GptShape) -> None:
    if (heads.hidden_size, heads.vocab_size) != (target.dim, target.vocab_size):
        raise ConfigError(
            f"model.drafter: {path} reads states of width {heads.hidden_size} and knows {heads.vocab_size} codes, and "
            f"the target's are {target.dim} wide and {target.vocab_size}; take heads that were trained for this target"
        )
    levels = num_medusa_levels(config.method)
    if levels > heads.num_heads:
        raise ConfigError(
            f"method.tree: it drafts {levels} levels deep, and model.drafter has {heads.num_heads} Medusa heads, one "
            "per level; take a shallower tree"
        )


def load_gpt_target(where: str, weights: Weights, guided: bool) -> LlamaGenTarget:
    """Load a LlamaGen model as a target or as a drafter; with `guided` it has an unconditional lane.

    Raises:
        ConfigError: the checkpoint is missing or damaged.
    """
    gpt = read_at(where, weights, lambda ref: load_gpt(ref, weights.dtype, place_of(weights)))
    return LlamaGenTarget(gpt, None, guided, weights.path)


def load_text_encoder(where: str, encoder: TextEncoder, shape: GptShape) -> T5Condition:
    """Load the T5 that reads prompts for a target of this shape.

    Raises:
        ConfigError: it is missing or torn, no T5, or of another width.
    """
    return read_at(where, encoder, lambda ref: load_t5(ref, shape, encoder.dtype, place_of(encoder), encoder.truncate))


def load_drafter(config: SynthesizeJob, weights: Weights, target: LlamaGenTarget) -> ImageDrafter:
    """Load what drafts for a loaded target.

    Raises:
        ConfigError: as `check_drafter`, and where weights are torn or a head is asked for on another device.
    """
    kind, shape = config.method.drafting.drafter, target.gpt.shape
    if not isinstance(kind, (EagleDrafter, MedusaDrafter)):
        return load_gpt_target("model.drafter", weights, target.num_lanes > 1)
    if weights.device != "auto" and torch.device(weights.device) != target.device:
        raise ConfigError(
            f"model.drafter.device: a head runs where its target does, on {target.device}, not {weights.device}"
        )
    if isinstance(kind, EagleDrafter):
        return read_at("model.drafter", weights, lambda ref: load_image_eagle(ref, shape, weights.dtype, target.device))
    heads = read_at("model.drafter", weights, lambda ref: load_medusa(ref, weights.dtype, target.device))
    _check_medusa(config, weights.path, heads.shape, shape)
    return heads
