"""Exports that write into a folder of their own."""

from __future__ import annotations

from typing import Any

from configs.load import ConfigError
from pipeline.exports.ledger import ExportLedger
from pipeline.manifest.overlap import refuse_overlap, refuse_shared
from pipeline.output.recorded_job import RecordedJob
from pipeline.storage.folders import FolderId
from pipeline.storage.tree import Tree


def target_tree(job: RecordedJob[Any], path: str, dotted: str) -> Tree:
    """Return the target folder of an export; ConfigError if it contains, or is inside, the source or the output."""
    refuse_overlap(job.config.source, path, dotted)
    refuse_shared(job.output.url, path, dotted)
    return Tree(path, dotted)


class OwnFolder:
    """Base of exports into `tree`, a folder that has no other files."""

    tree: Tree

    @property
    def folder_id(self) -> FolderId | None:
        """The identity of a local target folder."""
        return self.tree.identity

    def check(self, ledger: ExportLedger) -> None:
        """Raise ConfigError if the folder cannot be written, was replaced by another one since an earlier run, or has
        files and this export has not claimed it."""
        tree = self.tree
        tree.check_writable()
        ledger.refuse_moved(tree.identity, (), f"{tree.dotted}: {tree.shown()}")
        if not ledger.is_claimed() and (names := tree.list_files()):
            raise ConfigError(
                f"{tree.dotted}: {tree.shown()} is not empty: it holds {names[0]}; choose another folder, or remove "
                "its files (an export with other settings has a folder of its own)"
            )
