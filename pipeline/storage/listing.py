"""Lists a source: files, folders, globs and lists of those as one root and the files below it. Opens no file."""

from __future__ import annotations

import errno
import os
import posixpath
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
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
    """Counts files that a listing leaves out, by suffix, and hidden ones; of a glob only those that match it."""

    def __init__(self, counts: Counter[str] | None = None, pattern: re.Pattern[str] | None = None) -> None:
        self.counts = Counter[str]() if counts is None else counts
        self._pattern = pattern

    def add(self, relative: str, is_folder: bool = False) -> None:
        """Count one file that is not taken, or one folder that is not entered."""
        if self._pattern is not None and not self._pattern.match(relative):
            return
        name = posixpath.basename(relative)
        suffix = posixpath.splitext(name)[1].lower()
        if _hidden(name):
            label = HIDDEN_FOLDERS if is_folder else HIDDEN
        else:
            label = f"*{suffix}" if suffix else NO_SUFFIX
        if label not in self.counts and len(self.counts) >= MAX_SKIPPED_SUFFIXES and label.startswith("*"):
            label = OTHER_SUFFIXES
        self.counts[label] += 1


def describe_skipped(counts: Mapping[str, int], kind: str) -> str:
    """The counts in words, the most frequent first."""
    parts = [f"{count:,} {label}" for label, count in sorted(counts.items(), key=lambda one: (-one[1], one[0]))]
    return f"{', '.join(parts)} (source.kind {kind!r} does not read them)"


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
    common folder. Local links are followed below these paths and `local_roots` only.

    Raises:
        OSError: a path does not exist or cannot be listed; its `filename` names it.
        access.OutsideRoots: while files are listed: a link leads outside these folders.
    """
    fixed = [path if not has_magic(path) or os.path.exists(path) else split_glob(path)[0] for path in paths]
    roots = tuple(os.path.realpath(place) for place in (*fixed, *local_roots))
    skipped = skipped or Skipped()
    filesystem.invalidate_cache()
    listings = []
    for path in paths:
        try:
            listings.append(_list(filesystem, path, suffixes, skipped, roots))
        except OSError as error:
            error.filename = error.filename or path
            raise
    if len(listings) == 1:
        return listings[0]
    steps = zip(*(root.split("/") for root, _ in listings), strict=False)
    shared = "/".join(names[0] for names in takewhile(lambda names: len(set(names)) == 1, steps))
    shared = shared or _top(listings[0][0])
    return shared, _merged(shared, listings)


def _merged(shared: str, listings: Sequence[tuple[str, Iterable[Listed]]]) -> Iterator[Listed]:
    seen: set[str] = set()
    for root, listing in listings:
        below = root[len(shared) :].strip("/")
        for file in listing:
            path = f"{below}/{file.path}" if below else file.path
            if path not in seen:
                seen.add(path)
                yield file._replace(path=path)


def _top(path: str) -> str:
    return "/" if path.startswith("/") else ""


def split_glob(path: str) -> tuple[str, list[str]]:
    """The folders of a glob before its first glob character, and the steps of the pattern behind them."""
    parts = path.split("/")
    fixed = next(index for index, part in enumerate(parts) if has_magic(part))
    return "/".join(parts[:fixed]) or _top(path), parts[fixed:]


def _list(
    filesystem: Any, path: str, suffixes: tuple[str, ...], skipped: Skipped, roots: Sequence[str]
) -> tuple[str, Iterator[Listed]]:
    """One path; a file's name may hold glob characters, so a file that exists comes first."""
    if is_file(filesystem, path):
        root, _, name = path.rpartition("/")
        return root or _top(path), iter([describe(filesystem, path, name)])
    if is_folder(filesystem, path):
        return path, list_folder(filesystem, path, suffixes, skipped=skipped, roots=roots)
    if has_magic(path):
        root, pattern = split_glob(path)
        return root, _matches(filesystem, root, pattern, skipped, roots)
    raise FileNotFoundError(errno.ENOENT, "it does not exist")


