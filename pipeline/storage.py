"""The doors to files: any fsspec URL opened, listed and read with bounds.

Knows fsspec and nothing of what the files hold. Messages made here never show credentials that stand in a URL.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from configs.load import ConfigError

_TOKEN_KEYS = ("ETag", "etag", "md5Hash", "crc32c", "generation", "LastModified", "last_modified", "mtime", "created")
_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.\-]*)://")


@dataclass(frozen=True)
class Listed:
    """One file of a listing: `path` relative to the root, and a `token` that changes when the content does."""

    path: str
    size_bytes: int
    token: str


def open_url(url: str, dotted_path: str) -> tuple[Any, str]:
    """The file system of a URL and the path in it.

    Raises:
        ConfigError: no driver for the scheme is installed, or the URL is malformed; names `dotted_path`.
    """
    try:
        filesystem, path = url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{dotted_path}: {shown(url)} cannot be opened: {error}") from None
    return filesystem, str(path)


def is_local(filesystem: Any) -> bool:
    """Whether paths of this file system are paths of this machine."""
    return isinstance(filesystem, LocalFileSystem)


def unstripped(filesystem: Any, path: str) -> str:
    """The URL by which another process can open the same path."""
    return path if is_local(filesystem) else str(filesystem.unstrip_protocol(path))


def shown(url: str) -> str:
    """A URL or path for messages: user, password and query cut off, at most 200 characters."""
    match = _SCHEME.match(url)
    if match:
        url = url.split("?", 1)[0]
        scheme, rest = url[: match.end()], url[match.end() :]
        authority, slash, path = rest.partition("/")
        url = scheme + authority.rpartition("@")[2] + slash + path
    return url if len(url) <= 200 else url[:197] + "..."


def uri_scheme(uri: str) -> str:
    """The scheme before `://` in lower case, or the empty string."""
    match = _SCHEME.match(uri)
    return match.group(1).lower() if match else ""


def read_bounded(filesystem: Any, path: str, max_bytes: int) -> bytes | None:
    """A file's bytes, or None when it has more than `max_bytes` (no more than that is ever read)."""
    with filesystem.open(path, "rb") as file:
        data: bytes = file.read(max_bytes + 1)
    return data if len(data) <= max_bytes else None


def size_of(file: Any) -> int:
    """The bytes of an open file; what stands at its end, where the driver does not tell."""
    size = getattr(file, "size", None)
    if size is None:
        here = file.tell()
        size = file.seek(0, os.SEEK_END)
        file.seek(here)
    return int(size)


def join(root: str, relative: str) -> str:
    """A path below a root, without any interpretation of the relative part."""
    return f"{root.rstrip('/')}/{relative}" if root else relative


def list_folder(filesystem: Any, root: str, suffixes: tuple[str, ...]) -> Iterator[Listed]:
    """All files below `root` with one of the suffixes (lower case); names that begin with `.` or `_` are left out."""
    walk = _walk_local(root) if is_local(filesystem) else _walk_remote(filesystem, root)
    for found in walk:
        if found.path.lower().endswith(suffixes):
            yield found


def describe(filesystem: Any, path: str, relative: str) -> Listed:
    """Size and token of one file."""
    if is_local(filesystem):
        return _listed(os.stat(path), relative)
    return listed(relative, filesystem.info(path))


def listed(relative: str, info: dict[str, Any]) -> Listed:
    """One file out of a driver's own description of it."""
    return Listed(relative, int(info.get("size") or 0), _token(info))


def _token(info: dict[str, Any]) -> str:
    return next((str(info[key]) for key in _TOKEN_KEYS if info.get(key)), "")


def _listed(stat: os.stat_result, relative: str) -> Listed:
    return Listed(relative, stat.st_size, str(stat.st_mtime_ns))


def _hidden(name: str) -> bool:
    return name.startswith((".", "_"))


def _walk_local(root: str) -> Iterator[Listed]:
    """Streams, so that a folder of ten million files never becomes ten million Python objects at once."""
    stack: list[tuple[str, str, tuple[str, ...]]] = [(root, "", (os.path.realpath(root),))]
    while stack:
        folder, prefix, ancestors = stack.pop()
        with os.scandir(folder) as entries:
            for entry in entries:
                if _hidden(entry.name):
                    continue
                relative = prefix + entry.name
                try:
                    if entry.is_dir():
                        real = os.path.realpath(entry.path) if entry.is_symlink() else entry.path
                        if real not in ancestors:  # a link to a folder above would go round for ever
                            stack.append((entry.path, relative + "/", (*ancestors, os.path.realpath(entry.path))))
                    elif entry.is_file():
                        yield _listed(entry.stat(), relative)
                    elif entry.is_symlink():
                        yield Listed(relative, 0, "dangling link")
                except OSError:
                    yield Listed(relative, 0, "unreadable")


def _walk_remote(filesystem: Any, root: str) -> Iterator[Listed]:
    for folder, _, files in filesystem.walk(root, detail=True):
        prefix = str(folder)[len(root.rstrip("/")) :].strip("/")
        if any(_hidden(part) for part in prefix.split("/") if part):
            continue
        for name, info in files.items():
            # Object stores show a folder's own marker as an empty key.
            if name and not _hidden(name):
                yield listed(f"{prefix}/{name}" if prefix else name, info)
