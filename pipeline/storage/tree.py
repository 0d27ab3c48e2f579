"""Writes files below a root under names that come from data: atomically, and never outside of the root.

A file appears under its name when it is complete: locally a synced temporary file in the same folder is linked or
renamed, other stores receive one put. A killed process may leave a temporary file, whose name begins with `TEMPORARY`;
listings leave out hidden names.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, BinaryIO

from fsspec import AbstractFileSystem

from configs.load import ConfigError
from files.local import OutsideRoots
from pipeline.storage import access, objects
from pipeline.storage.folders import FolderId, open_folder, sync, temporary_file
from pipeline.storage.retries import retried

TEMPORARY = ".draftfleet-"
_OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def refuse_name(relative: str) -> None:
    """Raise OutsideRoots for a path that is empty, absolute, or has a part such as `..`."""
    if "\0" in relative or any(part in ("", ".", "..") for part in relative.split("/")):
        raise OutsideRoots(errno.EACCES, "it is no plain path below the root")


@dataclass(frozen=True)
class Tree:
    """A root folder by its URL, and the dotted path of its field; every worker opens it itself.

    Methods raise OutsideRoots for a path that leaves the root, also by a symlink, and for a local root that is no
    longer the folder of its first use, in this process or in the process that sent it.
    """

    url: str
    dotted: str
    known: FolderId | None = None

    @cached_property
    def _opened(self) -> tuple[Any, str]:
        filesystem, path = access.open_url(self.url, self.dotted)
        return filesystem, os.path.abspath(path) if access.is_local(filesystem) else path.rstrip("/")

    @cached_property
    def identity(self) -> FolderId | None:
        """The identity of a local root that exists; None for others."""
        return self.known or (FolderId.of(self._opened[1]) if self.is_local else None)

    def __reduce__(self) -> tuple[type[Tree], tuple[str, str, FolderId | None]]:
        return type(self), (self.url, self.dotted, self.identity)

    @property
    def filesystem(self) -> Any:
        return self._opened[0]

    @property
    def is_local(self) -> bool:
        return access.is_local(self.filesystem)

    def path(self, relative: str) -> str:
        refuse_name(relative)
        return access.join(self._opened[1], relative)

    def shown(self, relative: str = "") -> str:
        return access.shown(access.join(self.url, relative) if relative else self.url)

    def check_writable(self, creates: bool = False) -> None:
        """Write and remove a small file; ConfigError if that fails, or the store `creates` files without a condition.

        The root is created if it is missing.
        """
        probe = f"{TEMPORARY}probe-{secrets.token_hex(8)}"
        try:
            is_once = self.create(probe, b"probe")
            if creates and not self.is_local:
                is_default = getattr(self.filesystem.pipe_file, "__func__", None) is AbstractFileSystem.pipe_file
                is_once = is_once and not is_default and not self.create(probe, b"second")
            self.remove(probe)
        except Exception as error:  # drivers raise errors of no common class
            raise ConfigError(f"{self.dotted}: {self.shown()} cannot be written: {access.reason_of(error)}") from None
        if not is_once:
            raise ConfigError(
                f"{self.dotted}: {self.shown()} has no conditional put, so a file of yours could be overwritten that "
                "appears while files are created; choose a local folder, or a store that honours conditional writes"
            )

    def list_files(self) -> list[str]:
        """Return the sorted relative paths of all files below the root; hidden files are left out."""
        root = self._opened[1]

        def find() -> list[str]:
            self.filesystem.invalidate_cache()
            return list(self.filesystem.find(root))

        names = (str(path)[len(root.rstrip("/")) + 1 :] for path in (find() if self.is_local else retried(find)))
        return sorted(name for name in names if name and not name.rpartition("/")[2].startswith("."))

    def create(self, relative: str, data: bytes) -> bool:
        """Create a file; return False, and change nothing, if there is one with other bytes."""
        path = self.path(relative)
        if not self.is_local:
            try:
                objects.create(self.filesystem, path, data)
            except FileExistsError:
                return False
            return True
        with self._folder(relative, make=True) as (folder, name):
            try:
                with temporary_file(folder, TEMPORARY) as (file, temporary):
                    file.write(data)
                    sync(file)
                    os.link(temporary, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
            except FileExistsError:
                return _read(folder, name, len(data)) == data
            os.fsync(folder)
        return True

    def replace(self, relative: str, data: bytes) -> None:
        """Write a file, replacing an existing one; a symlink is replaced and not followed."""
        if not self.is_local:
            objects.put(self.filesystem, self.path(relative), data)
            return
        with self.writing(relative) as file:
            file.write(data)

    @contextlib.contextmanager
    def writing(self, relative: str) -> Iterator[BinaryIO]:
        """Provide a binary file whose content replaces the file `relative` when the context ends without an error."""
        path = self.path(relative)
        if not self.is_local:
            with tempfile.NamedTemporaryFile(prefix="draftfleet-") as copy:
                yield copy  # type: ignore[misc]
                copy.flush()
                retried(lambda: self.filesystem.put_file(copy.name, path))
                objects.check_size(self.filesystem, path, os.fstat(copy.fileno()).st_size)
            return
        with self._folder(relative, make=True) as (folder, name):
            with temporary_file(folder, TEMPORARY) as (file, temporary):
                yield file
                sync(file)
                os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
            os.fsync(folder)

    def read(self, relative: str, max_bytes: int) -> bytes | None:
        """Read a file; None if it does not exist. OSError for one of more than `max_bytes`, or no regular file."""
        path = self.path(relative)
        try:
            if not self.is_local:
                data = access.read_bounded(self.filesystem, path, max_bytes)
            else:
                with self._folder(relative) as (folder, name):
                    data = _read(folder, name, max_bytes)
        except FileNotFoundError:
            return None
        if data is None:
            raise OSError(errno.EFBIG, f"it has more than {max_bytes} bytes, or is no regular file")
        return data

    def remove(self, relative: str) -> None:
        """Remove a file, if it exists."""
        path = self.path(relative)
        with contextlib.suppress(FileNotFoundError):
            if not self.is_local:
                retried(lambda: self.filesystem.rm_file(path))
                return
            with self._folder(relative) as (folder, name):
                os.unlink(name, dir_fd=folder)
                os.fsync(folder)

    def _folder(self, relative: str, make: bool = False) -> contextlib.AbstractContextManager[tuple[int, str]]:
        """Call `open_folder` for a local file, whose folder is of the root that this process opened first."""
        root = self._opened[1]
        if make and self.identity is None:
            os.makedirs(root, exist_ok=True)
            vars(self).pop("identity")
        return open_folder(root, relative, make, self.identity)


def _read(folder: int, name: str, max_bytes: int) -> bytes | None:
    """Read a regular file in an open folder; None for any other file, or one of more than `max_bytes`."""
    try:
        descriptor = os.open(name, _OPEN_FILE, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a symlink, a socket
            return None
        raise
    if not os.path.isfile(descriptor):
        os.close(descriptor)
        return None
    with os.fdopen(descriptor, "rb") as file:
        data = file.read(max_bytes + 1)
    return data if len(data) <= max_bytes else None
