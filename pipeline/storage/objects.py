"""Puts whole objects into stores other than local file systems; every put is checked by size."""

from __future__ import annotations

from typing import Any

from pipeline.storage import access
from pipeline.storage.retries import retried


def create(filesystem: Any, path: str, content: bytes) -> None:
    """Create an object with a conditional put; FileExistsError if there is one with other bytes.

    A failed put may have succeeded on the server, and stores use different errors for existing objects, so after an
    error the stored content is compared: creating an object twice with the same bytes succeeds.
    """
    try:
        retried(lambda: filesystem.pipe_file(path, content, mode="create"))
    except Exception as error:
        try:
            stored = bytes(retried(lambda: filesystem.cat_file(path)))
        except FileNotFoundError:
            raise error from None
        if stored != content:
            raise FileExistsError(path) from None
        return
    check_size(filesystem, path, len(content))


def put(filesystem: Any, path: str, content: bytes) -> None:
    """Put an object, replacing an existing one; OSError if the store has another number of bytes afterwards."""
    retried(lambda: filesystem.pipe_file(path, content))
    check_size(filesystem, path, len(content))


def check_size(filesystem: Any, path: str, num_bytes: int) -> None:
    """Raise OSError unless the stored object has `num_bytes`."""
    size = retried(lambda: filesystem.info(path, refresh=True))["size"]
    if size != num_bytes:
        shown = access.shown(str(filesystem.unstrip_protocol(path)))
        raise OSError(f"{shown}: {num_bytes} bytes were sent and {size} are stored")
