"""Opens local folders below a root one after the other, and recognises a root that was replaced by another folder.

Files are named relative to an open folder, so that replacing a folder by a link concurrently has no effect.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, NamedTuple, Self

from files.local import OutsideRoots, is_below

_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def snapshot_blobs(folders: Iterable[str]) -> Iterator[str]:
    """Yield the folder `blobs` of Hugging Face's cache, for folders that are or are inside one of its snapshots; a
    snapshot (`<repository>/snapshots/<revision>`) has links to the files there."""
    for folder in folders:
        above, found, inside = os.path.realpath(folder).rpartition("/snapshots/")
        blobs = f"{above}/blobs"
        if found and inside and os.path.isdir(blobs) and not os.path.islink(blobs):
            yield blobs


class FolderId(NamedTuple):
    """The identity of a folder: its resolved path, its inode, and the device of the inode on one host."""

    path: str
    inode: int
    device: int
    host: str

    @classmethod
    def of(cls, folder: str) -> Self | None:
        """Return the identity of a local folder; None if there is none."""
        try:
            descriptor = os.open(folder, _OPEN_FOLDER)
        except OSError:
            return None
        try:
            return cls.of_open(descriptor, folder)
        finally:
            os.close(descriptor)

    @classmethod
    def of_open(cls, descriptor: int, folder: str) -> Self:
        """Return the identity of an open folder, which was opened by the path `folder`."""
        status = os.fstat(descriptor)
        return cls(_real_path(descriptor, folder), status.st_ino, status.st_dev, os.uname().nodename)

    @classmethod
    def parse(cls, value: Any) -> Self | None:
        """Return the identity that `to_json` has made; None for any other value."""
        if not isinstance(value, dict) or value.keys() != set(cls._fields):
            return None
        is_valid = isinstance(value["path"], str) and isinstance(value["host"], str)
        is_valid &= type(value["inode"]) is int and type(value["device"]) is int
        return cls(**value) if is_valid else None

    def to_json(self) -> dict[str, Any]:
        return self._asdict()

    def is_same(self, other: FolderId) -> bool:
        """Return whether both are one folder: at one resolved path (inodes of network file systems change when they are
        mounted again), or moved within a file system."""
        is_one_inode = self.inode == other.inode and (self.device == other.device or self.host != other.host)
        return self.path == other.path or is_one_inode


@contextlib.contextmanager
def open_folder(
    root: str, relative: str, make: bool = False, identity: FolderId | None = None
) -> Iterator[tuple[int, str]]:
    """Open the folder of the file `relative` below `root` step by step; provide its descriptor and the file's name.

    With `make`, missing folders are created.

    Raises:
        OutsideRoots: a link leads out of the root, or the root is not the folder with this `identity`.
    """
    *parts, name = relative.split("/")
    if make and not os.path.isdir(root):
        os.makedirs(root, exist_ok=True)
    folder = os.open(root, _OPEN_FOLDER)
    try:
        real = _real_path(folder, root)
        if identity is not None and not identity.is_same(FolderId.of_open(folder, root)):
            raise OutsideRoots(errno.EACCES, f"{root} was replaced: it is {real}, and was {identity.path}")
        for depth, part in enumerate(parts):
            inner, is_link = _open_inner(folder, part, make)
            os.close(folder)
            folder = inner
            path = os.path.join(root, *parts[: depth + 1])
            if is_link and not is_below(_real_path(folder, path), (real,)):
                raise OutsideRoots(errno.EACCES, "a link in its path leaves the root")
        yield folder, name
    finally:
        os.close(folder)


def _open_inner(folder: int, name: str, make: bool) -> tuple[int, bool]:
    """Open a folder in an open folder; return its descriptor and whether its name is a link."""
    try:
        return os.open(name, _OPEN_FOLDER | os.O_NOFOLLOW, dir_fd=folder), False
    except FileNotFoundError:
        if not make:
            raise
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, dir_fd=folder)
        return _open_inner(folder, name, make=False)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR):
            raise
        return os.open(name, _OPEN_FOLDER, dir_fd=folder), True


def _real_path(folder: int, path: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{folder}")
    except FileNotFoundError:  # no such file system
        return os.path.realpath(path)


@contextlib.contextmanager
def temporary_file(folder: int, stem: str) -> Iterator[tuple[BinaryIO, str]]:
    """Provide a new file in an open folder and its name, which is removed at the end if it still exists."""
    name = f"{stem}{os.getpid()}-{secrets.token_hex(4)}.part"
    descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666, dir_fd=folder)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file, name
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)


def sync(file: BinaryIO) -> None:
    """Write a file's content to its device."""
    file.flush()
    os.fsync(file.fileno())
