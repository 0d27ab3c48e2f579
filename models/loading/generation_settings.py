"""Reads a checkpoint's generation settings, which transformers' `generate` follows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME, cached_file
from transformers.utils import logging as transformers_logging

from models.loading.checkpoints import CheckpointError, CheckpointRef, first_line

OWN_FIELDS = frozenset(name for name in GenerationConfig().to_dict() if not name.startswith("_"))
"""Settings that all classes of this transformers know; `generate` ignores others, except those of MODEL_FIELDS."""
MODEL_FIELDS = frozenset(["no_repeat_ngram_window_size"])
"""Settings that `generate` of single architectures follows."""
CUSTOM_GENERATE = "custom_generate"
"""Name under which code is listed that replaces `generate`, which transformers loads with remote code only."""
MAX_SETTINGS_BYTES = 1 << 24


def read_generation_settings(ref: CheckpointRef) -> dict[str, Any]:
    """Return the settings that `model.generation_config` has after `from_pretrained`: those of generation_config.json,
    or without this file, those of older checkpoints in config.json.

    Raises:
        CheckpointError: the file cannot be read, or transformers refuses its settings.
    """
    file = Path(ref.path) / GENERATION_CONFIG_NAME
    has_file = ref.is_folder and file.exists()
    if has_file and not (file.is_file() and file.stat().st_size <= MAX_SETTINGS_BYTES):
        raise CheckpointError(f"{file}: it is no file of at most {MAX_SETTINGS_BYTES >> 20} MiB")
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # it warns of settings that a greedy `generate` does not use
    try:
        settings = _load(ref, has_file).to_dict()
    except Exception as error:  # wrong types raise unrelated errors
        raise CheckpointError(f"{ref.path}: its generation settings cannot be read: {first_line(error)}") from error
    finally:
        transformers_logging.set_verbosity(verbosity)
    del settings["transformers_version"]
    known = {name: value for name, value in settings.items() if name in OWN_FIELDS | MODEL_FIELDS and value is not None}
    return known | ({CUSTOM_GENERATE: True} if ref.allow_remote_code and _has_own_generate(ref) else {})


def _load(ref: CheckpointRef, has_file: bool) -> GenerationConfig:
    try:
        return GenerationConfig.from_pretrained(ref.path, revision=ref.revision)
    except OSError:  # also of a file that is no JSON
        if has_file:
            raise
        return GenerationConfig.from_pretrained(
            ref.path, config_file_name="config.json", _from_model_config=True, revision=ref.revision
        )


def _has_own_generate(ref: CheckpointRef) -> bool:
    try:
        return cached_file(ref.path, f"{CUSTOM_GENERATE}/generate.py", revision=ref.revision) is not None
    except OSError:
        return False
