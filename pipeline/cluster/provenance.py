"""Determines the provenance of a run: package versions and the revision of the code."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from importlib import metadata

from files.installation import IS_INSTALLED, ROOT, version

REVISION_VARIABLE = "DRAFTFLEET_REVISION"
"""Set by the submitter of a job, because `.git` is not part of a working directory."""
PACKAGES = ("torch", "transformers", "tokenizers", "ray", "pyarrow", "numpy", "pillow", "fsspec", "pydantic")
CODE_FOLDERS = ("jobs", "pipeline", "actors", "decoding", "models", "configs", "files")


def versions() -> dict[str, str]:
    """Return the versions of Python, the platform and the packages that determine the output, by name."""
    installed = {"python": platform.python_version(), "platform": platform.platform()}
    for name in PACKAGES:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            installed[name] = "not installed"
    return installed


def code_revision() -> str:
    """Return the revision set by the submitter, else the git commit (`+changes` if files differ), else a code hash; of
    an installed package, its version and the hash."""
    given = os.environ.get(REVISION_VARIABLE)
    if given:
        return given
    if IS_INSTALLED:
        return f"version:{version()} tree:{tree_hash()}"
    commit = _git("rev-parse", "HEAD") if (ROOT / ".git").exists() else None
    if not commit:
        return f"tree:{tree_hash()}"
    changed = _git("status", "--porcelain", "--untracked-files=no")
    return f"git:{commit}{'+changes' if changed else ''}"


def tree_hash() -> str:
    """Return the first 16 hex digits of a SHA-256 over the paths and contents of all `*.py` files in `CODE_FOLDERS`.
    C++ and YAML files are not included."""
    digest = hashlib.sha256()
    for path in sorted(path for folder in CODE_FOLDERS for path in (ROOT / folder).rglob("*.py")):
        digest.update(f"{path.relative_to(ROOT).as_posix()}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def _git(*arguments: str) -> str | None:
    """Return the output of a git command; None if git is missing or fails."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
