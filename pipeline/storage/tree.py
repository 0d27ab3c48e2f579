"""Writes files below a root under names that come from data: atomically, and never outside of the root.

Local folders are opened one after the other, and files are named relative to the open folder, so that replacing a
folder by a link concurrently has no effect. A file appears under its name when it is complete: locally a synced
temporary file in the same folder is linked or renamed, other stores receive one put. A killed process may leave a
temporary file, whose name begins with `TEMPORARY`; listings leave out hidden names.
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
from files.local import OutsideRoots, is_below
from pipeline.storage import access, objects
from pipeline.storage.retries import retried

TEMPORARY = ".draftfleet-"
_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def refuse_name(relative: str) -> None:
    """Raise OutsideRoots for a path that is empty, absolute, or has a part such as `..`."""
    if "\0" in relative or any(part in ("", ".", "..") for part in relative.split("/")):
        raise OutsideRoots(errno.EACCES, "it is no plain path below the root")


@dataclass(frozen=True)
class Tree:
    """A root folder by its URL, and the dotted path of its field; every worker opens it itself.

    Methods raise OutsideRoots for a path that leaves the root, also by a symlink.
    """

    url: str
    dotted: str

    @cached_property
    def _opened(self) -> tuple[Any, str]:
        filesystem, path = access.open_url(self.url, self.dotted)
        return filesystem, os.path.abspath(path) if access.is_local(filesystem) else path.rstrip("/")

    def __reduce__(self) -> tuple[type[Tree], tuple[str, str]]:
        return type(self), (self.url, self.dotted)

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
                with _temporary(folder) as (file, temporary):
                    file.write(data)
                    _sync(file)
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
            with _temporary(folder) as (file, temporary):
                yield file
                _sync(file)
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

    @contextlib.contextmanager
    def _folder(self, relative: str, make: bool = False) -> Iterator[tuple[int, str]]:
        """Open the folder of a local file step by step; provide its descriptor and the file's name."""
        root = self._opened[1]
        if make:
            os.makedirs(root, exist_ok=True)
        real = os.path.realpath(root)
        *parts, name = relative.split("/")
        folder = os.open(root, _OPEN_FOLDER)
        try:
            for depth, part in enumerate(parts):
                if make:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(part, dir_fd=folder)
                inner = os.open(part, _OPEN_FOLDER, dir_fd=folder)
                os.close(folder)
                folder = inner
                if not is_below(_real_path(folder, os.path.join(root, *parts[: depth + 1])), (real,)):
                    raise OutsideRoots(errno.EACCES, "a link in its path leaves the root")
            yield folder, name
        finally:
            os.close(folder)


def _real_path(folder: int, path: str) -> str:
    link = f"/proc/self/fd/{folder}"
    return os.readlink(link) if os.path.exists("/proc/self/fd") else os.path.realpath(path)


@contextlib.contextmanager
def _temporary(folder: int) -> Iterator[tuple[BinaryIO, str]]:
    """Provide a new file in an open folder and its name, which is removed at the end if it still exists."""
    name = f"{TEMPORARY}{os.getpid()}-{secrets.token_hex(4)}.part"
    descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666, dir_fd=folder)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file, name
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


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
