"""Bring checkpoints of the hub to this machine, and keep loaders of local files off the network."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from huggingface_hub import constants, snapshot_download

from models.loading.settings import weight_files

SETTINGS = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
"""Files of a repository that its loaders read besides weights."""
CODE = ("*.py",)
DEEP = ("*/*/*",)
"""Files of nested folders, which no loader reads, unless code does."""


def fetch(repository: str, revision: str | None, names: Sequence[str], left_out: Sequence[str] = ()) -> Path:
    """Download files of a repository whose names match patterns, unless they are cached; returns their folder, whose
    name is the commit. Raises any error of the hub, the network and the disk."""
    folder: str = snapshot_download(
        repository,
        revision=revision,
        allow_patterns=[*names],
        ignore_patterns=[*left_out] or None,
        local_files_only=constants.HF_HUB_OFFLINE,
    )
    return Path(folder)


def fetch_settings(repository: str, revision: str | None, with_code: bool) -> Path:
    """Download the settings of a repository, with `with_code` also its Python files; see `fetch`."""
    if with_code:
        return fetch(repository, revision, (*SETTINGS, *CODE))
    return fetch(repository, revision, SETTINGS, DEEP)


def fetch_weights(repository: str, revision: str | None, pickled: bool) -> Path:
    """Download the weights of a repository: safetensors, or with `pickled` torch's own format if there are none."""
    folder = fetch(repository, revision, ("model.safetensors", "model.safetensors.index.json"))
    index = folder / "model.safetensors.index.json"
    if index.is_file() and not (folder / "model.safetensors").is_file():
        return fetch(repository, folder.name, sorted(weight_files(index)))
    if pickled and not (folder / "model.safetensors").is_file():
        return fetch(repository, folder.name, ("pytorch_model*.bin*",))
    return folder


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """Restrict the hub client to its local cache within the context, like HF_HUB_OFFLINE for a whole process."""
    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
