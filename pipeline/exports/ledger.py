"""Records what an export has written, in `_job/exports/<name>/` of the job's output.

    export.json                 the export's settings, created before its first file
    folder.json                 the identity of the local folder in which the export writes
    done/<part>-<state>.json    the outcome of a part: a published file or a tar, and the state that it was made from

A part that was exported from the same state is not exported again, unless rows of it were refused. Records are written
after the files of their part, and writing these files again changes nothing, so a kill in between is harmless.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from configs.load import ConfigError
from configs.output import ExportConfig
from pipeline.output.files import list_published
from pipeline.storage.damage import DamagedFile
from pipeline.storage.folders import FolderId
from pipeline.storage.output_dir import DATA, ERRORS, OutputDir, as_json

EXPORTS = "_job/exports"
CLAIM, PLACE = "export.json", "folder.json"
_DONE, _REFUSED = ".json", "-refused.json"


@dataclass(frozen=True)
class Refusal:
    """A row that was not exported: an error code of `pipeline.rows.schemas.ERROR_CODES` and a message."""

    sample_id: str
    source: str
    error_type: str
    error_message: str


@dataclass(frozen=True)
class PartOutcome:
    """Rows of a part that were written, rows whose file or member existed and was left, rows that could not be written,
    and samples without a result, which were left out."""

    num_written: int = 0
    num_existing: int = 0
    refused: tuple[Refusal, ...] = ()
    left_out: tuple[Refusal, ...] = ()
    damaged: tuple[str, ...] = ()
    """Published files of the part whose bytes are not those that were written, with the reasons."""

    @property
    def is_done(self) -> bool:
        return not (self.refused or self.damaged)


@dataclass(frozen=True)
class ExportPart:
    """A unit of work: the name of its file, a hash of the state of its input, the argument of `Exporter.export`, and
    the published files with its rows."""

    name: str
    state: str
    item: Any
    work_s: float
    files: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Name of the part's record; two parts of an export have different ones."""
        stem = "".join(char if char.isalnum() else "-" for char in self.name)[-80:]
        return f"{stem}-{state_of([self.name])[:8]}-{self.state}"


def state_of(facts: Iterable[str]) -> str:
    """Return a hash (16 hex digits) of some facts, in their order."""
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class ExportLedger:
    """The records of one export; `output` is the whole output of the job, not the view of a shard."""

    output: OutputDir
    export: ExportConfig
    accepts_moved: bool = False
    """Whether another folder than that of earlier runs is accepted."""

    @cached_property
    def name(self) -> str:
        """Kind and a hash of the settings."""
        return f"{self.export.kind}-{state_of([self.export.model_dump_json()])[:8]}"

    @property
    def folder(self) -> str:
        return f"{EXPORTS}/{self.name}"

    def is_claimed(self) -> bool:
        """Return whether an earlier run has claimed the target of the export."""
        return CLAIM in self.output.list_files(self.folder)

    def refuse_moved(self, folder_id: FolderId | None, earlier: Iterable[FolderId], where: str) -> None:
        """Raise ConfigError, which begins with `where`, if the folder at the export's path is not that of earlier runs;
        before the first run, if it is none of the `earlier` ones, if there are any."""
        if folder_id is None or self.accepts_moved:
            return
        relative = f"{self.folder}/{PLACE}"
        advice = "remove it, if the folder is the right one"
        known = list(earlier)
        with contextlib.suppress(FileNotFoundError):
            recorded = FolderId.parse(self.output.read_json(relative, advice))
            if recorded is None:
                raise DamagedFile(self.output.shown(relative), relative, "it is no identity of a folder", advice)
            known = [recorded]
        if known and not any(folder.is_same(folder_id) for folder in known):
            raise ConfigError(
                f"{where} was replaced by another folder: it is {folder_id.path}, and was {known[-1].path}; move the "
                "folder back, or accept the new one by jobs.export --accept-moved"
            )

    def claim(self, folder_id: FolderId | None) -> None:
        """Record that what the target, in the folder `folder_id`, holds from now on is of this export."""
        with contextlib.suppress(FileExistsError):  # an earlier version wrote other defaults
            self.output.create_recorded(f"{self.folder}/{CLAIM}", as_json(self.export.model_dump(mode="json")))
        if folder_id is not None:
            write = self.output.write_recorded if self.accepts_moved else self.output.create_recorded
            with contextlib.suppress(FileExistsError):
                write(f"{self.folder}/{PLACE}", as_json(folder_id.to_json()))

    def pending(self, parts: Iterable[ExportPart]) -> list[ExportPart]:
        """Return the parts that are not exported, or of which rows were refused."""
        done = set(self.output.list_files(f"{self.folder}/done"))
        return [part for part in parts if part.key + _DONE not in done]

    def note(self, key: str, outcome: PartOutcome) -> None:
        """Write the outcome of a part."""
        done, refused = f"{self.folder}/done/{key}{_DONE}", f"{self.folder}/done/{key}{_REFUSED}"
        self.output.write_recorded(done if outcome.is_done else refused, as_json(asdict(outcome)))
        if outcome.is_done:
            self.output.remove(refused)

    def has_written(self, key: str) -> bool:
        """Return whether rows of a part were written, as far as its record can be read."""
        with contextlib.suppress(FileNotFoundError, DamagedFile):
            record = self.output.read_json(f"{self.folder}/done/{key}{_DONE}")
            return isinstance(record, dict) and record.get("num_written") != 0
        return False

    def forget(self, key: str) -> None:
        """Remove the record of a part, which the next run exports again."""
        self.output.remove(f"{self.folder}/done/{key}{_DONE}")


def published(output: OutputDir, *folders: str) -> dict[str, str]:
    """Return the state of every published file of all shards by its path: it differs after a file was replaced."""
    states: dict[str, str] = {}
    for folder in folders or (DATA, ERRORS):
        versions = output.list_versions(folder)
        names = [name.partition("/")[2] for name in list_published(output, folder)]
        states |= {f"{folder}/{name}": state_of([versions[name]]) for name in names if name in versions}
    return states
