"""Results that grow cell by cell: a run that was stopped goes on where it stood, and two may write side by side.

Owns the file and nothing of what cells mean.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

SECTIONS = ("bounds", "premise", "rows", "guidance")


class Store:
    """Cells of one `kind` in the JSON file at `path`; without a path they are kept in memory."""

    def __init__(self, path: Path | None, kind: str) -> None:
        self.path = path
        self.kind = kind
        self._memory: dict[str, Any] = {"kinds": {}}

    def open(self, settings: dict[str, Any]) -> None:
        """Keep the kind's cells if they were made under `settings` (plain JSON data), else begin anew."""

        def begin(data: dict[str, Any]) -> None:
            there = data["kinds"].get(self.kind)
            if there is None or there["settings"] != settings:
                if there is not None:
                    print(f"{self.kind}: the settings have changed; its cells are made anew", file=sys.stderr)
                data["kinds"][self.kind] = {"settings": settings}
            for name in SECTIONS:
                data["kinds"][self.kind].setdefault(name, {})

        self.change(begin)

    def has(self, section: str, key: str, drafter: str = "") -> bool:
        """Whether a cell is there, and was made with this drafter."""
        cell = self.read()["kinds"][self.kind][section].get(key)
        return cell is not None and cell.get("drafter", "") == drafter

    def put(self, section: str, key: str, cell: dict[str, Any]) -> None:
        """Write one cell at once."""
        self.change(lambda data: data["kinds"][self.kind][section].update({key: cell}))

    def read(self) -> dict[str, Any]:
        """All that is there, of every kind."""
        if self.path is None or not self.path.exists():
            return self._memory
        found: dict[str, Any] = json.loads(self.path.read_text())
        return found

    def change(self, how: Callable[[dict[str, Any]], None]) -> None:
        """Read, change and write the whole while no other process does."""
        if self.path is None:
            how(self._memory)
            return
        self.path.parent.mkdir(exist_ok=True)
        held = os.open(self.path.parent, os.O_RDONLY)
        try:
            fcntl.flock(held, fcntl.LOCK_EX)
            data = self.read()
            how(data)
            part = self.path.with_suffix(".part")
            part.write_text(json.dumps(data, indent=1) + "\n")
            os.replace(part, self.path)
        finally:
            os.close(held)
