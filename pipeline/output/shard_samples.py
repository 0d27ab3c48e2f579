"""Checks that rows of an output are samples of the manifest, and of the shard in whose file they are."""

from __future__ import annotations

import numpy as np

from pipeline.manifest.done_bitmap import Bools, Ints
from pipeline.manifest.manifest import Manifest
from pipeline.manifest.manifest_checks import most_rows
from pipeline.output.accounts import Rows

UNLISTED = "it holds rows of samples that the manifest does not list"


class ShardSamples:
    """The samples of one shard of a manifest."""

    def __init__(self, manifest: Manifest, shard: int = 0) -> None:
        sizes = manifest.files["size_bytes"].to_numpy()
        counts = manifest.counts
        self._limits = np.where(counts < 0, most_rows(sizes), counts)
        self._ranges = [cut.range_of(shard) for cut in manifest.cuts]

    def problem(self, rows: Rows) -> str:
        """Return what is wrong with the source positions of a file's rows; empty if all are samples of the shard."""
        files = rows.files
        if (files < 0).any() or (rows.rows < 0).any() or (rows.rows >= self._limits[files]).any():
            return UNLISTED
        if not (is_own := self._are_own(files, rows.rows)).all():
            return f"it holds {int((~is_own).sum()):,} rows of other shards"
        return ""

    def _are_own(self, files: Ints, rows: Ints) -> Bools:
        """Return for each sample whether it is in the shard."""
        is_own = np.full(len(files), not self._ranges)
        for low, high in self._ranges:
            is_after = (files > low.file) | ((files == low.file) & (rows >= low.row))
            is_own |= is_after & ((files < high.file) | ((files == high.file) & (rows < high.row)))
        return is_own
