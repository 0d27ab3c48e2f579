"""Lists checkpoints in object stores and caches them on this machine: outlines for checks, copies for loading.

Other processes wait for a copy on a file lock, which the kernel releases if its holder dies. A copy is renamed when it
is complete, and named by the URL and the store's versions of its files, so partial and outdated copies are never used.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from configs.load import ConfigError
from files.plurals import counted
from models.loading.names import is_plain_name
from models.loading.weight_headers import HeaderError, HeaderTooLarge, header_bytes, parse_header
from pipeline.storage import access, listing
from pipeline.storage.listing import Listed
from pipeline.storage.retries import CutShort, retried

SCHEMES = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "memory")
FOLDER_VARIABLE = "DRAFTFLEET_WEIGHTS"
"""Environment variable with the folder of copies, for example if the user's cache is on a small disk."""
WEIGHT_SUFFIXES = (".safetensors",)
PICKLED_SUFFIXES = (".pt", ".pth", ".bin")
"""Suffixes of pickled weights: used by image models only, and loaded with tensors only."""
ALL_SUFFIXES = (*WEIGHT_SUFFIXES, *PICKLED_SUFFIXES)
SETTINGS_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken")
CODE_SUFFIXES = (".py",)
MAX_SETTINGS_BYTES = 256 * 1024**2
OUTLINE_BYTES = 1024**2
"""Bytes at each end of a weight file in an outline: safetensors headers, and the zip directory of torch's format."""
PART_BYTES = 32 * 1024**2
NUM_THREADS = 8
SPARE_DISK_BYTES = 1024**3
SHOW_EVERY_S = 10.0


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint in a store: its files below `root`; `name` is the file's name if the URL is a single file."""

    where: str
    url: str
    root: str
    name: str
    files: tuple[Listed, ...]

    @property
    def revision(self) -> str:
        """Hash (16 hex digits) of the names, sizes and store versions of all files."""
        facts = sorted((file.path, file.size_bytes, file.token) for file in self.files)
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]

    @property
    def num_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @property
    def key(self) -> str:
        return f"{hashlib.sha256(self.url.encode()).hexdigest()[:16]}-{self.revision}"

    def refusal(self, reason: str) -> ConfigError:
        return ConfigError(f"{self.where}: {access.shown(self.url)}: {reason}")


