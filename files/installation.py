"""How this code was installed: from a wheel, as the package `draftfleet`, or as a checkout with top-level packages."""

from __future__ import annotations

import sys
import tomllib
from importlib import metadata
from pathlib import Path

IS_INSTALLED = __name__.startswith("draftfleet.")
"""Whether this code is the package `draftfleet` of a wheel; False in a checkout, also in an editable install."""
ROOT = Path(__file__).resolve().parents[1]
"""The folder that contains `jobs`, `configs` and the other packages: a checkout, or `draftfleet` in site-packages."""
IMPORT_ROOT = ROOT.parent if IS_INSTALLED else ROOT
"""The folder that must be on `sys.path` for imports of this code."""
SHIPPED_MODELS = "zoo/checkpoints"
"""Folder of shipped models, relative to `ROOT`."""


def version() -> str:
    """Return the version of this code, that of `pyproject.toml`."""
    if IS_INSTALLED:
        return metadata.version("draftfleet")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return str(project["project"]["version"])


def command(name: str) -> list[str]:
    """Return the words that run the command `name`, such as `train-drafter`: `draftfleet NAME` if this code is
    installed or was started by that command, `python -m draftfleet NAME` if it was started so, else `python -m
    jobs.MODULE`."""
    started = Path(sys.argv[0])
    if IS_INSTALLED or started.name == "draftfleet":
        return ["draftfleet", name]
    if started == ROOT / "draftfleet/__main__.py":
        return ["python", "-m", "draftfleet", name]
    return ["python", "-m", f"jobs.{name.replace('-', '_')}"]


def shipped_model(path: str) -> Path | None:
    """Return the folder of a shipped model, `zoo/checkpoints/NAME`; None for other paths, and for a model that is not
    part of this installation."""
    folder, _, name = path.rpartition("/")
    if folder != SHIPPED_MODELS or name in ("", ".", "..") or not (ROOT / path).is_dir():
        return None
    return ROOT / path


def is_shipped(path: str) -> bool:
    """Return whether a checkpoint's path is that of a shipped model, relative or absolute."""
    return shipped_model(path) is not None or Path(path).resolve().is_relative_to(ROOT / SHIPPED_MODELS)


def shipped_models() -> list[str]:
    """Return the paths of all shipped models of this installation, sorted."""
    return sorted(f"{SHIPPED_MODELS}/{path.parent.name}" for path in (ROOT / SHIPPED_MODELS).glob("*/config.json"))
