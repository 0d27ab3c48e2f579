"""Lists the removed keys of job files: what replaces them, and the value at which an old record is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RemovedKey:
    """A key that no section has any more. `default` is the value that old records hold if a job did not set it."""

    default: Any
    replacement: str


REMOVED = {
    "controller.per_row": RemovedKey(
        False, "rows no longer compete for drafts; leave it out, and every row drafts to the depth of the controller"
    ),
}
"""Removed keys by the last two parts of their dotted path."""


def removed_key(path: list[str]) -> RemovedKey | None:
    """Return the removed key at a dotted path, None if there never was one."""
    return REMOVED.get(".".join(path[-2:]))


def without_removed(data: Any, path: tuple[str, ...] = ()) -> Any:
    """Return recorded configuration without removed keys at their defaults; other values of these keys are kept."""
    if isinstance(data, list):
        return [without_removed(value, path) for value in data]
    if not isinstance(data, dict):
        return data
    kept = {}
    for name, value in data.items():
        removed = removed_key([*path, name])
        if removed is None or value != removed.default:
            kept[name] = without_removed(value, (*path, name))
    return kept
