"""Stores results entry by entry, so that a stopped run resumes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness.results import progress, read_results, write_results

SECTIONS = ("bounds", "premise", "rows", "guidance")


KEYS = ("kind", "section", "row")
COUNTS = ("image", "num_steps", "num_accepted", "num_right", "num_stated")
FLAGS = ("whole", "equal")
"""Columns of the counts of one image of one row; steps and `equal` are null for images that no method decoded."""


class Store:
    """Results of one `kind` of condition in the JSON file at `path`, and the counts of single images beside it.

    The counts are in samples/NAME.parquet.
    """

    def __init__(self, path: Path, kind: str) -> None:
        self.path = path
        self.kind = kind
        self.samples_path = path.parent / "samples" / f"{path.stem}.parquet"

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

    def put(self, section: str, key: str, cell: dict[str, Any], samples: dict[str, list[Any]] | None = None) -> None:
        """Store an entry, and the counts of its images by column."""
        if samples:
            self._put_samples(section, key, samples)
        self.change(lambda data: data["kinds"][self.kind][section].update({key: cell}))

    def _put_samples(self, section: str, key: str, samples: dict[str, list[Any]]) -> None:
        place = {"kind": self.kind, "section": section, "row": key}
        rows = [row for row in self.read_samples() if any(row[name] != value for name, value in place.items())]
        columns = zip(*samples.values(), strict=True)
        rows += [place | {"image": i} | dict(zip(samples, values, strict=True)) for i, values in enumerate(columns)]
        import pyarrow as pa
        import pyarrow.parquet as pq

        schema = pa.schema(
            [
                *(pa.field(name, pa.dictionary(pa.int16(), pa.string())) for name in KEYS),
                *(pa.field(name, pa.int32()) for name in COUNTS),
                *(pa.field(name, pa.bool_()) for name in FLAGS),
            ]
        )
        self.samples_path.parent.mkdir(exist_ok=True)
        pq.write_table(pa.Table.from_pylist(rows, schema=schema), self.samples_path, compression="zstd")

    def read_samples(self) -> list[dict[str, Any]]:
        """Return the counts of all images of all kinds; none if they were not written."""
        if not self.samples_path.exists():
            return []
        import pyarrow.parquet as pq

        rows: list[dict[str, Any]] = pq.read_table(self.samples_path).to_pylist()
        return rows

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
