"""Puts whole objects into stores other than local file systems; every put is checked by size."""

from __future__ import annotations

from typing import Any, Protocol

from fsspec import AbstractFileSystem

from pipeline.storage import access
from pipeline.storage.retries import retried

_CONDITIONAL_ADVICE = (
    "choose a local or shared folder, or a store that honours conditional writes (S3 with If-None-Match, GCS)"
)


def create(filesystem: Any, path: str, content: bytes) -> None:
    """Create an object with a conditional put; FileExistsError if there is one with other bytes.

    A failed put may have succeeded on the server, and stores use different errors for existing objects, so after an
    error the stored content is compared: creating an object twice with the same bytes succeeds.
    """
    try:
        retried(lambda: filesystem.pipe_file(path, content, mode="create"))
    except Exception as error:
        failure = error
    else:
        check_size(filesystem, path, len(content))
        return
    # Outside the block above, so that the failure of the put is not taken for the cause of an error of the read.
    try:
        stored = bytes(retried(lambda: filesystem.cat_file(path)))
    except FileNotFoundError:
        raise failure from None
    if stored != content:
        raise FileExistsError(path)


def put(filesystem: Any, path: str, content: bytes) -> None:
    """Put an object, replacing an existing one; OSError if the store has another number of bytes afterwards."""
    retried(lambda: filesystem.pipe_file(path, content))
    check_size(filesystem, path, len(content))


def check_size(filesystem: Any, path: str, num_bytes: int) -> None:
    """Raise OSError unless the stored object has `num_bytes`."""
    size = retried(lambda: filesystem.info(path, refresh=True))["size"]
    if size != num_bytes:
        location = access.shown(str(filesystem.unstrip_protocol(path)))
        raise OSError(f"{location}: {num_bytes} bytes were sent and {size} are stored")


class Folder(Protocol):
    """The operations of `pipeline.storage.output_dir.OutputDir` that `problem_of_store` tries."""

    @property
    def filesystem(self) -> Any: ...

    @property
    def is_local(self) -> bool: ...

    def create_bytes(self, relative: str, data: Any) -> None: ...

    def read_bytes(self, relative: str) -> bytes: ...

    def remove(self, relative: str) -> None: ...


CANNOT_WRITE = "cannot be written"
"""Beginning of the problem of a store that refuses a file."""


def problem_of_store(output: Folder, probe: str) -> str:
    """Write, create again, read and remove the file `probe`; return why the store cannot be used, empty if it can."""
    # fsspec's default implementation of an exclusive create looks first and then writes.
    is_default = getattr(output.filesystem.pipe_file, "__func__", None) is AbstractFileSystem.pipe_file
    if is_default and not output.is_local:
        return (
            f"has no conditional put: the driver {type(output.filesystem).__name__} cannot create a file only where "
            f"none exists; {_CONDITIONAL_ADVICE}"
        )
    try:
        output.create_bytes(probe, b"probe")
        try:
            try:
                output.create_bytes(probe, b"second")
                creates_once = False
            except FileExistsError:
                creates_once = True
            is_intact = output.read_bytes(probe) == b"probe"
        finally:
            output.remove(probe)
    except Exception as error:  # drivers raise errors of no common class
        return f"{CANNOT_WRITE}: {access.reason_of(error)}"
    if not creates_once:
        return (
            "has no conditional put: a file could be created twice with other content, so two attempts could both "
            f"publish the same rows; {_CONDITIONAL_ADVICE}"
        )
    return "" if is_intact else "returns other bytes than were written"
