"""Lists files, folders and globs as one root and the files below it, without opening a file."""

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

from files.local import OutsideRoots, is_below
from pipeline.storage import access
from pipeline.storage.folders import snapshot_blobs
from pipeline.storage.retries import retried

NUM_LISTING_THREADS = 16
_TOKEN_KEYS = ("ETag", "etag", "md5Hash", "crc32c", "generation", "LastModified", "last_modified", "mtime", "created")
_MARKERS = re.compile(
    r"_(SUCCESS|FAILURE|metadata|common_metadata|temporary|tmp|staging|delta_log|delta_index|change_data|spark_metadata"
    r"|symlink_format_manifest|versions|transactions|indices|deletions|latest\.manifest|(started|committed|vacuum)_[^.]*)"
)
"""Names of marker files and folders with records of writers: Spark, Hadoop, Databricks, Delta Lake and Lance."""
JOB_FOLDER = "_job"
"""The folder of a job's records inside of its output."""
MAX_BRACED = 100_000
"""Maximum number of paths of a brace pattern."""
_BRACES = re.compile(r"\{(\d{1,9})\.\.(\d{1,9})\}|\{([^{}]*,[^{}]*)\}")
MAX_SKIPPED_SUFFIXES = 20
"""Number of suffixes of skipped files that are counted separately; further suffixes share one count."""


class Skipped:
    """Counts skipped files by suffix, and hidden files and folders; with `pattern`, only matching paths."""

    def __init__(self, counts: Counter[str] | None = None, pattern: re.Pattern[str] | None = None) -> None:
        self.counts = Counter[str]() if counts is None else counts
        self._pattern = pattern

    def add(self, relative: str, is_folder: bool = False) -> None:
        """Count one skipped file, or one hidden folder that is not listed."""
        if self._pattern is not None and not self._pattern.match(relative):
            return
        name = posixpath.basename(relative)
        suffix = posixpath.splitext(name)[1].lower()
        if reason := hidden_reason(name):
            label = f"{'folders' if is_folder else 'files'} {reason}"
        else:
            label = f"*{suffix}" if suffix else "files without a suffix"
        if label not in self.counts and len(self.counts) >= MAX_SKIPPED_SUFFIXES and label.startswith("*"):
            label = "files with other suffixes"
        self.counts[label] += 1


def _singular(label: str) -> str:
    return label.replace("files ", "file ", 1).replace(" begin ", " begins ", 1)


def describe_skipped(counts: Mapping[str, int], kind: str) -> str:
    """Format the counts for messages, the most frequent first."""
    ordered = sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))
    parts = [f"{count:,} {label if count > 1 else _singular(label)}" for label, count in ordered]
    return f"{', '.join(parts)} (source.kind {kind!r} does not read them)"


class Listed(NamedTuple):
    """One file of a listing: `path` relative to the root, and a `token` (etag or modification time) of its version."""

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
    """Return the source root and an iterator over the distinct files below it; skipped files are counted in `skipped`.

    The root is the path of a folder, the parent folder of a file, or the part of a glob before its first glob
    character; for several paths, it is their common folder. OSError, with the path as `filename`, for a path that
    cannot be listed; OutsideRoots, from the iterator, for a local symlink to a target that is neither below one of
    `paths` (for a glob, its fixed part) nor of `local_roots`.
    """
    paths = [name for path in paths for name in expand_braces(filesystem, path)]
    fixed = [path if not has_magic(path) or os.path.exists(path) else split_glob(path)[0] for path in paths]
    links = snapshot_blobs(fixed) if access.is_local(filesystem) else ()
    roots = tuple(os.path.realpath(place) for place in (*fixed, *local_roots, *links))
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
    paths: set[str] = set()
    for root, listing in listings:
        below = root[len(shared) :].strip("/")
        for file in listing:
            path = f"{below}/{file.path}" if below else file.path
            if path not in paths:
                paths.add(path)
                yield file._replace(path=path)


def expand_braces(filesystem: Any, path: str) -> Iterator[str]:
    """Yield the paths of a brace pattern as of webdataset: `{000..127}` counts with leading zeros, `{a,b}` is a list. A
    path that exists, or has no such pattern, is itself; OSError for more than `MAX_BRACED` paths."""
    if not _BRACES.search(path) or filesystem.exists(path):
        yield path
        return
    names, num_names = [path], 1
    while found := _BRACES.search(names[0]):
        first, last, items = found.groups()
        if items is None:
            width = len(first) if first.startswith("0") else 0
            num_names *= max(0, int(last) - int(first) + 1)
            values: Iterable[str] = (str(number).zfill(width) for number in range(int(first), int(last) + 1))
        else:
            values = items.split(",")
            num_names *= items.count(",") + 1
        if not 0 < num_names <= MAX_BRACED:
            raise OSError(errno.EINVAL, f"the braces name {num_names:,} paths; 1 to {MAX_BRACED:,} are allowed", path)
        texts = list(values)
        names = [_BRACES.sub(lambda _, text=text: text, name, count=1) for name in names for text in texts]  # type: ignore[misc]
    yield from names


def _top(path: str) -> str:
    return "/" if path.startswith("/") else ""


