"""The output directory: `data/`, `errors/` and `_job/` on any fsspec URL; files are written atomically."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from fsspec import AbstractFileSystem

from configs.load import ConfigError
from pipeline.storage import access, objects
from pipeline.storage.listing import of_info
from pipeline.storage.retries import retried
from pipeline.storage.shard import WHOLE, Shard

DATA, ERRORS, JOB = "data", "errors", "_job"
ATTEMPTS, ASIDE, TEMPORARY = "_job/attempts", "_job/aside", "_job/tmp"
_PROBE = "_job/.probe"
CONTENT = "_job/content.json"
"""The settings that determine the content of an output with shards."""
_SHARED = ("manifest", "counts", "turns", "tmp", "content.json")
"""Entries of `_job/` that all shards of a job use."""
_LITTER = (".probe-", "tmp/")
"""Prefixes below `_job/` of files left by a process that was killed before it took its attempt; they are ignored."""
_CONDITIONAL_ADVICE = (
    "choose a local or shared folder, or a store that honours conditional writes (S3 with If-None-Match, GCS)"
)


@dataclass(frozen=True)
class OutputDir:
    """An output directory by its URL; only the URL is pickled, and every worker opens the directory itself.

    With a `shard` it is the view of this shard: relative paths are those of an output without shards, and are mapped to
    `data/shard-NNNN-*`, `errors/shard-NNNN-*` and `_job/shards/NNNN/`, except for what all shards use.
    """

    url: str
    shard: Shard = WHOLE

    def __post_init__(self) -> None:
        if "://" not in self.url:  # a worker may have another working directory
            object.__setattr__(self, "url", os.path.abspath(os.path.expanduser(self.url)))

    @cached_property
    def _opened(self) -> tuple[Any, str]:
        filesystem, path = access.open_url(self.url, "sink.path")
        return filesystem, path.rstrip("/") or path

    def __reduce__(self) -> tuple[type[OutputDir], tuple[str, Shard]]:
        return type(self), (self.url, self.shard)

    @property
    def filesystem(self) -> Any:
        return self._opened[0]

    @property
    def is_local(self) -> bool:
        return access.is_local(self.filesystem)

    def path(self, relative: str) -> str:
        """Return the path, in the file system, of a file in the output directory."""
        return access.join(self._opened[1], self._placed(relative))

    def _placed(self, relative: str) -> str:
        """Map a relative path of this shard to the path in the directory."""
        folder, _, rest = relative.partition("/")
        if self.shard == WHOLE or (folder == JOB and rest.partition("/")[0] in _SHARED):
            return relative
        if folder == JOB:
            return access.join(f"{JOB}/shards/{self.shard.number:04d}", rest)
        return f"{folder}/{self.prefix}{rest}" if rest else folder

    @property
    def prefix(self) -> str:
        """Prefix of the names of this shard's files in `data/` and `errors/`; empty without shards."""
        return "" if self.shard == WHOLE else f"shard-{self.shard.number:04d}-"

    def shown(self, relative: str = "") -> str:
        """Format the URL for messages and summaries, without credentials."""
        return access.shown(access.join(self.url, self._placed(relative)) if relative else self.url)

    def is_begun(self) -> bool:
        """Return whether a job, or a shard of a job, has started here."""
        whole = replace(self, shard=WHOLE)
        found = whole.list_files(JOB)
        return any(name.startswith(("attempts/", "shards/")) or f"{JOB}/{name}" == CONTENT for name in found)

    def refuse_if_used(self) -> None:
        """Raise ConfigError if `data/`, `errors/` or `_job/` contain a file; names the first file found."""
        for folder in (DATA, ERRORS, JOB):
            for found in self.list_files(folder):
                if folder == JOB and found.startswith(_LITTER):
                    continue
                raise ConfigError(
                    f"sink.path: {self.shown()} is not empty: it holds {folder}/{found}; choose another path, "
                    "or remove its files"
                )

    def check_writable(self) -> None:
        """Check by a small probe file that files can be written and that the store supports puts that fail if an object
        exists; otherwise two drivers could publish the same rows. ConfigError with the reason if not."""
        probe = f"{_PROBE}-{secrets.token_hex(8)}"
        # fsspec's default implementation of an exclusive create looks first and then writes.
        is_default = getattr(self.filesystem.pipe_file, "__func__", None) is AbstractFileSystem.pipe_file
        if is_default and not self.is_local:
            raise self._refusal(
                f"has no conditional put: the driver {type(self.filesystem).__name__} cannot create a file only where "
                f"none exists; {_CONDITIONAL_ADVICE}"
            )
        try:
            self.create_bytes(probe, b"probe")
            try:
                try:
                    self.create_bytes(probe, b"second")
                    creates_once = False
                except FileExistsError:
                    creates_once = True
                is_intact = self.read_bytes(probe) == b"probe"
            finally:
                self.remove(probe)
        except Exception as error:  # drivers raise errors of no common class
            raise self._refusal(f"cannot be written: {access.reason_of(error)}") from None
        if not creates_once:
            raise self._refusal(
                "has no conditional put: a file could be created twice with other content, so two attempts could both "
                f"publish the same rows; {_CONDITIONAL_ADVICE}"
            )
        if not is_intact:
            raise self._refusal("returns other bytes than were written")

    def _refusal(self, reason: str) -> ConfigError:
        return ConfigError(f"sink.path: {self.shown()} {reason}")

    def take_attempt(self, record: dict[str, Any], number: int = 1) -> int:
        """Take an attempt number, and return it, by creating its record with a conditional put; ConfigError if another
        job has taken it, or the output cannot be written."""
        record = {"attempt": number, "taken_by": secrets.token_hex(8), **record}
        try:
            self.create_bytes(_record_name(number), as_json(record))
        except FileExistsError:
            raise ConfigError(
                f"sink.path: another job has taken attempt {number} of {self.shown()}; let it finish, or choose "
                "another path"
            ) from None
        except Exception as error:  # drivers raise errors of no common class
            raise self._refusal(f"cannot be written: {access.reason_of(error)}") from None
        return number

    def list_attempts(self) -> list[int]:
        names = [name.removesuffix(".json") for name in self.list_files(ATTEMPTS)]
        return sorted(int(name) for name in names if name.isdecimal())

    def read_attempt(self, number: int) -> dict[str, Any]:
        """Read an attempt's record; ConfigError if it is not a JSON object."""
        try:
            record = json.loads(self.read_bytes(_record_name(number)))
        except ValueError:
            record = None
        if not isinstance(record, dict):
            raise ConfigError(
                f"sink.path: {self.shown(_record_name(number))} is damaged; remove it and start the job again, which "
                "generates the rows of that attempt again, or choose another path"
            )
        return record

    def list_files(self, folder: str) -> list[str]:
        """Return the sorted paths of all files below a folder, relative to it; empty if there is no such folder.

        Of `data/` and `errors/`, a shard lists its own files.
        """
        root = self.path(folder)
        prefix = self.prefix if folder in (DATA, ERRORS) else ""

        def find() -> list[str]:
            self.filesystem.invalidate_cache()
            return list(self.filesystem.find(root))

        names = (str(path)[len(root.rstrip("/")) + 1 :] for path in (find() if self.is_local else retried(find)))
        return sorted(name.removeprefix(prefix) for name in names if name.startswith(prefix))

    def list_versions(self, folder: str) -> dict[str, str]:
        """Return the version of every file below `data` or `errors`, by its path relative to the folder. Two versions
        of a file are equal only if its content is; the version is empty if the store reports neither etag nor time."""
        root = self.path(folder)

        def find() -> dict[str, Any]:
            self.filesystem.invalidate_cache()
            return dict(self.filesystem.find(root, detail=True))

        found = {}
        for path, info in (find() if self.is_local else retried(find)).items():
            name = str(path)[len(root.rstrip("/")) + 1 :]
            if name.startswith(self.prefix):
                listed = of_info(name, info)
                inode = info.get("ino", "")  # the clock of modification times is coarse
                version = f"{listed.size_bytes} {listed.token} {inode}" if listed.token else ""
                found[name.removeprefix(self.prefix)] = version
        return found

    def make_folders(self) -> None:
        """Create the folders `data/`, `errors/` and `_job/`, which object stores do not need."""
        for folder in (DATA, ERRORS, JOB):
            self.filesystem.makedirs(self.path(folder), exist_ok=True)

    def read_bytes(self, relative: str) -> bytes:
        return bytes(retried(lambda: self.filesystem.cat_file(self.path(relative))))

    def remove(self, relative: str) -> None:
        """Remove a file, if it exists."""
        with contextlib.suppress(FileNotFoundError):
            retried(lambda: self.filesystem.rm_file(self.path(relative)))

    def set_aside(self, relative: str, stand_in: Any = None) -> None:
        """Move a file, if it exists, below `_job/aside/`, which readers of results ignore. With `stand_in`, the file is
        copied there and its content is then atomically replaced by these bytes."""
        target = f"{ASIDE}/{relative}.{secrets.token_hex(4)}"
        try:
            if not self.is_local:
                retried(lambda: self.filesystem.cp_file(self.path(relative), self.path(target)))
            else:
                self._make_parent(target)
                (os.rename if stand_in is None else os.link)(self.path(relative), self.path(target))
        except FileNotFoundError:
            return
        if stand_in is not None:
            self.write_bytes(relative, stand_in)
        elif not self.is_local:
            self.remove(relative)

    def write_json(self, relative: str, value: Any) -> None:
        self.write_bytes(relative, as_json(value))

    def create_bytes(self, relative: str, data: Any) -> None:
        """Create a file atomically: of two concurrent calls with different content, only one succeeds (else
        FileExistsError). Creating a file twice with the same bytes succeeds.
        """
        if not self.is_local:
            objects.create(self.filesystem, self.path(relative), bytes(data))
            return
        try:
            self._put_local(relative, data, os.link)
        except FileExistsError:
            if self.read_bytes(relative) != bytes(data):
                raise FileExistsError(self.path(relative)) from None

    def write_bytes(self, relative: str, data: Any) -> None:
        """Write bytes (any object with the buffer protocol) to a path atomically, replacing existing content. Locally,
        a synced file under `_job/tmp/` is renamed; in other stores, one put is checked by size, OSError if it
        differs."""
        if self.is_local:
            self._put_local(relative, data, os.replace)
            return
        objects.put(self.filesystem, self.path(relative), bytes(data))

    def _put_local(self, relative: str, data: Any, publish: Callable[[str, str], None]) -> None:
        """Write and sync a temporary file, then call `publish(temporary, path)` and sync the folder."""
        self._make_parent(relative)
        folder = self.path(TEMPORARY)
        os.makedirs(folder, exist_ok=True)
        temporary = f"{folder}/{os.path.basename(relative)}.{os.getpid()}-{secrets.token_hex(4)}"
        try:
            with open(temporary, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            publish(temporary, self.path(relative))
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
        parent = os.open(os.path.dirname(self.path(relative)), os.O_RDONLY)
        try:
            os.fsync(parent)
        finally:
            os.close(parent)

    def _make_parent(self, relative: str) -> None:
        os.makedirs(os.path.dirname(self.path(relative)), exist_ok=True)


def _record_name(number: int) -> str:
    return f"{ATTEMPTS}/{number:06d}.json"


def as_json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
