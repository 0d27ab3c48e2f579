"""The output directory: `data/`, `errors/` and `_job/` on any fsspec URL, written whole or not at all.

Knows where things lie and how a file is put there; knows nothing of what is in them.
"""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from configs.load import ConfigError
from pipeline import storage
from pipeline.patience import retried

DATA, ERRORS, JOB = "data", "errors", "_job"
_PROBE = "_job/.probe"


@dataclass(frozen=True)
class OutputDir:
    """An output directory by its URL; cheap to send to a worker, which opens it for itself."""

    url: str

    def __post_init__(self) -> None:
        if "://" not in self.url:  # a worker's current folder may be another
            object.__setattr__(self, "url", os.path.abspath(os.path.expanduser(self.url)))

    @cached_property
    def _opened(self) -> tuple[Any, str]:
        filesystem, path = storage.open_url(self.url, "sink.path")
        return filesystem, path.rstrip("/") or path

    def __getstate__(self) -> dict[str, str]:
        return {"url": self.url}

    def __setstate__(self, state: dict[str, str]) -> None:
        object.__setattr__(self, "url", state["url"])

    @property
    def filesystem(self) -> Any:
        """The fsspec file system."""
        return self._opened[0]

    def path(self, relative: str) -> str:
        """The file system's own path of something inside."""
        return storage.join(self._opened[1], relative)

    def shown(self, relative: str = "") -> str:
        """The URL for messages and summaries, without credentials."""
        return storage.shown(storage.join(self.url, relative) if relative else self.url)

    # --- before anything starts ---

    def refuse_if_used(self) -> None:
        """Refuse an output that holds anything in `data/`, `errors/` or `_job/`.

        Raises:
            ConfigError: names the first thing found.
        """
        for folder in (DATA, ERRORS, JOB):
            for found in self.list_files(folder):
                raise ConfigError(
                    f"sink.path: {self.shown()} is not empty: it holds {folder}/{found}; choose another path, "
                    "or remove what is there"
                )

    def check_writable(self) -> None:
        """Write a small file, read it back, remove it.

        Raises:
            ConfigError: the output cannot be written; says why.
        """
        try:
            self.write_bytes(_PROBE, b"probe")
            whole = retried(lambda: self.filesystem.cat_file(self.path(_PROBE))) == b"probe"
            retried(lambda: self.filesystem.rm_file(self.path(_PROBE)))
        except ConfigError:
            raise
        except Exception as error:  # drivers raise what they like, from PermissionError to HTTP errors
            raise ConfigError(f"sink.path: {self.shown()} cannot be written: {storage.reason_of(error)}") from None
        if not whole:
            raise ConfigError(f"sink.path: {self.shown()} gives back other bytes than were written to it")

    def take_attempt(self, record: dict[str, Any], number: int = 1) -> int:
        """Take one attempt by a put that fails where it exists, so that of two jobs only one goes on; gives its number.

        Raises:
            ConfigError: another job has taken it.
        """
        relative = f"{JOB}/attempts/{number:06d}.json"
        record = {"attempt": number, "taken_by": secrets.token_hex(8), **record}
        data = json.dumps(record, indent=2, sort_keys=True).encode()
        try:
            if storage.is_local(self.filesystem):
                self._make_parent(relative)
                descriptor = os.open(self.path(relative), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
                with os.fdopen(descriptor, "wb") as file:
                    file.write(data)
                    os.fsync(file.fileno())
            else:
                self._create(relative, data)
        except FileExistsError:
            raise ConfigError(
                f"sink.path: another job has taken attempt {number} of {self.shown()}; choose another path"
            ) from None
        except Exception as error:  # drivers raise what they like, from PermissionError to HTTP errors
            raise ConfigError(f"sink.path: {self.shown()} cannot be written: {storage.reason_of(error)}") from None
        return number

    def _create(self, relative: str, data: bytes) -> None:
        """Put bytes where nothing is yet.

        A put that fails may have gone through, and stores call an object that exists by many names: what lies there
        decides whose it is.

        Raises:
            FileExistsError: something else lies there.
        """
        path = self.path(relative)
        failure: Exception | None = None
        try:
            retried(lambda: self.filesystem.pipe_file(path, data, mode="create"))
        except Exception as error:
            failure = error
        try:
            there = retried(lambda: self.filesystem.cat_file(path))
        except FileNotFoundError:
            raise failure or OSError(f"{self.shown(relative)} was written and is not there") from None
        if there != data:
            raise FileExistsError(path)

    # --- files ---

    def list_files(self, folder: str) -> list[str]:
        """Names below a folder, sorted, relative to it; empty where there is no such folder."""
        root = self.path(folder)

        def find() -> list[str]:
            self.filesystem.invalidate_cache()
            return list(self.filesystem.find(root))

        found = find() if storage.is_local(self.filesystem) else retried(find)
        return sorted(str(path)[len(root.rstrip("/")) + 1 :] for path in found)

    def make_folders(self) -> None:
        """Make `data/`, `errors/` and `_job/`; object stores have no folders and need none."""
        for folder in (DATA, ERRORS, JOB):
            self.filesystem.makedirs(self.path(folder), exist_ok=True)

    def write_json(self, relative: str, value: Any) -> None:
        """Write plain data as JSON, whole or not at all."""
        self.write_bytes(relative, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())

    def write_bytes(self, relative: str, data: Any) -> None:
        """Put bytes (anything with the buffer protocol) at a path in one step, replacing what is there.

        Locally a temporary file under `_job/tmp/` is synced and renamed; elsewhere it is one put, checked by its size.

        Raises:
            OSError: nothing has been published, or another size than was sent.
        """
        if not storage.is_local(self.filesystem):
            content = bytes(data)
            retried(lambda: self.filesystem.pipe_file(self.path(relative), content))
            size = retried(lambda: self.filesystem.info(self.path(relative), refresh=True))["size"]
            if size != len(content):
                raise OSError(f"{self.shown(relative)}: {len(content)} bytes were sent and {size} are there")
            return
        self._make_parent(relative)
        folder = self.path(f"{JOB}/tmp")
        os.makedirs(folder, exist_ok=True)
        temporary = f"{folder}/{os.path.basename(relative)}.{os.getpid()}-{secrets.token_hex(4)}"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.path(relative))
        except BaseException:
            os.unlink(temporary)
            raise
        parent = os.open(os.path.dirname(self.path(relative)), os.O_RDONLY)
        try:
            os.fsync(parent)
        finally:
            os.close(parent)

    def _make_parent(self, relative: str) -> None:
        os.makedirs(os.path.dirname(self.path(relative)), exist_ok=True)