def split_glob(path: str) -> tuple[str, list[str]]:
    """Split a glob into the folder before its first glob character and the path components from there on."""
    parts = path.split("/")
    fixed = next(index for index, part in enumerate(parts) if has_magic(part))
    return "/".join(parts[:fixed]) or _top(path), parts[fixed:]


def _list(
    filesystem: Any, path: str, suffixes: tuple[str, ...], skipped: Skipped, roots: Sequence[str]
) -> tuple[str, Iterator[Listed]]:
    """List one path; an existing file or folder takes precedence over a glob, as names may contain glob characters."""
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
    """Yield the files below the root that match a glob; folders that cannot contain a match are not listed."""
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
    return _type_of(filesystem, path) == "file"


def is_folder(filesystem: Any, path: str) -> bool:
    return _type_of(filesystem, path) == "directory"


def _type_of(filesystem: Any, path: str) -> str:
    """Return `file`, `directory` (also for a key prefix), or nothing; raises if the store does not answer."""
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
    """Yield the files below `root` that end with one of the lower-case `suffixes`.

    Files and folders whose name begins with `.` or `_` are left out. `enter(folder)` decides whether to list a folder,
    given its path relative to `root`. `skipped` counts what is left out. Raises OutsideRoots, while iterating, for a
    local symlink to a target outside all resolved folders `roots` (default: `root`)."""
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
    if access.is_local(filesystem):
        return _of_stat(relative, os.stat(path))
    return of_info(relative, retried(lambda: filesystem.info(path)))


def _of_stat(relative: str, stat: os.stat_result) -> Listed:
    return Listed(relative, stat.st_size, str(stat.st_mtime_ns))


def of_info(relative: str, info: Mapping[str, Any]) -> Listed:
    """Return the listing's entry of a file from its `info` in fsspec."""
    token = next((str(info[key]) for key in _TOKEN_KEYS if info.get(key)), "")
    return Listed(relative, int(info.get("size") or 0), token)


def hidden_reason(name: str) -> str:
    """Return why a file or folder is not read; empty for one that is. Cameras and image editors use names that begin
    with `_`, too."""
    if name.startswith("."):
        return "that begin with a dot"
    if name == "__MACOSX":
        return "of macOS (__MACOSX)"
    if _MARKERS.fullmatch(name):
        return "of Spark and other writers (_SUCCESS, _metadata, _temporary, …)"
    return f"of an output ({JOB_FOLDER})" if name == JOB_FOLDER else ""


def _walk_local(roots: Sequence[str], root: str, enter: Enter, skipped: Skipped) -> Iterator[Listed]:
    """Yield the files of a local folder one by one, so that memory does not grow with the number of files."""
    stack: list[tuple[str, str, tuple[str, ...]]] = [(root, "", (os.path.realpath(root),))]
    while stack:
        folder, prefix, ancestors = stack.pop()
        with os.scandir(folder) as entries:
            for entry in entries:
                relative = prefix + entry.name
                is_link = entry.is_symlink() and not hidden_reason(entry.name) and os.path.exists(entry.path)
                if is_link and not is_below(os.path.realpath(entry.path), roots):
                    reason = "it is a link that leaves the source root; source.local_roots allows other folders"
                    raise OutsideRoots(errno.EACCES, reason, entry.path)
                try:
                    if hidden_reason(entry.name):
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


def _walk_remote(filesystem: Any, root: str, enter: Enter, skipped: Skipped) -> Iterator[Listed]:
    """Yield remote files, listing folders in parallel; unlike fsspec's `walk`, raises if a folder cannot be listed."""
    above = root.rstrip("/")
    folders = [above or root]
    with ThreadPoolExecutor(NUM_LISTING_THREADS) as pool:
        while folders:
            deeper: list[str] = []
            listings = pool.map(lambda folder: retried(lambda: filesystem.ls(folder, detail=True)), folders)
            for folder, infos in zip(folders, listings, strict=True):
                for info in infos:
                    path, is_folder = str(info["name"]).rstrip("/"), info["type"] == "directory"
                    relative = path[len(above) :].removeprefix("/")
                    if is_folder and path == folder.rstrip("/"):  # of keys with `//`, which `ls` cannot list
                        yield from _below_empty_name(filesystem, above, folder, enter, skipped)
                        continue
                    # Object stores list a folder's marker object under the name of the folder.
                    if path == folder.rstrip("/") or not relative:
                        continue
                    if hidden_reason(posixpath.basename(relative)):
                        skipped.add(relative, is_folder)
                    elif is_folder:
                        if enter(relative):
                            deeper.append(path)
                    elif not str(info["name"]).endswith("/"):
                        yield of_info(relative, info)
            folders = deeper


def _below_empty_name(filesystem: Any, above: str, folder: str, enter: Enter, skipped: Skipped) -> Iterator[Listed]:
    """Yield the objects of a store whose keys have an empty name behind this folder: `<folder>//<name>`."""
    prefix = f"{folder.rstrip('/')}//"
    found = retried(lambda: filesystem.find(folder, detail=True))
    for name, info in sorted(found.items()):
        relative = name[len(above) :].removeprefix("/")
        if not name.startswith(prefix) or name.endswith("/"):
            continue
        if any(map(hidden_reason, relative.split("/"))):
            skipped.add(relative)
        elif enter(posixpath.dirname(relative)):
            yield of_info(relative, info)
