"""Checks that an output directory can be used, before a job starts: it is a folder, can be written, and holds no files
of others."""

from __future__ import annotations

import os

from configs.load import ConfigError
from pipeline.storage.output_dir import DATA, ERRORS, JOB, OutputDir

HIDDEN = (".", "__MACOSX", "Thumbs.db", "desktop.ini", "lost+found")
"""Beginnings of names that file systems and file managers create."""
MAX_SHOWN = 3


def refuse_unusable(output: OutputDir, dotted: str = "sink.path") -> None:
    """Raise ConfigError, which names the field `dotted`, if a local output is a file, is below one, or may not be
    written. Writes nothing."""
    if not output.is_local:
        return
    path = output.path("").rstrip("/") or "/"
    here = path
    while not os.path.lexists(here) and os.path.dirname(here) != here:
        here = os.path.dirname(here)
    if not os.path.isdir(here):
        what = "is a file" if here == path else f"is below the file {here}"
        raise ConfigError(f"{dotted}: {output.shown()} {what}, and an output is a folder; choose another path")
    if not os.access(here, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{dotted}: {output.shown()} cannot be written: {here} is not writable for this user; change its "
            "permissions, or choose another path"
        )


def refuse_foreign_files(output: OutputDir) -> None:
    """Raise ConfigError if an output in which no job has started holds files besides its own folders; names some."""
    path = output.path("")
    try:
        listed = output.filesystem.ls(path, detail=False)
    except (FileNotFoundError, NotADirectoryError):
        return
    names = sorted(str(entry).rstrip("/").rpartition("/")[2] for entry in listed)
    foreign = [name for name in names if name not in (DATA, ERRORS, JOB) and not name.startswith(HIDDEN)]
    if output.filesystem.isfile(path) or not foreign:
        return
    more = "" if len(foreign) <= MAX_SHOWN else f" and {len(foreign) - MAX_SHOWN:,} more"
    raise ConfigError(
        f"sink.path: {output.shown()} is not empty: it holds {', '.join(foreign[:MAX_SHOWN])}{more}, which no job "
        "wrote; choose another path"
    )
