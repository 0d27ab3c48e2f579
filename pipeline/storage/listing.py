"""Lists a source: files, folders, globs and lists of those as one root and the files below it. Opens no file."""

from __future__ import annotations

import errno
import functools
import os
import posixpath
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from fsspec.core import has_magic
from fsspec.utils import glob_translate

from pipeline.storage import access
from pipeline.storage.retries import retried

NUM_LISTING_THREADS = 16
_TOKEN_KEYS = ("ETag", "etag", "md5Hash", "crc32c", "generation", "LastModified", "last_modified", "mtime", "created")


MAX_SKIPPED_SUFFIXES = 20
"""The number of suffixes of skipped files that are counted separately; all further ones are counted together."""
HIDDEN, HIDDEN_FOLDERS = "hidden files (. or _)", "hidden folders (. or _)"
NO_SUFFIX, OTHER_SUFFIXES = "files without a suffix", "files with other suffixes"


class Skipped:
    """Counts files that a listing leaves out, by suffix, and hidden ones."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def add(self, relative: str, is_folder: bool = False) -> None:
        """Count one file that is not taken, or one folder that is not entered."""
        name = posixpath.basename(relative)
        suffix = posixpath.splitext(name)[1].lower()
        if _hidden(name):
            label = HIDDEN_FOLDERS if is_folder else HIDDEN
        else:
            label = f"*{suffix}" if suffix else NO_SUFFIX
        if label not in self.counts and len(self.counts) >= MAX_SKIPPED_SUFFIXES and label.startswith("*"):
            label = OTHER_SUFFIXES
        self.counts[label] += 1


def told_skipped(counts: Mapping[str, int], kind: str) -> str:
    """The counts in words, the most frequent first."""
    told = [f"{count:,} {label}" for label, count in sorted(counts.items(), key=lambda one: (-one[1], one[0]))]
    return f"{', '.join(told)} (source.kind {kind!r} does not read them)"


class Listed(NamedTuple):
    """One file of a listing: `path` relative to the root, and a `token` that changes when the content does."""

    path: str
    size_bytes: int
    token: str


def list_paths(
    filesystem: Any,
    paths: Sequence[str],
    suffixes: tuple[str, ...],
    skipped: Skipped | None = None,
    local_roots: Sequence[str] = (),
) -> tuple[str, Iterator[Listed]]:
    """The source root, and the files below it, each once; files that are not taken are counted in `skipped`.

    A single path is the root itself, or the folder of a file, or the fixed part of a glob; several paths have their
    common folder.

    Local links are followed below these paths and `local_roots` only.

    Raises:
        OSError: a path does not exist or cannot be listed; its `filename` names it.
        storage.OutsideRoots: while files are listed: a link leads outside these folders.
    """
    roots = tuple(os.path.realpath(place) for place in (*map(_fixed, paths), *local_roots))
    filesystem.invalidate_cache()
    found = []
    for path in paths:
        try:
            found.append(_list(filesystem, path, suffixes, skipped, roots))
        except OSError as error:
            error.filename = error.filename or path
            raise
    if len(found) == 1:
        return found[0]
    parts = [root.split("/") for root, _ in found]
    num_shared = next(
        (place for place, names in enumerate(zip(*parts, strict=False)) if len(set(names)) > 1), min(map(len, parts))
    )
    shared = "/".join(parts[0][:num_shared]) or found[0][0][: found[0][0].startswith("/")]
    return shared, _merged(shared, found)


def _merged(shared: str, found: Sequence[tuple[str, Iterable[Listed]]]) -> Iterator[Listed]:
    seen: set[str] = set()
    for root, listing in found:
        below = root[len(shared) :].strip("/")
        for one in listing:
            path = f"{below}/{one.path}" if below else one.path
            if path not in seen:
                seen.add(path)
                yield Listed(path, one.size_bytes, one.token)


def _fixed(path: str) -> str:
    """The folders of a path before its first glob character."""
    if not has_magic(path) or os.path.exists(path):
        return path
    parts = path.split("/")
    return "/".join(parts[: next(index for index, part in enumerate(parts) if has_magic(part))]) or "/"


def _list(
    filesystem: Any, path: str, suffixes: tuple[str, ...], skipped: Skipped | None, roots: Sequence[str]
) -> tuple[str, Iterator[Listed]]:
    """One path; a file's name may hold glob characters, so a file that exists comes first."""
    if is_file(filesystem, path):
        root, _, name = path.rpartition("/")
        root = root or path[: path.startswith("/")]
        return root, iter([describe(filesystem, path, name)])
    if is_folder(filesystem, path):
        return path, list_folder(filesystem, path, suffixes, skipped=skipped, roots=roots)
    if has_magic(path):
        parts = path.split("/")
        fixed = next(index for index, part in enumerate(parts) if has_magic(part))
        root = "/".join(parts[:fixed]) or path[: path.startswith("/")]
        return root, _matches(filesystem, root, parts[fixed:], skipped, roots)
    raise FileNotFoundError(2, "it does not exist")


def _matches(
    filesystem: Any, root: str, pattern: Sequence[str], skipped: Skipped | None, roots: Sequence[str]
) -> Iterator[Listed]:
    """Files below the root whose relative path fits a glob; folders that cannot hold any are not listed."""
    whole = re.compile(glob_translate("/".join(pattern)))
    steps = [re.compile(glob_translate(part)) for part in pattern]

    def enter(folder: str) -> bool:
        for place, name in enumerate(folder.split("/")):
            if place < len(pattern) and "**" in pattern[place]:
                return True
            if place >= len(pattern) - 1 or not steps[place].match(name):
                return False
        return True

    named = None if skipped is None else _Named(skipped, whole)  # who gives a glob asks for no other files
    return (found for found in list_folder(filesystem, root, ("",), enter, named, roots) if whole.match(found.path))


