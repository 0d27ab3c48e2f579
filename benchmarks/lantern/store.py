"""Stores results entry by entry: a stopped run resumes, and two runs may write to one file."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness.results import progress, read_results, write_results

SECTIONS = ("bounds", "premise", "rows", "guidance")


class Store:
    """Results of one `kind` of condition in the JSON file at `path`, or in memory if `path` is None."""

    def __init__(self, path: Path | None, kind: str) -> None:
        self.path = path
        self.kind = kind
        self._memory: dict[str, Any] = {"kinds": {}}

    def open(self, settings: dict[str, Any]) -> None:
        """Keep the stored results of this kind if they have the same `settings`, else drop them."""

        def begin(data: dict[str, Any]) -> None:
            old = data["kinds"].get(self.kind)
            if old is None or old["settings"] != settings:
                if old is not None:
                    progress(f"{self.kind}: the settings have changed; all its cells are measured again")
                data["kinds"][self.kind] = {"settings": settings}
            for name in SECTIONS:
                data["kinds"][self.kind].setdefault(name, {})

        self.change(begin)

    def has(self, section: str, key: str, drafter: str = "") -> bool:
        """Return whether there is an entry that was measured with this drafter."""
        cell = self.read()["kinds"][self.kind][section].get(key)
        return cell is not None and cell.get("drafter", "") == drafter

    def put(self, section: str, key: str, cell: dict[str, Any]) -> None:
        self.change(lambda data: data["kinds"][self.kind][section].update({key: cell}))

    def read(self) -> dict[str, Any]:
        """Return the results of all kinds."""
        if self.path is None or not self.path.exists():
            return self._memory
        found: dict[str, Any] = read_results(self.path)
        return found

    def change(self, how: Callable[[dict[str, Any]], None]) -> None:
        """Apply `how` to the contents and replace the file, under a lock."""
        if self.path is None:
            how(self._memory)
            return
        self.path.parent.mkdir(exist_ok=True)
        lock = os.open(self.path.parent, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            data = self.read()
            how(data)
            part = self.path.with_suffix(".part")
            write_results(part, data)
            os.replace(part, self.path)
        finally:
            os.close(lock)