def copies_folder() -> Path:
    """Return the folder of copies: `$DRAFTFLEET_WEIGHTS`, or `draftfleet/weights` in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get(FOLDER_VARIABLE) or cache / "draftfleet" / "weights")


def look(url: str, where: str, with_code: bool = False) -> StoredCheckpoint:
    """List the files of a checkpoint; ConfigError with `where` if the store does not answer or there is none."""
    if access.uri_scheme(url) not in SCHEMES:
        raise ConfigError(f"{where}: {access.shown(url)}: weights are read only from {', '.join(SCHEMES[:-1])}")
    filesystem, path = access.open_url(url.rstrip("/"), where)
    checkpoint = StoredCheckpoint(where, url, path, "", ())
    try:
        filesystem.invalidate_cache()
        if path.lower().endswith(ALL_SUFFIXES):
            root, _, name = path.rpartition("/")
            files = [listing.describe(filesystem, path, name)]
            with contextlib.suppress(FileNotFoundError):
                files.append(listing.describe(filesystem, f"{root}/config.json", "config.json"))
            checkpoint = replace(checkpoint, root=root, name=name, files=tuple(files))
        else:
            files = list(listing.list_folder(filesystem, path, ("",), enter=lambda _: False))
            if not files:
                raise FileNotFoundError(path)
            checkpoint = replace(checkpoint, files=tuple(chosen(files, with_code)))
    except FileNotFoundError:
        raise checkpoint.refusal("there is no such checkpoint, or it cannot be listed with these credentials") from None
    except Exception as error:  # drivers raise errors of no common class
        raise checkpoint.refusal(f"it cannot be listed: {access.reason_of(error, url)}") from None
    for file in checkpoint.files:
        if not is_plain_name(file.path):  # copies are written under these names
            raise checkpoint.refusal(f"it names the file {file.path[:100]!r}, which is no plain file name")
    if not any(file.path.endswith(ALL_SUFFIXES) for file in checkpoint.files):
        raise checkpoint.refusal("there are no weights: neither .safetensors nor a .pt file")
    if empty := [file.path for file in checkpoint.files if not file.size_bytes]:
        raise checkpoint.refusal(f"{empty[0]} is empty, or the store does not report its size")
    return checkpoint


def chosen(files: Iterable[Listed], with_code: bool = False) -> list[Listed]:
    """Select the files to load from a folder: settings, and safetensors or, if there are none, pickled weights.
    Duplicates of the weights in another layout (`consolidated*`) are left out."""
    files = sorted(files, key=lambda file: file.path)
    settings = (*SETTINGS_SUFFIXES, *(CODE_SUFFIXES if with_code else ()))
    weights = [file for file in files if file.path.endswith(WEIGHT_SUFFIXES)]
    weights = [file for file in weights if not file.path.startswith("consolidated")] or weights
    weights = weights or [file for file in files if file.path.endswith(PICKLED_SUFFIXES)]
    return [file for file in files if file.path.endswith(settings)] + weights


def outline(checkpoint: StoredCheckpoint) -> Path:
    """Return the path of an outline: a sparse copy with only both ends of each weight file, for checks without loading;
    ConfigError if a file cannot be read, or a header shows that the weights are damaged."""
    return _cached(checkpoint, "outlines", _write_outline)


def copy(checkpoint: StoredCheckpoint) -> Path:
    """Return the path of a full copy on this machine, downloaded unless it is cached; ConfigError if a file cannot be
    read or has changed meanwhile, or the disk is too small."""
    return _cached(checkpoint, "copies", _write_copy)


def check_disk(checkpoint: StoredCheckpoint) -> None:
    """Raise ConfigError if a checkpoint is not cached and does not fit on the disk."""
    folder = copies_folder()
    if _is_complete(folder / "copies" / checkpoint.key, checkpoint):
        return
    free, needed = _free_bytes(folder), checkpoint.num_bytes + SPARE_DISK_BYTES
    if free < needed:
        raise checkpoint.refusal(
            f"its copy needs {_gb(needed)} with some to spare, and {folder} has {_gb(free)} free; make room, or name "
            f"another folder in {FOLDER_VARIABLE}"
        )


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(next(parent for parent in (folder, *folder.parents) if parent.exists())).free


def _cached(checkpoint: StoredCheckpoint, kind: str, write: Callable[[StoredCheckpoint, Any, Path], None]) -> Path:
    """Return the path of a complete cache entry (its folder, or its single file); writes the entry under a lock."""
    entry = copies_folder() / kind / checkpoint.key
    path = entry / checkpoint.name if checkpoint.name else entry
    if _is_complete(entry, checkpoint):
        return path
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        with entry.with_suffix(".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # released when its holder ends, even by a signal
            if _is_complete(entry, checkpoint):  # another process made it while this one waited
                return path
            part = entry.with_suffix(".part")
            for stale in (part, entry):  # `part` of a killed process, `entry` with truncated files
                shutil.rmtree(stale, ignore_errors=True)
            part.mkdir()
            filesystem, _ = access.open_url(checkpoint.url.rstrip("/"), checkpoint.where)
            write(checkpoint, filesystem, part)
            os.replace(part, entry)
    except OSError as error:
        raise checkpoint.refusal(f"its copy cannot be written: {access.reason_of(error)}") from None
    return path


def _is_complete(entry: Path, checkpoint: StoredCheckpoint) -> bool:
    try:
        return all((entry / file.path).stat().st_size == file.size_bytes for file in checkpoint.files)
    except OSError:
        return False


@contextlib.contextmanager
def _naming(checkpoint: StoredCheckpoint, file: Listed) -> Iterator[None]:
    """Convert any failure to read `file` to a ConfigError with its name."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # drivers raise errors of no common class
        raise checkpoint.refusal(f"{file.path} cannot be read: {access.reason_of(error)}") from None


