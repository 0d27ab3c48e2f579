"""Checks and loads heads of a target (EAGLE, Medusa)."""

from __future__ import annotations

from typing import Any

import torch

from actors.loading.method import num_medusa_levels
from configs import schema
from configs.drafters import EagleDrafter, MedusaDrafter
from configs.load import ConfigError
from models.heads.eagle import WEIGHT_NAMES as EAGLE_NAMES
from models.heads.eagle import EagleNetwork, load_eagle, read_eagle_shape
from models.heads.files import fingerprint, head_folder
from models.heads.medusa import WEIGHT_NAMES as MEDUSA_NAMES
from models.heads.medusa import MedusaHeads, load_medusa, read_medusa_shape
from models.inputs.processing import FrontEnd
from models.loading.checkpoints import CheckpointError, CheckpointRef
from models.target import Target

Head = EagleNetwork | MedusaHeads


def is_head(config: schema.CaptionJob) -> bool:
    """Whether `model.drafter` is a head on the target and not a model."""
    return isinstance(config.method.drafting.drafter, (EagleDrafter, MedusaDrafter))


def check_head(config: schema.CaptionJob, ref: CheckpointRef, target: Any, front_end: FrontEnd) -> str:
    """Compare a head's sizes with the target's configuration; returns the head's revision.

    Raises:
        ConfigError: the head is missing or unreadable, was made for another target, or is too short for the tree.
    """
    text = target.get_text_config()
    try:
        if isinstance(config.method.drafting.drafter, EagleDrafter):
            eagle = read_eagle_shape(ref)
            _check_width(ref.path, eagle.llama.hidden_size, text.hidden_size)
            _check_tokens(ref.path, eagle.llama.vocab_size, front_end)
            return fingerprint(head_folder(ref, EAGLE_NAMES, weights=False), ref)
        medusa = read_medusa_shape(ref)
        if medusa is not None:
            _check_width(ref.path, medusa.hidden_size, text.hidden_size)
            _check_tokens(ref.path, medusa.vocab_size, front_end)
            _check_levels(config, medusa.num_heads)
        return fingerprint(head_folder(ref, MEDUSA_NAMES, weights=False), ref)
    except CheckpointError as error:
        raise ConfigError(f"model.drafter: {error}") from None


def load_head(config: schema.CaptionJob, ref: CheckpointRef, target: Target) -> Head:
    """Load the head beside its target; a checkpoint from the hub is compared with it only here.

    Raises:
        ConfigError: as `check_head`.
    """
    assert config.model.drafter is not None
    dtype, device = config.model.drafter.dtype, config.model.drafter.device
    place = target.device if device == "auto" else torch.device(device)
    if place != target.device:
        raise ConfigError(f"model.drafter.device: a head runs where its target does, on {target.device}, not {place}")
    try:
        if isinstance(config.method.drafting.drafter, EagleDrafter):
            eagle = load_eagle(ref, dtype, place)
            _check_width(ref.path, eagle.llama.hidden_size, target.hidden_size)
            return eagle
        medusa = load_medusa(ref, dtype, place)
    except CheckpointError as error:
        raise ConfigError(f"model.drafter: {error}") from None
    _check_width(ref.path, medusa.shape.hidden_size, target.hidden_size)
    _check_tokens(ref.path, medusa.shape.vocab_size, target.front_end)
    _check_levels(config, medusa.shape.num_heads)
    return medusa


def _check_width(where: str, own: int, needed: int) -> None:
    if own != needed:
        raise ConfigError(
            f"model.drafter: {where} reads states of width {own}, and the target's are {needed} wide; "
            "take a head that was trained for this target"
        )


def _check_tokens(where: str, own: int, front_end: FrontEnd) -> None:
    """A head may lack the target's special tokens (image placeholders, padding), which are never drafted from text."""
    tokenizer = front_end.tokenizer
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    missing = sorted(number for number in tokenizer.get_vocab().values() if number >= own and number not in special)
    if missing:
        raise ConfigError(
            f"model.drafter: {where} knows {own} tokens, and {len(missing)} of the target's words lie beyond, e.g. id "
            f"{missing[0]}; take a head that was trained for this target"
        )


def _check_levels(config: schema.CaptionJob, num_heads: int) -> None:
    levels = num_medusa_levels(config.method)
    if levels > num_heads:
        raise ConfigError(
            f"method.tree: it drafts {levels} levels deep, and model.drafter has {num_heads} Medusa heads, one per "
            "level; take a shallower tree"
        )
