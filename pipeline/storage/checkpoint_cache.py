"""Checkpoints in object stores: their listing, an outline for checks, and a copy on this machine.

A copy is made once per machine: other processes wait for it on a lock that the kernel releases if its holder dies. It
is written beside its final path and renamed, and its name is derived from the URL and from the store's version of each
file, so that neither a partial nor an outdated copy is ever used.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.load import ConfigError
from models.loading.names import is_plain_name
from pipeline.storage import access, listing
from pipeline.storage.listing import Listed
from pipeline.storage.retries import CutShort, retried

SCHEMES = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "http", "https", "memory")
FOLDER_VARIABLE = "DRAFTFLEET_WEIGHTS"
"""Names the folder of copies, where the user's cache is too small."""
WEIGHT_SUFFIXES = (".safetensors",)
PICKLED_SUFFIXES = (".pt", ".pth", ".bin")
"""Read by image models alone, and then tensors only."""
SETTINGS_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken")
CODE_SUFFIXES = (".py",)
MAX_SETTINGS_BYTES = 256 * 1024**2
MAX_HEADER_BYTES = 100 * 1000**2
"""Of safetensors, as its own reader has it."""
OUTLINE_BYTES = 1024**2
"""What an outline holds of each end of a weight file: headers, and the table of contents of torch's own format."""
INDEX_NAME = "model.safetensors.index.json"
PART_BYTES = 32 * 1024**2
NUM_THREADS = 8
SPARE_DISK_BYTES = 1024**3
SHOW_EVERY_S = 10.0
WEB_NAMES = (
    *("config.json", "generation_config.json", "preprocessor_config.json", "video_preprocessor_config.json"),
    *("processor_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template.json", "chat_template.jinja"),
    *("spiece.model", "model.safetensors", "model.safetensors.index.json", "medusa_lm_head.safetensors"),
)
"""What is asked for where a folder cannot be listed; shards are found by the index."""


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint in a store: its files below `root`; `name` is that of the file where the URL names one."""

    where: str
    url: str
    root: str
    name: str
    files: tuple[Listed, ...]

    @property
    def revision(self) -> str:
        """16 hex digits over names, sizes and the store's version of each file."""
        told = sorted((file.path, file.size_bytes, file.token) for file in self.files)
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]

    @property
    def num_bytes(self) -> int:
        """Of all files."""
        return sum(file.size_bytes for file in self.files)

    @property
    def shown(self) -> str:
        """The URL for messages."""
        return access.shown(self.url)

    @property
    def key(self) -> str:
        """What a copy of exactly this content is called."""
        place = hashlib.sha256(self.url.encode()).hexdigest()[:16]
        return f"{place}-{self.revision}"

    def refusal(self, reason: str) -> ConfigError:
        """An error under the dotted path, the URL first."""
        return ConfigError(f"{self.where}: {self.shown}: {reason}")


def copies_folder() -> Path:
    """Where this machine keeps copies: `$DRAFTFLEET_WEIGHTS`, or `draftfleet/weights` in the user's cache."""
    if given := os.environ.get(FOLDER_VARIABLE):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "draftfleet" / "weights"


# --- looking -------------------------------------------------------------------------------------------------------


def look(url: str, where: str, with_code: bool = False) -> StoredCheckpoint:
    """List the files of a checkpoint; reads no file but an index of shards if a folder has no listing.

    Raises:
        ConfigError: the scheme is unknown, the store does not answer, or there is no checkpoint; names `where`.
    """
    scheme = access.uri_scheme(url)
    if scheme not in SCHEMES:
        raise ConfigError(f"{where}: {access.shown(url)}: weights are read from none but {', '.join(SCHEMES[:-1])}")
    filesystem, path = access.open_url(url.rstrip("/"), where)
    found = StoredCheckpoint(where, url, path, "", ())
    try:
        filesystem.invalidate_cache()
        suffixes = (*WEIGHT_SUFFIXES, *PICKLED_SUFFIXES)
        if path.lower().endswith(suffixes):
            root, _, name = path.rpartition("/")
            beside = _present(filesystem, root, ["config.json"])
            files = [listing.describe(filesystem, path, name), *beside]
            found = StoredCheckpoint(where, url, root, name, tuple(files))
        else:
            every = (
                _web_files(found, filesystem, path) if scheme in ("http", "https") else _folder_files(filesystem, path)
            )
            found = StoredCheckpoint(where, url, path, "", tuple(chosen(every, with_code)))
    except ConfigError:
        raise
    except FileNotFoundError:
        raise found.refusal("there is no such checkpoint, or it cannot be listed with these credentials") from None
    except Exception as error:  # drivers raise their own families
        raise found.refusal(f"it cannot be listed: {access.reason_of(error)}") from None
    for file in found.files:
        check_name(found, file.path)
    if not any(file.path.endswith(suffixes) for file in found.files):
        raise found.refusal("there are no weights: neither .safetensors nor a .pt file")
    if unknown := [file.path for file in found.files if not file.size_bytes]:
        raise found.refusal(f"{unknown[0]} is empty, or the store does not tell its size")
    return found


