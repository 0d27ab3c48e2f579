"""Checks and loads the MTP layer of a target's own checkpoint, for the drafter `mtp`."""

from __future__ import annotations

import logging

from actors.loading.drafters import read_at
from configs.schema import CaptionJobConfig
from models.heads.mtp import MtpNetwork, load_mtp
from models.heads.mtp_files import MtpMissing, check_mtp, read_mtp
from models.loading.checkpoints import CheckpointRef
from models.target import Target

logger = logging.getLogger(__name__)


def check_native(config: CaptionJobConfig, num_layers: int) -> bool | None:
    """Return whether the checkpoint of the target, which has `num_layers` layers, has an MTP layer, by its keys.

    Returns None if no method needs one, or its keys are not known before a download. Raises ConfigError, which names
    the missing keys, if a method needs one, unless it is a candidate of `method.auto`, which is left out.
    """
    if not config.method.needs_mtp:
        return None

    def find(ref: CheckpointRef) -> bool | None:
        try:
            return None if check_mtp(ref, num_layers) is None else True
        except MtpMissing:
            if config.method.auto is None:
                raise
            return False

    return read_at("model.target", config.model.target, find)


def load_native(config: CaptionJobConfig, target: Target) -> MtpNetwork | None:
    """Load the MTP layer of the target's checkpoint, onto its device and in its type; None if no method needs it, or
    as `check_native` if it has none. Raises ConfigError for damaged layers."""
    if not config.method.needs_mtp:
        return None

    def load(ref: CheckpointRef) -> MtpNetwork | None:
        num_layers: int = target.decoder.config.num_hidden_layers  # type: ignore[union-attr, assignment]
        try:
            tensors = read_mtp(ref, num_layers)
        except MtpMissing:
            if config.method.auto is None:
                raise
            logger.warning("%s has no MTP layer: method.auto tries the other candidates", ref.path)
            return None
        return load_mtp(target.decoder, tensors, ref.path)

    return read_at("model.target", config.model.target, load)
