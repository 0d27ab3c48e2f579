"""Provenance of a run: versions, and the revision of the code."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REVISION_VARIABLE = "DRAFTFLEET_REVISION"
"""Set by the submitter of a job, because `.git` is not part of a working directory."""
PACKAGES = ("torch", "transformers", "tokenizers", "ray", "pyarrow", "numpy", "pillow", "fsspec", "pydantic")
CODE_FOLDERS = ("jobs", "pipeline", "actors", "decoding", "models", "configs")


def versions() -> dict[str, str]:
    """The versions of Python, of the platform and of the packages that decide the output."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def code_revision() -> str:
    """The submitter's revision, the git commit (with `+changes` when files differ from it), or a hash of the code."""
    given = os.environ.get(REVISION_VARIABLE)
    if given:
        return given
    commit = _git("rev-parse", "HEAD") if (ROOT / ".git").exists() else None
    if not commit:
        return f"tree:{tree_hash()}"
    changed = _git("status", "--porcelain", "--untracked-files=no")
    return f"git:{commit}{'+changes' if changed else ''}"


def tree_hash() -> str:
    """SHA-256 over the paths and contents of the code, 16 hex digits."""
    digest = hashlib.sha256()
    for path in sorted(path for folder in CODE_FOLDERS for path in (ROOT / folder).rglob("*.py")):
        digest.update(f"{path.relative_to(ROOT).as_posix()}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def _git(*arguments: str) -> str | None:
    """Output of git, or None if there is no git or it fails."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
