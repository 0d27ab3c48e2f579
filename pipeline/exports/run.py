"""Runs the exports of a job's results: checks all of them, then exports the parts that are not in their ledgers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from configs.load import ConfigError
from configs.output import (
    DatasetExportConfig,
    ExportConfig,
    FileExportConfig,
    ImageFolderExportConfig,
    LanceExportConfig,
    OpenAIBatchExportConfig,
    SidecarExportConfig,
    TarExportConfig,
)
from configs.pool import JobSectionConfig
from files.local import OutsideRoots
from files.plurals import counted
from pipeline.cluster.partitions import Partition, Workers
from pipeline.exports.dataset import Dataset
from pipeline.exports.image_files import ImageFiles
from pipeline.exports.image_tars import ImageTars
from pipeline.exports.lance import LanceColumn
from pipeline.exports.ledger import ExportLedger, ExportPart, PartOutcome
from pipeline.exports.openai_batch import OpenAIBatch
from pipeline.exports.sidecars import Sidecars
from pipeline.exports.webdataset import WebDataset
from pipeline.output.checksums import problem_of
from pipeline.output.recorded_job import RecordedJob
from pipeline.storage import access
from pipeline.storage.first_touch import check_stores
from pipeline.storage.folders import FolderId

MAX_NAMED = 5


class Exporter(Protocol):
    """An export of one kind; is sent to Ray tasks."""

    @property
    def folder_id(self) -> FolderId | None:
        """The identity of the local folder in which the export writes; None for stores."""

    def check(self, ledger: ExportLedger) -> None:
        """Raise ConfigError if the target cannot be written, or has content that is not of this export."""

    def parts(self) -> list[ExportPart]:
        """Return the parts that can be exported now."""

    def export(self, item: Any) -> PartOutcome:
        """Export one part; doing it again changes nothing."""

    def finish(self, ledger: ExportLedger) -> None:
        """Write what is common to all parts."""


@dataclass
class ExportReport:
    """The result of one export in this run: its name, its numbers of parts and rows, and the first refused rows."""

    name: str
    folder: str
    num_parts: int
    num_before: int
    """Parts that earlier runs have exported."""
    num_written: int = 0
    num_existing: int = 0
    num_left_out: int = 0
    num_refused: int = 0
    refused: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    """Published files whose bytes are not those that were written, with the reasons."""

    def add(self, outcome: PartOutcome) -> None:
        self.num_written += outcome.num_written
        self.num_existing += outcome.num_existing
        self.num_left_out += len(outcome.left_out)
        self.num_refused += len(outcome.refused)
        self.damaged += outcome.damaged
        for refusal in outcome.refused[: MAX_NAMED - len(self.refused)]:
            self.refused.append(f"{refusal.sample_id or refusal.source}: {refusal.error_type}: {refusal.error_message}")

    def lines(self) -> list[str]:
        text = f"{self.name}: {self.num_written:,} rows written"
        text += f", {self.num_existing:,} exist already" if self.num_existing else ""
        text += f", {self.num_left_out:,} without a result" if self.num_left_out else ""
        text += f", {self.num_refused:,} refused ({self.folder}/done/*-refused.json)" if self.num_refused else ""
        text += f"; {counted(self.num_parts, 'file or shard', 'files or shards')}, {self.num_before:,} before"
        damaged = [
            f"  damaged: {line}; the job's own command makes its rows again" for line in self.damaged[:MAX_NAMED]
        ]
        return [text, *(access.printable(f"  {line}") for line in self.refused), *map(access.printable, damaged)]


def check_exports(
    job: RecordedJob[Any], exports: Sequence[ExportConfig], dotted: str, runs: bool = True, accepts_moved: bool = False
) -> list[Exporter]:
    """Return the exporters; ConfigError if one does not fit the job or, if it `runs`, its target cannot be written, or
    is another folder than before and not `accepts_moved`."""
    targets: dict[Any, int] = {}
    exporters: list[Exporter] = []
    if not job.makes_images and any(map(_reads_source, exports)):
        check_stores("source.path", job.config.source.paths)
    for number, export in enumerate(exports):
        target = (export.format, export.names) if isinstance(export, SidecarExportConfig) else export.path.rstrip("/")
        if (first := targets.setdefault(target, number)) != number:
            raise ConfigError(f"{dotted}.{number}: writes the same files as {dotted}.{first}; leave one out")
        if not isinstance(export, SidecarExportConfig):
            check_stores(f"{dotted}.{number}.path", [export.path])
        exporters.append(_exporter(job, export, f"{dotted}.{number}"))
        if runs:
            exporters[-1].check(ExportLedger(job.output, export, accepts_moved))
    return exporters


def _reads_source(export: ExportConfig) -> bool:
    return not isinstance(export, LanceExportConfig | DatasetExportConfig | OpenAIBatchExportConfig) or (
        isinstance(export, DatasetExportConfig) and export.images != "none"
    )


def _exporter(job: RecordedJob[Any], export: ExportConfig, dotted: str) -> Exporter:
    if isinstance(export, TarExportConfig):
        return ImageTars.of(job, export, dotted)
    if isinstance(export, FileExportConfig | ImageFolderExportConfig):
        return ImageFiles.of(job, export, dotted)
    if job.makes_images and not isinstance(export, DatasetExportConfig):
        raise ConfigError(
            f"{dotted}.kind: {export.kind} exports texts, and the job makes images; take tars, files, imagefolder or "
            "dataset"
        )
    if isinstance(export, SidecarExportConfig):
        return Sidecars.of(job, export, dotted)
    if isinstance(export, DatasetExportConfig):
        return Dataset.of(job, export, dotted)
    if isinstance(export, OpenAIBatchExportConfig):
        return OpenAIBatch.of(job, export, dotted)
    if isinstance(export, LanceExportConfig):
        return LanceColumn.of(job, export, dotted)
    return WebDataset.of(job, export, dotted)


def run_exports(
    job: RecordedJob[Any],
    exports: Sequence[ExportConfig],
    ray: JobSectionConfig,
    dotted: str = "exports",
    accepts_moved: bool = False,
) -> list[ExportReport]:
    """Export what is published and not exported yet. A job may still run; the next call exports the rest.

    Raises:
        ConfigError: an export does not fit the job, or its target has other content; then nothing was exported.
        RuntimeError: a published file is damaged.
        OSError: a store failed; the next call resumes.
    """
    exporters = check_exports(job, exports, dotted, accepts_moved=accepts_moved)
    ledgers = [ExportLedger(job.output, export, accepts_moved) for export in exports]
    for exporter, ledger in zip(exporters, ledgers, strict=True):
        ledger.claim(exporter.folder_id)
    with Workers(ray) as workers:
        return [_run(*pair, workers) for pair in zip(exporters, ledgers, strict=True)]


def _run(exporter: Exporter, ledger: ExportLedger, workers: Workers) -> ExportReport:
    parts = exporter.parts()
    pending = ledger.pending(parts)
    partitions = [Partition((part.key, part.item, part.files), 1, part.name, part.name) for part in pending]
    work_s = sum(part.work_s for part in pending)
    report = ExportReport(ledger.name, ledger.folder, len(pending), len(parts) - len(pending))
    for outcome in workers.map(partial(_export, exporter, ledger), partitions, work_s, "export", ledger.name):
        report.add(outcome)
    exporter.finish(ledger)
    return report


def _export(exporter: Exporter, ledger: ExportLedger, item: tuple[str, Any, Sequence[str]]) -> PartOutcome:
    """Export a part and record its outcome; runs in this process or in a Ray task, also twice."""
    key, argument, files = item
    try:
        outcome = exporter.export(argument)
    except OutsideRoots as error:
        raise RuntimeError(f"{ledger.name}: {access.reason_of(error)}") from None
    problems = ((name, problem_of(ledger.output, name)) for name in files)
    damaged = tuple(f"{name}: {problem}" for name, problem in problems if problem)
    outcome = replace(outcome, damaged=damaged)
    ledger.note(key, outcome)
    return outcome
