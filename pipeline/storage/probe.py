"""Checks that an output directory can be written, and that its store creates a file only if there is none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsspec import AbstractFileSystem

from pipeline.storage import access

if TYPE_CHECKING:
    from pipeline.storage.output_dir import OutputDir

_CONDITIONAL_ADVICE = (
    "choose a local or shared folder, or a store that honours conditional writes (S3 with If-None-Match, GCS)"
)


def problem_of_store(output: OutputDir, probe: str) -> str:
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
        return f"cannot be written: {access.reason_of(error)}"
    if not creates_once:
        return (
            "has no conditional put: a file could be created twice with other content, so two attempts could both "
            f"publish the same rows; {_CONDITIONAL_ADVICE}"
        )
    return "" if is_intact else "returns other bytes than were written"
