"""Checks that rows of an output are samples of the manifest, and of the shard in whose file they are."""

from __future__ import annotations

import numpy as np

from pipeline.manifest.done_bitmap import Bools, Ints
from pipeline.manifest.manifest import Manifest
from pipeline.manifest.manifest_checks import most_rows
from pipeline.output.accounts import Rows

UNLISTED = "it holds rows of samples that the manifest does not list"


class Places:
    """The samples of one shard of a manifest."""

    def __init__(self, manifest: Manifest, shard: int = 0) -> None:
        sizes = manifest.files["size_bytes"].to_numpy()
        counts = manifest.counts
        self._limits = np.where(counts < 0, most_rows(sizes), counts)
        self._ranges = [cut.range_of(shard) for cut in manifest.cuts]

    def problem(self, rows: Rows) -> str:
        """Return what is wrong with the places of the rows of a file; empty if all are samples of the shard."""
        files = rows.files
        if (files < 0).any() or (rows.rows < 0).any() or (rows.rows >= self._limits[files]).any():
            return UNLISTED
        if not (own := self._are_own(files, rows.rows)).all():
            return f"it holds {int((~own).sum()):,} rows of other shards"
        return ""

    def _are_own(self, files: Ints, rows: Ints) -> Bools:
        """Return for each sample whether it is in the shard."""
        own = np.full(len(files), not self._ranges)
        for low, high in self._ranges:
            is_after = (files > low.file) | ((files == low.file) & (rows >= low.row))
            own |= is_after & ((files < high.file) | ((files == high.file) & (rows < high.row)))
        return own
