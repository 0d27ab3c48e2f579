"""Check and read the settings of a checkpoint folder: regular files of bounded size, strict JSON, no refused key."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from files.local import expect_regular, read_regular
from files.strict_json import JsonError, expect_values, parse_object
from models.loading.config_keys import FORBIDDEN_FILES, RULES, KeyRefused, treat
from models.loading.config_sizes import SizeRefused, check_processor_sizes
from models.loading.names import is_plain_name
from models.loading.weight_headers import MAX_TENSORS

MAX_FILES = 10_000
MAX_SETTINGS_BYTES = 16 * 1024**2
MAX_TABLE_BYTES = 128 * 1024**2
MAX_TABLE_VALUES = 8_000_000
TEMPLATES = "additional_chat_templates"
TABLES = ("tokenizer.json", "vocab.json", "tekken.json", "merges.txt")
"""Files with one entry per token, which have other bounds than settings. So have `TABLE_SUFFIXES` and indices."""
TABLE_SUFFIXES = (".model", ".tiktoken", ".index.json")
SETTINGS_SUFFIXES = (".json", ".jinja", ".model", ".txt", ".tiktoken")
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
PARSED = ("generation_config.json", "added_tokens.json", "chat_template.json", *{n for r in RULES for n in r.files})
"""Settings that transformers parses."""


class SettingsRefused(ValueError):
    """Raised for unusable files of a checkpoint; the message is a part of a sentence, such as "its x.json …"."""


def check_folder(folder: Path, allow_remote_code: bool = False) -> dict[str, dict[str, Any]]:
    """Check all files of a checkpoint; returns the content of each settings file by its path, without dropped keys.

    Raises: SettingsRefused for files that are not regular, too large, not strict JSON, or set a refused key.
    """
    settings_by_path: dict[str, dict[str, Any]] = {}
    try:
        for file in checked_files(folder):
            if reason := FORBIDDEN_FILES.get(file.name):
                raise SettingsRefused(f"it holds {file.name}: {reason}")
            if file.name in PARSED:
                settings = read_settings(file)
                treat(settings, file.name, allow_remote_code)
                check_processor_sizes(settings, file.name)
                settings_by_path[file.relative_to(folder).as_posix()] = settings
            elif file.name in TABLES and file.suffix == ".json":
                _expect_table(file)
    except (KeyRefused, SizeRefused) as error:
        raise SettingsRefused(str(error)) from None
    return settings_by_path


def read_settings(file: Path, max_bytes: int = MAX_SETTINGS_BYTES) -> dict[str, Any]:
    """Read a JSON object within bounds; raises SettingsRefused with the file's name."""
    try:
        return parse_object(read_regular(file, max_bytes))
    except OSError as error:
        raise SettingsRefused(f"its {file.name} cannot be read: {error.strerror or error}") from None
    except JsonError as error:
        raise SettingsRefused(f"its {file.name} cannot be read: {error}") from None


def weight_files(index: Path) -> set[str]:
    """Return the file names in a shard index; raises SettingsRefused unless they are plain, so that none leaves the
    folder."""
    try:
        weight_map = parse_object(read_regular(index, MAX_TABLE_BYTES), 2 * MAX_TENSORS)["weight_map"]
        names = set(weight_map.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise SettingsRefused(f"{index.name} is damaged: it maps no tensors to files") from None
    if wrong := [name for name in names if not is_plain_name(name)]:
        raise SettingsRefused(f"{index.name} names {str(wrong[0])[:100]!r}, which is no plain file name")
    return names


def checked_files(folder: Path) -> Iterator[Path]:
    """Yield the settings and weights of a checkpoint, also those of additional templates and tokenizers in folders of
    their own; SettingsRefused if one is not a regular file, or too large for settings."""
    count = 0
    folders = [folder]
    for directory in folders:
        for file in directory.iterdir():
            count += 1
            if count > MAX_FILES:
                raise SettingsRefused(f"it holds more than {MAX_FILES:,} files")
            if file.name.endswith((*SETTINGS_SUFFIXES, *WEIGHT_SUFFIXES)):
                _expect_file(file)
                yield file
            elif directory is folder and (file.name == TEMPLATES or "tokenizer" in file.name) and file.is_dir():
                folders.append(file)


def _expect_file(file: Path) -> None:
    try:
        status = file.stat()
        expect_regular(status)
    except OSError as error:
        raise SettingsRefused(f"its {file.name} cannot be read: {error.strerror or error}") from None
    is_table = file.name in TABLES or file.name.endswith(TABLE_SUFFIXES)
    limit = MAX_TABLE_BYTES if is_table else MAX_SETTINGS_BYTES
    if file.name.endswith(SETTINGS_SUFFIXES) and status.st_size > limit:
        raise SettingsRefused(f"its {file.name} has {status.st_size:,} bytes, and at most {limit:,} are read")


def _expect_table(file: Path) -> None:
    """Raise SettingsRefused if a JSON table of tokens may have more than `MAX_TABLE_VALUES` values."""
    try:
        expect_values(read_regular(file, MAX_TABLE_BYTES), MAX_TABLE_VALUES)
    except (OSError, JsonError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise SettingsRefused(f"its {file.name} cannot be read: {reason}") from None
