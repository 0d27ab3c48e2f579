"""Downloads wheels from the package index, without installing them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TIMEOUT_S = 1200
"""Bound of one download; pip prints its own progress."""


class NotDownloaded(Exception):
    """Raised if pip cannot download a wheel; the message states the reason."""


def download(package: str, version: str, folder: Path) -> Path:
    """Download a wheel for this interpreter into a folder of its own in `folder`, without its dependencies; return its
    path. Raises NotDownloaded."""
    own = folder / package
    own.mkdir(parents=True, exist_ok=True)
    arguments = ["download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--dest", str(own)]
    command = [sys.executable, "-m", "pip", *arguments, f"{package}=={version}"]
    try:
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, timeout=TIMEOUT_S)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise NotDownloaded(f"pip could not download {package}=={version}: {error}") from None
    (wheel,) = own.glob("*.whl")
    return wheel