def _matches(
    filesystem: Any, root: str, pattern: Sequence[str], skipped: Skipped, roots: Sequence[str]
) -> Iterator[Listed]:
    """Files below the root whose relative path fits a glob; folders that cannot hold any are not listed."""
    full_pattern = re.compile(glob_translate("/".join(pattern)))
    steps = [re.compile(glob_translate(part)) for part in pattern]

    def enter(folder: str) -> bool:
        for depth, name in enumerate(folder.split("/")):
            if depth < len(pattern) and "**" in pattern[depth]:
                return True
            if depth >= len(pattern) - 1 or not steps[depth].match(name):
                return False
        return True

    named = Skipped(skipped.counts, full_pattern)
    return (file for file in list_folder(filesystem, root, ("",), enter, named, roots) if full_pattern.match(file.path))


def is_file(filesystem: Any, path: str) -> bool:
    """Whether a path is a file; raises if the store does not answer."""
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


Enter = Callable[[str], bool]


def list_folder(
    filesystem: Any,
    root: str,
    suffixes: tuple[str, ...],
    enter: Enter = lambda _: True,
    skipped: Skipped | None = None,
    roots: Sequence[str] | None = None,
) -> Iterator[Listed]:
    """All files below `root` with one of the suffixes (lower case); names that begin with `.` or `_` are skipped.

    `enter` decides by a folder's relative path whether to list it. Local links may lead below the resolved `roots`, by
    default below `root`.

    Raises:
        access.OutsideRoots: a link leads elsewhere.
    """
    skipped = skipped or Skipped()
    if access.is_local(filesystem):
        files = _walk_local((os.path.realpath(root),) if roots is None else roots, root, enter, skipped)
    else:
        files = _walk_remote(filesystem, root, enter, skipped)
    for file in files:
        if file.path.lower().endswith(suffixes):
            yield file
        else:
            skipped.add(file.path)


def describe(filesystem: Any, path: str, relative: str) -> Listed:
    """Size and token of one file."""
    if access.is_local(filesystem):
        return _of_stat(relative, os.stat(path))
    return _of_info(relative, retried(lambda: filesystem.info(path)))


def _of_stat(relative: str, stat: os.stat_result) -> Listed:
    return Listed(relative, stat.st_size, str(stat.st_mtime_ns))


def _of_info(relative: str, info: Mapping[str, Any]) -> Listed:
    token = next((str(info[key]) for key in _TOKEN_KEYS if info.get(key)), "")
    return Listed(relative, int(info.get("size") or 0), token)


def _hidden(name: str) -> bool:
    return name.startswith((".", "_"))


def _walk_local(roots: Sequence[str], root: str, enter: Enter, skipped: Skipped) -> Iterator[Listed]:
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
                    elif entry.is_dir():
                        real = os.path.realpath(entry.path)
                        is_cycle = entry.is_symlink() and real in ancestors
                        if not is_cycle and enter(relative):
                            stack.append((entry.path, relative + "/", (*ancestors, real)))
                    elif entry.is_file():
                        yield _of_stat(relative, entry.stat())
                    elif entry.is_symlink():
                        yield Listed(relative, 0, "dangling link")
                except OSError:
                    yield Listed(relative, 0, "unreadable")


def _check_link(path: str, roots: Sequence[str]) -> None:
    if os.path.exists(path) and not access.is_below(os.path.realpath(path), roots):
        reason = "it is a link that leaves the source root; source.local_roots allows other folders"
        raise access.OutsideRoots(errno.EACCES, reason, path)


def _walk_remote(filesystem: Any, root: str, enter: Enter, skipped: Skipped) -> Iterator[Listed]:
    """Folder by folder, several at once. fsspec's own walk leaves out folders that it cannot list; this raises."""
    above = root.rstrip("/")
    folders = [above or root]
    with ThreadPoolExecutor(NUM_LISTING_THREADS) as pool:
        while folders:
            deeper: list[str] = []
            listings = pool.map(lambda folder: retried(lambda: filesystem.ls(folder, detail=True)), folders)
            for folder, infos in zip(folders, listings, strict=True):
                for info in infos:
                    path, is_folder = str(info["name"]).rstrip("/"), info["type"] == "directory"
                    relative = path[len(above) :].lstrip("/")
                    # Object stores show a folder's own marker as a key that is the folder's name.
                    if path == folder.rstrip("/") or not relative:
                        continue
                    if _hidden(posixpath.basename(relative)):
                        skipped.add(relative, is_folder)
                    elif is_folder:
                        if enter(relative):
                            deeper.append(path)
                    elif not str(info["name"]).endswith("/"):
                        yield _of_info(relative, info)
            folders = deeper
