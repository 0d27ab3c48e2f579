"""Keep the target's states of training samples on disk, so that the target runs once per sample and not once per epoch.

A sample is one safetensors file, named by its key, with the key and a checksum in its header. Files are written to a
temporary name and renamed, so a file is complete or absent. The size of the folder is bounded; samples that do not fit
are not stored.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from models.heads.training.teacher import RowStates

FORMAT = 1
SUFFIX, TEMPORARY = ".safetensors", ".tmp"
MAX_DISK_SHARE = 0.5
"""Largest share of the free disk space that new files may take."""


def key_of_sample(*parts: str) -> str:
    """Return the key of a sample: a hash of all that its states depend on, and of the file format."""
    digest = hashlib.blake2b(digest_size=16)
    for part in (str(FORMAT), *parts):
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


class TeacherCache:
    """States of samples in `folder`, at most `max_bytes` on disk, and at most half of the disk's free space more.

    Of the space that is left at the start, this process may use one `share`-th. Samples are stored in the order of
    `put` until one does not fit; `num_refused` counts those that do not fit, `num_damaged` unreadable files, which are
    removed. Raises OSError if the folder cannot be created or listed.
    """

    def __init__(self, folder: Path, max_bytes: int, share: int = 1) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        used = sum(file.stat().st_size for file in folder.glob(f"*/*{SUFFIX}"))
        free = shutil.disk_usage(folder).free
        self.max_bytes = min(max_bytes, used + int(MAX_DISK_SHARE * free))
        self._left = max(0, self.max_bytes - used) // share
        self.num_refused = self.num_damaged = 0

    def discard_partial(self) -> None:
        """Remove files of writers that were killed; call it only if no other process writes."""
        for file in self.folder.glob(f"*/*{TEMPORARY}"):
            file.unlink(missing_ok=True)

    @property
    def num_bytes(self) -> int:
        """Bytes of all files in the folder."""
        return sum(file.stat().st_size for file in self.folder.glob("*/*"))

    def has(self, key: str) -> bool:
        return self._file(key).exists()

    def get(self, key: str) -> RowStates | None:
        """Return the states of a sample, on the CPU; None if they are not stored or their file is damaged."""
        file = self._file(key)
        try:
            with safe_open(file, framework="pt") as opened:
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
                if opened.metadata() == _metadata(key, tensors):
                    return RowStates(**{"features": None, **tensors})
        except FileNotFoundError:
            return None
        except (SafetensorError, OSError, TypeError, ValueError):
            pass
        self.num_damaged += 1
        file.unlink(missing_ok=True)
        return None

    def put(self, key: str, states: RowStates) -> bool:
        """Store the states of a sample, in place of a file that has this key; return whether they fit. A full disk
        stops further writing."""
        tensors = {name: value.detach().cpu().contiguous() for name, value in states.tensors().items()}
        data = save(tensors, metadata=_metadata(key, tensors))
        file = self._file(key)
        if file.exists():
            self._left += file.stat().st_size
            file.unlink()
        if len(data) > self._left:
            self.num_refused += 1
            return False
        partial = file.with_suffix(TEMPORARY)
        try:
            file.parent.mkdir(exist_ok=True)
            partial.write_bytes(data)
            os.replace(partial, file)
        except OSError:
            partial.unlink(missing_ok=True)
            self._left = 0
            self.num_refused += 1
            return False
        self._left -= len(data)
        return True

    def _file(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}{SUFFIX}"


def _metadata(key: str, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        value = tensors[name]
        digest.update(f"{name} {value.dtype} {tuple(value.shape)};".encode())
        digest.update(value.contiguous().view(torch.uint8).numpy().tobytes() if value.numel() else b"")
    return {"key": key, "digest": digest.hexdigest()}
