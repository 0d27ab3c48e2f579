"""Open local files that users and checkpoints name: regular files only, so that no read blocks or is endless."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from functools import lru_cache
from io import BufferedReader


class OutsideRoots(PermissionError):
    """A resolved path is outside all folders that a job may read."""


@lru_cache(maxsize=1)
def _kernel_devices() -> frozenset[int]:
    """Return the device numbers of `/proc` and `/sys`, whose files must not be read as data."""
    return frozenset(os.stat(folder).st_dev for folder in ("/proc", "/sys") if os.path.isdir(folder))


def is_below(path: str, roots: Sequence[str]) -> bool:
    """Return whether a resolved path is equal to or below one of the resolved `roots`."""
    return any(path == root or path.startswith(root.rstrip("/") + "/") for root in roots)


def open_regular(path: str | os.PathLike[str], roots: Sequence[str] | None = None) -> BufferedReader:
    """Open a regular local file for reading; with `roots`, only below one of these resolved folders (else
    OutsideRoots). The check uses the open file descriptor, so replacing a symlink concurrently has no effect. A FIFO, a
    socket, a device or a file of `/proc` or `/sys` is an OSError and does not block."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if roots is not None:
            link = f"/proc/self/fd/{descriptor}"
            real = os.readlink(link) if os.path.exists("/proc/self/fd") else os.path.realpath(path)
            if not is_below(real, roots):
                raise OutsideRoots(errno.EACCES, "it leaves the source root; source.local_roots allows other folders")
        expect_regular(os.fstat(descriptor))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def expect_regular(status: os.stat_result) -> None:
    """Raise OSError unless the status is that of a regular file outside of `/proc` and `/sys`."""
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(status.st_mode) or status.st_dev in _kernel_devices():
        raise OSError(errno.EINVAL, "it is no regular file")


def read_regular(path: str | os.PathLike[str], max_bytes: int) -> bytes:
    """Read a whole regular file; OSError as `open_regular`, or if it has more than `max_bytes`."""
    with open_regular(path) as file:
        # A read allocates what it is asked for.
        data = file.read(min(max_bytes, os.fstat(file.fileno()).st_size) + 1)
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"it has more than {max_bytes:,} bytes")
    return data