def _write_outline(checkpoint: StoredCheckpoint, filesystem: Any, folder: Path) -> None:
    """Write both ends of each weight file, with a hole in between, and all other files completely."""
    for file in checkpoint.files:
        source = access.join(checkpoint.root, file.path)
        is_weights = file.path.endswith(ALL_SUFFIXES)
        if not is_weights and file.size_bytes > MAX_SETTINGS_BYTES:
            raise checkpoint.refusal(f"{file.path} has {_gb(file.size_bytes)}, too large for settings")
        with _naming(checkpoint, file):
            head = _read(filesystem, source, min(OUTLINE_BYTES, file.size_bytes) if is_weights else file.size_bytes)
            if file.path.endswith(WEIGHT_SUFFIXES):
                head = _read_header(checkpoint, file, filesystem, source, head)
            start = max(len(head), file.size_bytes - OUTLINE_BYTES)
            tail = _read(filesystem, source, file.size_bytes, start) if start < file.size_bytes else b""
        with (folder / file.path).open("wb") as output:
            output.write(head)
            output.truncate(file.size_bytes)
            output.seek(start)
            output.write(tail)


def _read_header(checkpoint: StoredCheckpoint, file: Listed, filesystem: Any, source: str, head: bytes) -> bytes:
    """Read a safetensors file up to the end of its header; ConfigError if the header does not fit the file size."""
    try:
        length = header_bytes(head, file.size_bytes)
        if len(head) < 8 + length:
            head = _read(filesystem, source, 8 + length)
        parse_header(head, file.size_bytes)
    except HeaderTooLarge as error:
        raise checkpoint.refusal(f"{file.path} is not read: {error}") from None
    except HeaderError:
        raise checkpoint.refusal(f"{file.path} is torn or not safetensors") from None
    return head


def _write_copy(checkpoint: StoredCheckpoint, filesystem: Any, folder: Path) -> None:
    """Download all files into the folder, in parts and several threads."""
    check_disk(checkpoint)
    show = _progress(checkpoint)
    parts = []
    for file in checkpoint.files:
        with (folder / file.path).open("wb") as output:
            output.truncate(file.size_bytes)
        parts += [(file, start) for start in range(0, file.size_bytes, PART_BYTES)]

    def read(part: tuple[Listed, int]) -> None:
        file, start = part
        end = min(start + PART_BYTES, file.size_bytes)
        with _naming(checkpoint, file):
            data = _read(filesystem, access.join(checkpoint.root, file.path), end, start)
        with (folder / file.path).open("r+b") as output:
            output.seek(start)
            output.write(data)
            os.fsync(output.fileno())
        show(len(data))

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        for _ in pool.map(read, parts):  # a failure cancels the parts that have not begun
            pass
    with_code = any(file.path.endswith(CODE_SUFFIXES) for file in checkpoint.files)
    if look(checkpoint.url, checkpoint.where, with_code).revision != checkpoint.revision:
        raise checkpoint.refusal("it was changed while it was read; start again")
    show(0, folder.with_suffix(""))


def _read(filesystem: Any, path: str, end: int, start: int = 0) -> bytes:
    """Read exactly the bytes `start` to `end` (exclusive) of a file."""

    def once() -> bytes:
        data: bytes = filesystem.cat_file(path, start=start or None, end=end)
        if len(data) != end - start:
            raise CutShort(f"received {len(data)} of {end - start} bytes")
        return data

    return retried(once)


def _progress(checkpoint: StoredCheckpoint) -> Callable[..., None]:
    """Return a function that counts downloaded bytes and prints progress, and with a folder the last line."""
    url, num_done = access.shown(checkpoint.url), 0
    began_s = shown_s = time.monotonic()
    print(f"fetching {url}: {counted(len(checkpoint.files), 'file')}, {_gb(checkpoint.num_bytes)}", flush=True)

    def show(num_bytes: int, folder: Path | None = None) -> None:
        nonlocal num_done, shown_s
        num_done += num_bytes
        now_s = time.monotonic()
        size = f"{_gb(checkpoint.num_bytes)}, {num_done / max(now_s - began_s, 1e-3) / 1e6:,.1f} MB/s"
        if folder is not None:
            print(f"fetched {url}: {size} into {folder}", flush=True)
        elif now_s - shown_s >= SHOW_EVERY_S:
            shown_s = now_s
            print(f"fetching {url}: {_gb(num_done)} of {size}", flush=True)

    return show


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.3f} GB" if num_bytes >= 1e7 else f"{num_bytes / 1e6:,.3f} MB"