def chosen(files: Iterable[Listed], with_code: bool = False) -> list[Listed]:
    """What of a folder is loaded: its settings, and its safetensors, or its pickled weights where it has none.

    Second copies of the same weights in another vendor's layout (`consolidated*`) are left out.
    """
    files = sorted(files, key=lambda file: file.path)
    settings = (*SETTINGS_SUFFIXES, *(CODE_SUFFIXES if with_code else ()))
    weights = [file for file in files if file.path.endswith(WEIGHT_SUFFIXES)]
    weights = [file for file in weights if not file.path.startswith("consolidated")] or weights
    weights = weights or [file for file in files if file.path.endswith(PICKLED_SUFFIXES)]
    return [file for file in files if file.path.endswith(settings)] + weights


def _folder_files(filesystem: Any, path: str) -> list[Listed]:
    files = list(listing.list_folder(filesystem, path, ("",), enter=lambda _: False))
    if not files:
        raise FileNotFoundError(path)
    return files


def _web_files(found: StoredCheckpoint, filesystem: Any, path: str) -> list[Listed]:
    files = _present(filesystem, path, WEB_NAMES)
    index = next((file for file in files if file.path == INDEX_NAME), None)
    if index is not None:
        if index.size_bytes > MAX_SETTINGS_BYTES:
            raise found.refusal(f"{INDEX_NAME} has {_gb(index.size_bytes)}, which no index has")
        try:
            told = json.loads(_read(filesystem, f"{path}/{INDEX_NAME}", index.size_bytes or MAX_SETTINGS_BYTES))
            names = sorted(set(told["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise found.refusal(f"{INDEX_NAME} is damaged: it maps no tensors to files") from None
        for name in names:
            check_name(found, name)
        files += _present(filesystem, path, names)
    return files


def check_name(found: StoredCheckpoint, name: object) -> None:
    """Refuse a file of a checkpoint whose name is no plain name: copies are written under these names.

    Raises:
        ConfigError: it is empty or a path, or holds control characters.
    """
    if not is_plain_name(name):
        raise found.refusal(f"it names the file {str(name)[:100]!r}, which is no plain file name")


def _present(filesystem: Any, root: str, names: Iterable[str]) -> list[Listed]:
    """Those of the names that are files below the root."""

    def ask(name: str) -> Listed | None:
        try:
            return listing.describe(filesystem, f"{root}/{name}", name)
        except FileNotFoundError:
            return None

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        return [file for file in pool.map(ask, names) if file is not None]


# --- outlines and copies -------------------------------------------------------------------------------------------


def outline(found: StoredCheckpoint) -> Path:
    """A copy in which weight files have only their beginning and end, with holes in between: enough for checks, not for
    loading.

    Raises:
        ConfigError: a file cannot be read, or a header shows that the weights are damaged.
    """
    return _kept(found, "outlines", lambda filesystem, folder: _draw(found, filesystem, folder))


def copy(found: StoredCheckpoint) -> Path:
    """The checkpoint on this machine, read from the store where it is not here yet.

    Raises:
        ConfigError: a file cannot be read or has changed meanwhile, or the disk is too small.
    """
    return _kept(found, "copies", lambda filesystem, folder: _fetch(found, filesystem, folder))


def check_disk(found: StoredCheckpoint) -> None:
    """Refuse a checkpoint that does not fit on the disk; one that is cached already needs no space.

    Raises:
        ConfigError: the needed and the free bytes, and the folder.
    """
    folder = copies_folder()
    if _is_whole(folder / "copies" / found.key, found):
        return
    free, needed = _free_bytes(folder), found.num_bytes + SPARE_DISK_BYTES
    if free < needed:
        raise found.refusal(
            f"its copy needs {_gb(needed)} with some to spare, and {folder} has {_gb(free)} free; make room, or name "
            f"another folder in {FOLDER_VARIABLE}"
        )


def _free_bytes(folder: Path) -> int:
    there = next(place for place in (folder, *folder.parents) if place.exists())
    return shutil.disk_usage(there).free


def _kept(found: StoredCheckpoint, kind: str, make: Callable[[Any, Path], None]) -> Path:
    """The folder, or the file in it, of a finished entry; made under the lock where there is none."""
    entry = copies_folder() / kind / found.key
    place = entry / found.name if found.name else entry
    if _is_whole(entry, found):
        return place
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        with _locked(entry.with_suffix(".lock")):
            if _is_whole(entry, found):  # another process made it while this one waited
                return place
            part = entry.with_suffix(".part")
            for left_over in (part, entry):  # of a maker that was killed; of someone who cut files
                shutil.rmtree(left_over, ignore_errors=True)
            part.mkdir()
            filesystem, _ = access.open_url(found.url.rstrip("/"), found.where)
            make(filesystem, part)
            os.replace(part, entry)
    except OSError as error:
        raise found.refusal(f"its copy cannot be written: {access.reason_of(error)}") from None
    return place


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Wait for the lock of this machine's other processes; it ends with its holder, however that ends."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _is_whole(entry: Path, found: StoredCheckpoint) -> bool:
    try:
        return all((entry / file.path).stat().st_size == file.size_bytes for file in found.files)
    except OSError:
        return False


def _draw(found: StoredCheckpoint, filesystem: Any, folder: Path) -> None:
    for file in found.files:
        source = access.join(found.root, file.path)
        is_weights = file.path.endswith((*WEIGHT_SUFFIXES, *PICKLED_SUFFIXES))
        try:
            if not is_weights:
                if file.size_bytes > MAX_SETTINGS_BYTES:
                    raise found.refusal(f"{file.path} has {_gb(file.size_bytes)}, which no settings have")
                (folder / file.path).write_bytes(_read(filesystem, source, file.size_bytes))
                continue
            head = _read(filesystem, source, min(OUTLINE_BYTES, file.size_bytes))
            if file.path.endswith(WEIGHT_SUFFIXES):
                head = _whole_header(found, file, filesystem, source, head)
            start = max(len(head), file.size_bytes - OUTLINE_BYTES)
            tail = _read(filesystem, source, file.size_bytes, start) if start < file.size_bytes else b""
        except ConfigError:
            raise
        except Exception as error:
            raise found.refusal(f"{file.path} cannot be read: {access.reason_of(error)}") from None
        with (folder / file.path).open("wb") as drawn:
            drawn.write(head)
            drawn.truncate(file.size_bytes)
            drawn.seek(start)
            drawn.write(tail)


def _whole_header(found: StoredCheckpoint, file: Listed, filesystem: Any, source: str, head: bytes) -> bytes:
    """The start of a safetensors file up to the end of its header, which has to fit the file's size."""
    torn = found.refusal(f"{file.path} is torn or not safetensors")
    if len(head) < 8:
        raise torn
    (length,) = struct.unpack("<Q", head[:8])
    if length > MAX_HEADER_BYTES or 8 + length > file.size_bytes:
        raise torn
    if len(head) < 8 + length:
        head = _read(filesystem, source, 8 + length)
    try:
        header = json.loads(head[8 : 8 + length])
        ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        raise torn from None
    if 8 + length + max(ends, default=0) != file.size_bytes:
        raise torn
    return head


def _fetch(found: StoredCheckpoint, filesystem: Any, folder: Path) -> None:
    check_disk(found)
    shown = _Progress(found)
    parts = []
    for file in found.files:
        with (folder / file.path).open("wb") as made:
            made.truncate(file.size_bytes)
        parts += [(file, start) for start in range(0, file.size_bytes, PART_BYTES)]

    def read(part: tuple[Listed, int]) -> None:
        file, start = part
        end = min(start + PART_BYTES, file.size_bytes)
        try:
            data = _read(filesystem, access.join(found.root, file.path), end, start)
        except Exception as error:
            raise found.refusal(f"{file.path} cannot be read: {access.reason_of(error)}") from None
        with (folder / file.path).open("r+b") as made:
            made.seek(start)
            made.write(data)
            os.fsync(made.fileno())
        shown.add(len(data))

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        waiting = [pool.submit(read, part) for part in parts]
        try:
            for one in waiting:
                one.result()
        finally:
            for one in waiting:
                one.cancel()
    if look(found.url, found.where, _has_code(found)).revision != found.revision:
        raise found.refusal("it was changed while it was read; start again")
    shown.end(folder)


def _has_code(found: StoredCheckpoint) -> bool:
    return any(file.path.endswith(CODE_SUFFIXES) for file in found.files)


def _read(filesystem: Any, path: str, end: int | None, start: int = 0) -> bytes:
    """Bytes `start` to `end` of a file, to its end for None; exactly so many."""

    def once() -> bytes:
        data: bytes = filesystem.cat_file(path, start=start or None, end=end)
        if end is not None and len(data) != end - start:
            raise CutShort(f"{len(data)} bytes came of {end - start}")
        return data

    return retried(once)


class _Progress:
    """Progress lines of a download: the checkpoint, the share that is done, and the rate."""

    def __init__(self, found: StoredCheckpoint) -> None:
        self._found = found
        self._num_bytes = 0
        self._began_s = self._shown_s = time.monotonic()
        print(f"fetching {found.shown}: {len(found.files)} files, {_gb(found.num_bytes)}", flush=True)

    def add(self, num_bytes: int) -> None:
        """Called from the reading threads: a line more or less is no harm."""
        self._num_bytes += num_bytes
        if time.monotonic() - self._shown_s >= SHOW_EVERY_S:
            self._shown_s = time.monotonic()
            print(f"fetching {self._found.shown}: {_gb(self._num_bytes)} of {self._size}", flush=True)

    def end(self, folder: Path) -> None:
        print(f"fetched {self._found.shown}: {self._size} into {folder.with_suffix('')}", flush=True)

    @property
    def _size(self) -> str:
        rate = self._num_bytes / max(time.monotonic() - self._began_s, 1e-3)
        return f"{_gb(self._found.num_bytes)}, {rate / 1e6:,.1f} MB/s"


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.3f} GB" if num_bytes >= 1e7 else f"{num_bytes / 1e6:,.3f} MB"