class _Named(Skipped):
    """Counts only what fits a glob: hidden files, which no glob takes."""

    def __init__(self, skipped: Skipped, pattern: re.Pattern[str]) -> None:
        self.counts = skipped.counts
        self._pattern = pattern

    def add(self, relative: str, is_folder: bool = False) -> None:
        """Count one file or folder that the glob names."""
        if self._pattern.match(relative):
            super().add(relative, is_folder)


def is_file(filesystem: Any, path: str) -> bool:
    """Whether a path is a file; a store that does not answer is an error and not a no."""
    return _type_of(filesystem, path) == "file"


def is_folder(filesystem: Any, path: str) -> bool:
    """Whether a path is a folder or a prefix of keys."""
    return _type_of(filesystem, path) == "directory"


def _type_of(filesystem: Any, path: str) -> str:
    if access.is_local(filesystem):
        return "file" if os.path.isfile(path) else "directory" if os.path.isdir(path) else ""
    try:
        return str(retried(lambda: filesystem.info(path))["type"])
    except FileNotFoundError:
        return ""


def list_folder(
    filesystem: Any,
    root: str,
    suffixes: tuple[str, ...],
    enter: Callable[[str], bool] | None = None,
    skipped: Skipped | None = None,
    roots: Sequence[str] | None = None,
) -> Iterator[Listed]:
    """All files below `root` with one of the suffixes (lower case); names that begin with `.` or `_` are skipped.

    `enter` decides by a folder's relative path whether to list it. Local links may lead below the resolved `roots`, by
    default below `root`.

    Raises:
        storage.OutsideRoots: a link leads elsewhere.
    """
    enter = enter or (lambda folder: True)
    skipped = Skipped() if skipped is None else skipped
    walk_it = functools.partial(_walk_remote, filesystem)
    if access.is_local(filesystem):
        walk_it = functools.partial(_walk_local, (os.path.realpath(root),) if roots is None else roots)
    for found in walk_it(root, enter, skipped):
        if found.path.lower().endswith(suffixes):
            yield found
        else:
            skipped.add(found.path)


def describe(filesystem: Any, path: str, relative: str) -> Listed:
    """Size and token of one file."""
    if access.is_local(filesystem):
        return _listed(os.stat(path), relative)
    return listed(relative, retried(lambda: filesystem.info(path)))


def listed(relative: str, info: dict[str, Any]) -> Listed:
    """One file out of a driver's own description of it."""
    return Listed(relative, int(info.get("size") or 0), _token(info))


def _token(info: dict[str, Any]) -> str:
    return next((str(info[key]) for key in _TOKEN_KEYS if info.get(key)), "")


def _listed(stat: os.stat_result, relative: str) -> Listed:
    return Listed(relative, stat.st_size, str(stat.st_mtime_ns))


def _hidden(name: str) -> bool:
    return name.startswith((".", "_"))


def _walk_local(roots: Sequence[str], root: str, enter: Callable[[str], bool], skipped: Skipped) -> Iterator[Listed]:
    """Streams, so that a folder of ten million files never becomes ten million Python objects at once."""
    stack: list[tuple[str, str, tuple[str, ...]]] = [(root, "", (os.path.realpath(root),))]
    while stack:
        folder, prefix, ancestors = stack.pop()
        with os.scandir(folder) as entries:
            for entry in entries:
                relative = prefix + entry.name
                if entry.is_symlink() and not _hidden(entry.name):
                    _check_link(entry.path, roots)
                try:
                    if _hidden(entry.name):
                        skipped.add(relative, entry.is_dir())
                        continue
                    if entry.is_dir():
                        real = os.path.realpath(entry.path) if entry.is_symlink() else entry.path
                        # A link to a folder above would go round for ever.
                        if real not in ancestors and enter(relative):
                            stack.append((entry.path, relative + "/", (*ancestors, os.path.realpath(entry.path))))
                    elif entry.is_file():
                        yield _listed(entry.stat(), relative)
                    elif entry.is_symlink():
                        yield Listed(relative, 0, "dangling link")
                except OSError:
                    yield Listed(relative, 0, "unreadable")


def _check_link(path: str, roots: Sequence[str]) -> None:
    if os.path.exists(path) and not access.is_below(os.path.realpath(path), roots):
        reason = "it is a link that leaves the source root; source.local_roots allows other folders"
        raise access.OutsideRoots(errno.EACCES, reason, path)


def _walk_remote(filesystem: Any, root: str, enter: Callable[[str], bool], skipped: Skipped) -> Iterator[Listed]:
    """Folder by folder, several at once. fsspec's own walk leaves out folders that it cannot list; this raises."""
    above = root.rstrip("/")
    folders = [above or root]

    def entries(folder: str) -> Iterable[dict[str, Any]]:
        found: Iterable[dict[str, Any]] = retried(lambda: filesystem.ls(folder, detail=True))
        return found

    with ThreadPoolExecutor(NUM_LISTING_THREADS) as pool:
        while folders:
            deeper: list[str] = []
            for folder, infos in zip(folders, pool.map(entries, folders), strict=True):
                for info in infos:
                    path = str(info["name"]).rstrip("/")
                    relative = path[len(above) :].lstrip("/")
                    # Object stores show a folder's own marker as a key that is the folder's name.
                    if path == folder.rstrip("/") or not relative:
                        continue
                    if _hidden(relative.rpartition("/")[2]):
                        skipped.add(relative, info["type"] == "directory")
                        continue
                    if info["type"] == "directory":
                        if enter(relative):
                            deeper.append(path)
                    elif not str(info["name"]).endswith("/"):
                        yield listed(relative, info)
            folders = deeper
