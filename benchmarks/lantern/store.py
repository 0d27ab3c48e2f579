"""Stores results entry by entry, so that a stopped run resumes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness.results import progress, read_results, write_results

SECTIONS = ("bounds", "premise", "rows", "guidance")


class Store:
    """Results of one `kind` of condition in the JSON file at `path`."""

    def __init__(self, path: Path, kind: str) -> None:
        self.path = path
        self.kind = kind

    def open(self, settings: dict[str, Any]) -> None:
        """Keep the stored results of this kind if they have the same `settings`, else drop them."""

        def begin(data: dict[str, Any]) -> None:
            old = data["kinds"].get(self.kind)
            if old is None or old["settings"] != settings:
                if old is not None:
                    progress(f"{self.kind}: the settings have changed; all its cells are measured again")
                data["kinds"][self.kind] = {"settings": settings, **{name: {} for name in SECTIONS}}

        self.change(begin)

    def has(self, section: str, key: str, drafter: str = "") -> bool:
        """Return whether there is an entry that was measured with this drafter."""
        cell = self.read()["kinds"][self.kind][section].get(key)
        return cell is not None and cell.get("drafter", "") == drafter

    def put(self, section: str, key: str, cell: dict[str, Any]) -> None:
        self.change(lambda data: data["kinds"][self.kind][section].update({key: cell}))

    def read(self) -> Any:
        """Return the results of all kinds."""
        return read_results(self.path) if self.path.exists() else {"kinds": {}}

    def change(self, how: Callable[[dict[str, Any]], None]) -> None:
        """Apply `how` to the contents and replace the file."""
        data = self.read()
        how(data)
        part = self.path.with_suffix(".part")
        write_results(part, data)
        part.replace(self.path)
