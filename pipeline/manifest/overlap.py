"""Refuses an output inside the source, or a source inside the output: a job must not read its own output.

Compares resolved locations: local paths, also of `file://` URLs, with symlinks and `..` resolved; object stores by
bucket and key. Opens no file and writes nothing.
"""

from __future__ import annotations

import os
import re
from typing import Any

from fsspec.core import has_magic
from fsspec.utils import glob_translate

from configs.load import ConfigError
from configs.source import JobOutputConfig, SourceConfig
from pipeline.storage import access
from pipeline.storage.listing import is_file, is_folder, split_glob

Parts = tuple[str, ...]


def refuse_overlap(source: SourceConfig | JobOutputConfig, sink: str, dotted: str = "sink.path") -> None:
    """Check all paths of a source against the output path `sink`; `dotted` is the dotted path of its field.

    Raises:
        ConfigError: one is inside the other, or they are the same; names both.
    """
    sink_filesystem, sink_path = access.open_url(sink, dotted)
    output = _parts(sink_filesystem, sink_path)
    for path in source.paths:
        filesystem, source_path = access.open_url(path, "source.path")
        if not _same_store(filesystem, sink_filesystem):
            continue
        pair = f"{access.shown(sink)} and source.path {access.shown(path)}"
        names, pattern = _resolved(filesystem, source_path)
        if not pattern and output == names:
            raise ConfigError(f"{dotted}: {pair} are the same folder; choose a folder outside the source")
        if _reaches(names, pattern, output):
            raise ConfigError(
                f"{dotted}: the output is inside the source ({pair}), and its files would be read as samples; choose "
                "a folder outside the source, and move there what an earlier attempt has written"
            )
        if names[: len(output)] == output:
            raise ConfigError(
                f"{dotted}: the source is inside the output ({pair}); choose a folder that does not hold the source"
            )


def refuse_shared(output: str, target: str, dotted: str) -> None:
    """Raise ConfigError if one of a job's output and the folder of an export, in the field `dotted`, is inside the
    other."""
    filesystem, path = access.open_url(output, "sink.path")
    target_filesystem, target_path = access.open_url(target, dotted)
    names, inside = _parts(filesystem, path), _parts(target_filesystem, target_path)
    shared = min(len(names), len(inside))
    if _same_store(filesystem, target_filesystem) and names[:shared] == inside[:shared]:
        raise ConfigError(
            f"{dotted}: one of {access.shown(target)} and the output {access.shown(output)} is inside the other; "
            "choose a folder outside the output"
        )


def _same_store(first: Any, second: Any) -> bool:
    if access.is_local(first) or access.is_local(second):
        return access.is_local(first) and access.is_local(second)
    return type(first) is type(second) and first.storage_options == second.storage_options


def _parts(filesystem: Any, path: str) -> Parts:
    """Split a path into names; symlinks of local paths are resolved."""
    path = os.path.realpath(path) if access.is_local(filesystem) else path
    return tuple(name for name in path.split("/") if name)


def _resolved(filesystem: Any, path: str) -> tuple[Parts, Parts]:
    """Split a source path into its resolved fixed part and its glob components (empty if it is no glob)."""
    if not has_magic(path) or is_file(filesystem, path) or is_folder(filesystem, path):
        return _parts(filesystem, path), ()
    fixed, pattern = split_glob(path)
    return _parts(filesystem, fixed or "/"), tuple(pattern)


def _reaches(names: Parts, pattern: Parts, output: Parts) -> bool:
    """Return whether the source is a folder above the output, or a glob that can match files in the output."""
    if output[: len(names)] != names or (len(output) == len(names) and not pattern):
        return False
    if not pattern:
        return True
    for depth, name in enumerate(output[len(names) :]):
        if depth >= len(pattern) - 1:
            return depth < len(pattern) and "**" in pattern[depth]
        if "**" in pattern[depth]:
            return True
        if not re.fullmatch(glob_translate(pattern[depth]), name):
            return False
    return True
