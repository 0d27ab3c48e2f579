"""Resolves named methods: `method: sage` is replaced by the `method` section of `configs/methods/sage.yaml`."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from configs.presets import JOBS, METHODS, PRESETS
from configs.yaml_file import ConfigError, read_yaml


def resolve_methods(data: dict[str, Any], origin: str) -> None:
    """Replace the method names in `method` and in `method.auto.candidates` by their sections, in place.

    Raises:
        ConfigError: no method has this name.
    """
    if isinstance(data.get("method"), str):
        data["method"] = named_method(data["method"], f"{origin}: method")
    auto = data["method"].get("auto") if isinstance(data.get("method"), dict) else None
    candidates = auto.get("candidates") if isinstance(auto, dict) else None
    if isinstance(candidates, list):
        for index, candidate in enumerate(candidates):
            if isinstance(candidate, str):
                candidates[index] = named_method(candidate, f"{origin}: method.auto.candidates.{index}")


def method_names() -> list[str]:
    """Return the names of all methods in `configs/methods`, sorted."""
    return sorted(path.stem for path in METHODS.glob("*.yaml"))


def named_method(name: str, origin: str) -> dict[str, Any]:
    """Read the section of a named method.

    Raises:
        ConfigError: no method has this name.
    """
    names = method_names()
    if name not in names:
        close = difflib.get_close_matches(name, names, n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else f"choose one of {', '.join(names)}"
        raise ConfigError(f"{origin}: no method is named {name!r}; {hint}")
    section = read_yaml(METHODS / f"{name}.yaml")["method"]
    assert isinstance(section, dict)
    return section


def replacement_of(path: str | Path) -> str | None:
    """Return the command-line arguments that replace a job file of an earlier version, or None.

    Earlier job files `configs/NAME.yaml` are now `configs/jobs/NAME.yaml`; some are a shared job file with overrides.
    """
    path = Path(path)
    if path.parent.name != "configs" or path.suffix != ".yaml":
        return None
    job, *overrides = PRESETS.get(path.stem, (path.stem,))
    if not (JOBS / f"{job}.yaml").is_file():
        return None
    return " ".join([f"--config {path.parent / 'jobs' / job}.yaml", *overrides])
