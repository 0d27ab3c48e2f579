"""The output directory: `data/`, `errors/` and `_job/` on any fsspec URL; files are written atomically."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from configs.load import ConfigError
from files.local import open_regular
from pipeline.storage import access, objects
from pipeline.storage.damage import NO_FILE_ERRNOS, DamagedFile, parse_json, problem_of_record
from pipeline.storage.digests import DIGESTS, OTHER_BYTES, Digest, digest_name, parse_digests
from pipeline.storage.folders import FolderId, open_folder, sync, temporary_file
from pipeline.storage.listing import of_info
from pipeline.storage.objects import CANNOT_WRITE, problem_of_store
from pipeline.storage.retries import retried
from pipeline.storage.shard import WHOLE, Shard

DATA, ERRORS, JOB = "data", "errors", "_job"
ATTEMPTS, ASIDE, TEMPORARY = "_job/attempts", "_job/aside", "_job/tmp"
_MAY_WRITE = "; choose another path, or give this user permission to write there"
_PROBE = "_job/.probe"
CONTENT = "_job/content.json"
"""The settings that determine the content of an output with shards."""
_SHARED = ("manifest", "counts", "turns", "tmp", "content.json")
"""Entries of `_job/` that all shards of a job use."""
_LITTER = (".probe-", "tmp/", "digests/")
"""Prefixes below `_job/` of files left by a process that was killed before it took its attempt; they are ignored."""
MAX_RECORD_BYTES = 16 * 1024**2
"""Maximum bytes of a JSON file in `_job/`; the record of an attempt has the configuration, with schemas of up to 1
MiB."""


@dataclass(frozen=True)
class OutputDir:
    """An output directory by its URL; every worker opens the directory itself. Local files are written in the folder
    `known`, if it is given, and never through a link that leads out of it.

    With a `shard` it is the view of this shard: relative paths are those of an output without shards, and are mapped to
    `data/shard-NNNN-*`, `errors/shard-NNNN-*` and `_job/shards/NNNN/`, except for what all shards use.
    """

    url: str
    shard: Shard = WHOLE
    known: FolderId | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if "://" not in self.url:  # a worker may have another working directory
            object.__setattr__(self, "url", os.path.abspath(os.path.expanduser(self.url)))

    @cached_property
    def _opened(self) -> tuple[Any, str]:
        filesystem, path = access.open_url(self.url, "sink.path")
        return filesystem, path.rstrip("/") or path

    def __reduce__(self) -> tuple[type[OutputDir], tuple[str, Shard, FolderId | None]]:
        return type(self), (self.url, self.shard, self.known)

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
        recorded = rest.removeprefix("digests/")  # the digest of a shared file is shared
        if self.shard == WHOLE or (folder == JOB and recorded.partition("/")[0].partition("-")[0] in _SHARED):
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
        all_shards = replace(self, shard=WHOLE)
        names = all_shards.list_files(JOB)
        return any(name.startswith(("attempts/", "shards/")) or f"{JOB}/{name}" == CONTENT for name in names)

    def refuse_if_used(self) -> None:
        """Raise ConfigError if `data/`, `errors/` or `_job/` contain a file; names the first file found."""
        for folder in (DATA, ERRORS, JOB):
            for name in self.list_files(folder):
                if folder == JOB and name.startswith(_LITTER):
                    continue
                raise ConfigError(
                    f"sink.path: {self.shown()} is not empty: it holds {folder}/{name}; choose another path, "
                    "or remove its files"
                )

    def check_writable(self) -> None:
        """Check by a small probe file that files can be written and that the store supports puts that fail if an object
        exists; otherwise two drivers could publish the same rows. ConfigError with the reason if not."""
        if reason := problem_of_store(self, f"{_PROBE}-{secrets.token_hex(8)}"):
            raise self._refusal(f"{reason}{_MAY_WRITE if reason.startswith(CANNOT_WRITE) else ''}")

    def _refusal(self, reason: str) -> ConfigError:
        return ConfigError(f"sink.path: {self.shown()} {reason}")

    def take_attempt(self, record: dict[str, Any], number: int = 1) -> int:
        """Take an attempt number, and return it, by creating its record with a conditional put; ConfigError if another
        job has taken it, or the output cannot be written."""
        record = {"attempt": number, "taken_by": secrets.token_hex(8), **record}
        try:
            self.create_recorded(_record_name(number), as_json(record))
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

    def read_attempt(self, number: int, recorded: Mapping[str, frozenset[Digest]] | None = None) -> dict[str, Any]:
        """Read an attempt's record; DamagedFile if it is not what an attempt writes, or its digest is not among the
        `recorded` ones of it (`digests`)."""
        relative = _record_name(number)
        advice = (
            "remove it and start the job again, which generates the rows of that attempt again, or choose another path"
        )
        record = self.read_json(relative, advice)
        problem = problem_of_record(record, relative)
        if not problem and (digests := (recorded or {}).get(relative.removeprefix(f"{JOB}/"))):
            is_changed = Digest.of(self.read_bytes(relative, MAX_RECORD_BYTES)) not in digests
            problem = OTHER_BYTES if is_changed else ""
        if problem:
            raise DamagedFile(self.shown(relative), relative, problem, advice)
        return dict(record)

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
        return sorted(name.removeprefix(prefix) for name in names if name and name.startswith(prefix))

    def list_versions(self, folder: str) -> dict[str, str]:
        """Return the version of every file below `data` or `errors`, by its path relative to the folder. Two versions
        of a file are equal only if its content is; the version is empty if the store reports neither etag nor time."""
        root = self.path(folder)

        def find() -> dict[str, Any]:
            self.filesystem.invalidate_cache()
            return dict(self.filesystem.find(root, detail=True))

        versions = {}
        for path, info in (find() if self.is_local else retried(find)).items():
            name = str(path)[len(root.rstrip("/")) + 1 :]
            if name.startswith(self.prefix):
                listed = of_info(name, info)
                inode = info.get("ino", "")  # the clock of modification times is coarse
                version = f"{listed.size_bytes} {listed.token} {inode}" if listed.token else ""
                versions[name.removeprefix(self.prefix)] = version
        return versions

    def make_folders(self) -> None:
        """Create the folders `data/`, `errors/` and `_job/`, which object stores do not need; OutsideRoots for a link
        that leaves the output."""
        for folder in (DATA, ERRORS, JOB):
            if self.is_local:
                with self._local(f"{folder}/-", make=True):
                    pass
            else:
                self.filesystem.makedirs(self.path(folder), exist_ok=True)

    def refuse_links(self) -> None:
        """Raise ConfigError if a local output was replaced, or one of its folders by a link that leaves it."""
        for folder in (DATA, ERRORS, JOB) if self.is_local else ():
            try:
                with self._local(f"{folder}/-"):
                    pass
            except FileNotFoundError:
                continue
            except OSError as error:
                raise ConfigError(
                    f"sink.path: {self.shown(folder)} is no folder of the output ({access.reason_of(error)}); an "
                    "output is one folder: move the files back, or choose another sink.path"
                ) from None

    def pinned(self) -> OutputDir:
        """Return this output for writing into the folder that it is now."""
        return replace(self, known=FolderId.of(self._opened[1])) if self.is_local else self

    def read_bytes(self, relative: str, max_bytes: int | None = None) -> bytes:
        """Read a file; OSError for one of more than `max_bytes`, and for a local one that is no regular file."""
        path = self.path(relative)
        if max_bytes is not None:
            data = access.read_bounded(self.filesystem, path, max_bytes)
            if data is None:
                raise OSError(errno.EFBIG, f"it has more than {max_bytes:,} bytes")
            return data
        if self.is_local:
            with open_regular(path) as file:
                return file.read()
        return bytes(retried(lambda: self.filesystem.cat_file(path)))

    def read_json(self, relative: str, advice: str = "") -> Any:
        """Read a JSON file; DamagedFile, with `advice`, if it is none, FileNotFoundError if it is missing."""
        try:
            return parse_json(self.read_bytes(relative, MAX_RECORD_BYTES))
        except ValueError as error:
            raise DamagedFile(self.shown(relative), relative, str(error), advice) from None
        except OSError as error:
            if error.errno not in NO_FILE_ERRNOS:
                raise
            raise DamagedFile(self.shown(relative), relative, access.reason_of(error), advice) from None

    def record(self, relative: str, data: Any) -> None:
        """Record the digest of a file, before it is written. The record is not synced: without it, the file is as one
        of an older version."""
        name = digest_name(relative, Digest.of(data))
        if not self.is_local:
            retried(lambda: self.filesystem.pipe_file(self.path(name), b"-"))
            return
        with self._local(name, make=True) as (folder, basename):
            os.close(os.open(basename, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666, dir_fd=folder))

    def digests(self, folder: str = "") -> dict[str, frozenset[Digest]]:
        """Return the recorded versions of files below a folder, by path without `_job/` (`parse_digests`). Files that
        were listed before have their records in it."""
        folder = folder.removeprefix(f"{JOB}/")
        start = f"{folder}/" if folder else ""
        return parse_digests(start + name for name in self.list_files(f"{DIGESTS}/{folder}".rstrip("/")))

    def create_recorded(self, relative: str, data: Any) -> None:
        """Call `create_bytes` after `record`."""
        self.record(relative, data)
        self.create_bytes(relative, data)

    def write_recorded(self, relative: str, data: Any) -> None:
        """Call `write_bytes` after `record`."""
        self.record(relative, data)
        self.write_bytes(relative, data)

    def remove(self, relative: str) -> None:
        """Remove a file, if it exists; a folder of its name is set aside."""
        try:
            if not self.is_local:
                retried(lambda: self.filesystem.rm_file(self.path(relative)))
                return
            with self._local(relative) as (folder, name):
                os.unlink(name, dir_fd=folder)
        except FileNotFoundError:
            return
        except IsADirectoryError:
            self.set_aside(relative)

    def set_aside(self, relative: str, stand_in: Any = None) -> None:
        """Move a file, if it exists, below `_job/aside/`, which readers of results ignore. With `stand_in`, the file is
        copied there and its content is then atomically replaced by these bytes."""
        target = f"{ASIDE}/{relative}.{secrets.token_hex(4)}"
        try:
            if not self.is_local:
                retried(lambda: self.filesystem.cp_file(self.path(relative), self.path(target)))
            else:
                with self._local(relative) as (folder, name), self._local(target, make=True) as (aside, new):
                    if stand_in is None:
                        os.rename(name, new, src_dir_fd=folder, dst_dir_fd=aside)
                    else:
                        os.link(name, new, src_dir_fd=folder, dst_dir_fd=aside, follow_symlinks=False)
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
            with contextlib.suppress(OSError):  # it is longer, a folder, or no regular file
                if self.read_bytes(relative, memoryview(data).nbytes) == bytes(data):
                    return
            raise FileExistsError(self.path(relative)) from None

    def write_bytes(self, relative: str, data: Any) -> None:
        """Write bytes (any object with the buffer protocol) to a path atomically, replacing existing content. Locally,
        a synced file under `_job/tmp/` is renamed; in other stores, one put is checked by size, OSError if it
        differs."""
        if self.is_local:
            try:
                self._put_local(relative, data, os.replace)
            except IsADirectoryError:
                self.set_aside(relative)
                self._put_local(relative, data, os.replace)
            return
        objects.put(self.filesystem, self.path(relative), bytes(data))

    def _put_local(self, relative: str, data: Any, publish: Callable[..., None]) -> None:
        """Write and sync a temporary file, then call `publish(temporary, name)` between open folders and sync them."""
        with (
            self._local(relative, make=True) as (folder, name),
            self._local(f"{TEMPORARY}/-", make=True) as (temporaries, _),
        ):
            with temporary_file(temporaries, f"{name}.") as (file, temporary):
                file.write(data)
                sync(file)
                publish(temporary, name, src_dir_fd=temporaries, dst_dir_fd=folder)
            os.fsync(folder)

    def _local(self, relative: str, make: bool = False) -> contextlib.AbstractContextManager[tuple[int, str]]:
        return open_folder(self._opened[1], self._placed(relative), make, self.known)


def _record_name(number: int) -> str:
    return f"{ATTEMPTS}/{number:06d}.json"


def as_json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
