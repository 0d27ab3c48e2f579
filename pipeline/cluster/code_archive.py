"""Packs the code archive that is uploaded to a cluster: only folders listed here, so no data, results or `.env`."""

from __future__ import annotations

import os
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from configs.load import ConfigError
from configs.presets import find_job
from files.installation import IS_INSTALLED, ROOT
from files.local import open_regular
from pipeline.cluster.provenance import CODE_FOLDERS

SHIPPED_FOLDERS = () if IS_INSTALLED else ("draftfleet", *CODE_FOLDERS, "zoo")
SHIPPED_FILES = () if IS_INSTALLED else ("pyproject.toml",)
"""Nothing of an installed package is uploaded: the nodes have the same version installed."""
LEFT_OUT = ("zoo/real/", "zoo/real_vision/")
"""Folders whose weights stay: `python -m zoo.real` and `python -m zoo.real_vision` build models from them, and no job
reads them."""
MAX_ARCHIVE_BYTES = 100 * 1024**2
"""Ray's limit for the upload of a working directory."""
SUBMITTED = "submitted"
"""Folder in the archive for a job file that is outside the shipped folders."""
_DENSE_SUFFIXES = (".safetensors", ".png", ".jpg", ".mp4", ".gz", ".zst", ".parquet")
"""File types that compression does not shrink much."""
NOTHING: Mapping[str, bytes] = {}
_DATE = (1980, 1, 1, 0, 0, 0)
"""Date of all entries, so that equal content gives an equal archive, which Ray recognises by its hash."""


def pack(archive: Path, job_file: Path | None = None, root: Path = ROOT, extras: Mapping[str, bytes] = NOTHING) -> str:
    """Write the archive; return the path of the job file in it (empty without one), or the name of a shipped job file,
    which all nodes have. `extras` are files in the folder of the job file, by relative path. Raises ConfigError if the
    archive is too large."""
    files: dict[str, Path | bytes] = dict(shipped_files(root))
    is_name = job_file is not None and find_job(job_file)[0] != job_file
    job_path = str(job_file) if is_name else "" if job_file is None else place_of(job_file, root)
    if job_file is not None and not is_name:
        files[job_path] = job_file
    files |= {(PurePosixPath(job_path).parent / name).as_posix(): data for name, data in extras.items()}
    sizes: Counter[str] = Counter()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as written:
        for name, content in sorted(files.items(), key=lambda item: item[0]):
            entry = zipfile.ZipInfo(name, _DATE)
            is_dense = PurePosixPath(name).suffix in _DENSE_SUFFIXES
            entry.compress_type = zipfile.ZIP_STORED if is_dense else zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            written.writestr(entry, content if isinstance(content, bytes) else _read(content))
            sizes["/".join(Path(name).parts[:2])] += written.getinfo(name).compress_size
    num_bytes = archive.stat().st_size
    if num_bytes > MAX_ARCHIVE_BYTES:
        largest = ", ".join(f"{name} {_mb(size)}" for name, size in sizes.most_common(3))
        raise ConfigError(
            f"the checkout to upload takes {_mb(num_bytes)}, and Ray takes {_mb(MAX_ARCHIVE_BYTES)} at most; the "
            f"largest parts are {largest}. Move models and data out of {root}, and name them by absolute paths or URLs"
        )
    return job_path


def shipped_files(root: Path = ROOT) -> Iterator[tuple[str, Path]]:
    """Yield (path in the archive, path on disk) of every shipped file; hidden files, symlinks and weights of
    `LEFT_OUT` are excluded."""
    yield from ((name, root / name) for name in SHIPPED_FILES if (root / name).is_file())
    for top in SHIPPED_FOLDERS:
        for folder, folders, names in os.walk(root / top):
            folders[:] = sorted(name for name in folders if name[0] != "." and name != "__pycache__")
            for name in sorted(names):
                path = Path(folder, name)
                relative = path.relative_to(root).as_posix()
                if name[0] == "." or path.suffix in (".pyc", ".pyo") or path.is_symlink():
                    continue
                if path.suffix != ".safetensors" or not relative.startswith(LEFT_OUT):
                    yield relative, path


def place_of(job_file: Path, root: Path = ROOT) -> str:
    """Return the path of a job file in the archive: its path in the checkout if shipped, else below `SUBMITTED`."""
    path, root = job_file.resolve(), root.resolve()
    is_inside = path.is_relative_to(root) and path.relative_to(root).parts[0] in SHIPPED_FOLDERS
    return path.relative_to(root).as_posix() if is_inside else f"{SUBMITTED}/{path.name}"


def is_shipped(path: str, root: Path = ROOT) -> bool:
    """Return whether a path relative to the checkout exists and is part of the archive."""
    parts = Path(os.path.normpath(path)).parts
    return bool(parts) and parts[0] in SHIPPED_FOLDERS and (root / path).exists()


def _read(path: Path) -> bytes:
    with open_regular(path) as file:
        return file.read()


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"


def refuse_left_behind(value: Any, where: str = "") -> None:
    """Check that no model has a relative path that exists on this machine but is not uploaded. Raises ConfigError if
    there is one, with its dotted path."""
    if not isinstance(value, dict):
        return
    for name, inner in value.items():
        dotted = f"{where}.{name}" if where else name
        is_model = name == "path" and {"revision", "dtype"} <= set(value)
        if is_model and not os.path.isabs(inner) and Path(inner).exists() and not is_shipped(inner):
            raise ConfigError(
                f"{dotted}: {inner} is on this machine and is not uploaded"
                f"{f', as only {names} are' if (names := ', '.join(SHIPPED_FOLDERS)) else ''}; name a path that every "
                "node has, or a hub id"
            )
        refuse_left_behind(inner, dotted)
