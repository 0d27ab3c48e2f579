"""Reads a checkpoint's generation settings, which transformers' `generate` follows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME
from transformers.utils import logging as transformers_logging

from models.loading.checkpoints import CheckpointError, CheckpointRef, first_line

OWN_FIELDS = frozenset(name for name in GenerationConfig().to_dict() if not name.startswith("_"))
"""Settings that this transformers knows; `generate` ignores others."""


def read_generation_settings(ref: CheckpointRef) -> dict[str, Any]:
    """Return the settings of `OWN_FIELDS` that `model.generation_config` has after `from_pretrained`: those of
    generation_config.json, or without this file, those of older checkpoints in config.json.

    Raises:
        CheckpointError: the file cannot be read, or transformers refuses its settings.
    """
    has_file = ref.is_folder and (Path(ref.path) / GENERATION_CONFIG_NAME).exists()
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # it warns of settings that a greedy `generate` does not use
    try:
        try:
            found = GenerationConfig.from_pretrained(ref.path, revision=ref.revision)
        except OSError:
            if has_file:
                raise
            found = GenerationConfig.from_pretrained(
                ref.path, config_file_name="config.json", _from_model_config=True, revision=ref.revision
            )
        settings = found.to_dict()
    except Exception as error:  # wrong types raise unrelated errors
        raise CheckpointError(f"{ref.path}: its generation settings cannot be read: {first_line(error)}") from error
    finally:
        transformers_logging.set_verbosity(verbosity)
    del settings["transformers_version"]
    return {name: value for name, value in settings.items() if name in OWN_FIELDS and value is not None}
