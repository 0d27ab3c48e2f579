"""The plan of a job of any kind: its configuration, models, source manifest, output directory and earlier attempts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import numpy as np
import pyarrow as pa

from actors.results import Stamp
from actors.serving.engine_thread import Waits
from configs.acceptance import AuditConfig
from configs.pool import MIN_BATCH_ROWS, EnginePoolConfig
from configs.schema import CaptionJobConfig
from configs.synthesis import SynthesizeJobConfig
from pipeline.manifest.datasource import SpanDatasource, read_first
from pipeline.manifest.done_bitmap import DoneBitmap, Ints
from pipeline.manifest.manifest import Manifest
from pipeline.manifest.manifest_parts import NoteCount
from pipeline.output.checksums import Verified
from pipeline.output.inventory import Inventory
from pipeline.reports.gallery import ResultRow, Shown
from pipeline.reports.summary import NO_WAITS, Summary
from pipeline.resources.resolve import CONFIGURED, Resources
from pipeline.run.external_parts import METRIC
from pipeline.storage.output_dir import OutputDir

if TYPE_CHECKING:
    from actors.loading.image_pair import ImagePairInfo
    from actors.loading.pair import TextPairInfo

MAX_BATCH_ROWS = 512
"""Maximum number of result rows of a batch. An actor that dies computes its batches again."""
MAX_BATCH_IMAGES = 128
"""Maximum number of images of a batch, which bounds its pixels: 100 MB at 512 × 512."""
BATCHES_PER_ACTOR = 64
"""Minimum batches of an actor, if batches have more than the least rows; so actors end at about the same time."""
ROWS_PER_SLOT = 2
"""Minimum number of rows in flight for each slot, so that free slots find a next row."""
ASSUMED_SLOTS = 64
"""Slots of an engine whose number is known only when it is loaded; the rows in flight bound them."""


@dataclass(frozen=True)
class ResumeOptions:
    """Resume options of the command line."""

    allow_mixed: bool = False
    retry_errors: bool = False
    accept_touched: bool = False
    """Accept source files whose time or etag has changed if their size has not (`manifest_parts.reopen`)."""
    skip_digests: bool = False
    """Compare only sizes and footers of published files."""


DEFAULT_RESUME = ResumeOptions()


@dataclass(frozen=True)
class PriorState:
    """State of the output after earlier attempts; `gone` are the ordinals of files that the source no longer has."""

    inventory: Inventory
    done: DoneBitmap
    present_ids: frozenset[str] = frozenset()
    gone: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    verified: Verified = field(default_factory=Verified)
    """Result of the comparison of published files with their checksums."""


@dataclass(frozen=True)
class JobIdentity:
    """What attempts record of a job: its configuration, the revisions of its models, and its resources."""

    config: CaptionJobConfig | SynthesizeJobConfig
    revisions: dict[str, str]
    resources: Resources

    @property
    def recorded_config(self) -> dict[str, Any]:
        """The configuration as plain data, with `num_gpus: auto` where it was."""
        return self.resources.as_configured(self.config).resolved()

    @property
    def content(self) -> dict[str, Any]:
        """The settings that determine the output's content."""
        return self.config.content(self.revisions)

    @cached_property
    def fingerprint(self) -> str:
        return self.config.fingerprint(self.revisions)

    @property
    def job_id(self) -> str:
        return f"{self.config.job.name}-{self.fingerprint}"

    def stamp(self, attempt: int) -> Stamp:
        return Stamp(self.job_id, attempt, self.fingerprint)


@dataclass(frozen=True)
class JobPlan(ABC):
    """Plan of a job of any kind: its configuration, models, source manifest and output directory.

    `limit` caps the number of samples (None: all), `prior` is the state of earlier attempts (None: no attempt yet).
    """

    config: CaptionJobConfig | SynthesizeJobConfig
    pair: TextPairInfo | ImagePairInfo
    manifest: Manifest
    output: OutputDir
    limit: int | None = None
    resume: ResumeOptions = DEFAULT_RESUME
    prior: PriorState | None = None
    resources: Resources = CONFIGURED
    external: Mapping[str, str] = field(default_factory=dict)
    """Name and SHA-256 of external code by dotted path (`pipeline.run.external_parts`)."""
    rows: SpanDatasource | None = None
    """The rows to read instead of those that earlier attempts have not finished (None: those)."""

    reads_images: ClassVar[bool] = True
    most_batch_rows: ClassVar[int] = MAX_BATCH_ROWS
    picture_columns: ClassVar[tuple[str, ...]] = ()
    """Columns of written rows that `pictures` needs, besides those of the gallery."""
    _summary: ClassVar[type[Summary]] = Summary

    @property
    @abstractmethod
    def fields(self) -> tuple[str, ...]:
        """Source columns whose values READ rows hold as one JSON object."""

    @property
    def has_conversations(self) -> bool:
        """Whether prompts are conversations in the rows of the source."""
        return False

    @property
    @abstractmethod
    def schema(self) -> pa.Schema:
        """Schema of the rows that the job writes."""

    @property
    @abstractmethod
    def rows_per_sample(self) -> int | None:
        """The number of rows of every sample; None if it varies, and columns of the rows contain it."""

    @cached_property
    def datasource(self) -> SpanDatasource:
        """The source as Ray reads it, without the samples that earlier attempts finished."""
        if self.rows is not None:
            return self.rows
        done = self.prior.done if self.prior else None
        source, counts = self.config.source, NoteCount(self.output)
        options = (self.reads_images, done, counts, self.output.shard.number, self.has_conversations)
        return SpanDatasource(source, self.manifest, self.fields, self.limit, *options)

    def read_first(self, limit: int) -> pa.Table:
        options = (self.reads_images, self.output.shard.number, self.has_conversations)
        return read_first(self.config.source, self.manifest, self.fields, limit, *options)

    @property
    def processes_in_actors(self) -> bool:
        """Whether the engine's process runs the target's processor, if it has one."""
        return True

    @property
    def num_results(self) -> int | None:
        """The number of rows to compute; None if the number of samples, or of rows per sample, is unknown."""
        num_samples = self.datasource.num_samples
        return None if num_samples is None or self.rows_per_sample is None else num_samples * self.rows_per_sample

    @property
    def present_ids(self) -> frozenset[str]:
        """Ids of rows of unfinished samples that are already in the output."""
        return self.prior.present_ids if self.prior else frozenset()

    @property
    def audit(self) -> AuditConfig | None:
        """The audit of the rows that are decoded now, if any."""
        return None

    @property
    def warning(self) -> str:
        """One line about results that the user may take for something else; empty if there is none."""
        return ""

    @property
    def identified(self) -> CaptionJobConfig | SynthesizeJobConfig:
        """The configuration that identifies the job."""
        return self.config

    @cached_property
    def identity(self) -> JobIdentity:
        code = {where: text for where, text in self.external.items() if where != METRIC}
        return JobIdentity(self.identified, {**self.pair.revisions, **code}, self.resources)

    @abstractmethod
    def pictures(self, rows: Sequence[ResultRow]) -> Iterator[Shown]:
        """Yield the sample ids of written rows with their images, shrunk, and their prompts if they are no column."""

    def empty_summary(self, wall_s: float = 0.0, waits: Waits = NO_WAITS) -> Summary:
        """Return a summary without rows; `wall_s` is the time from the first task to the last file."""
        method = self.identified.method
        return self._summary(self.identity.job_id, method.label, method.verify_mode, max(wall_s, 1e-9), waits)

    def sized_for(self, num_samples: int | None) -> Self:
        """Return this plan with `pool.batch_rows` chosen for a number of samples (None: unknown)."""
        pool = self.config.pool
        num_rows = choose_batch_rows(pool, num_samples, self.rows_per_sample or 1, self.most_batch_rows)
        pool = pool.model_copy(update={"batch_rows": num_rows})
        return replace(self, config=self.config.model_copy(update={"pool": pool}))

    def reading(self, rows: SpanDatasource, num_samples: int | None) -> Self:
        """Return this plan for the rows of a data source in place of those that earlier attempts have not finished."""
        return replace(self.sized_for(num_samples), rows=rows)


AnyPlan = TypeVar("AnyPlan", bound=JobPlan)


def choose_batch_rows(pool: EnginePoolConfig, num_samples: int | None, rows_per_sample: int, most_rows: int) -> int:
    """Return the samples of a batch; an unknown number of samples (None) counts as large.

    `most_rows` bounds the result rows of a batch, unless the slots need more.
    """
    if pool.batch_rows != "auto":
        return pool.batch_rows
    slots = ASSUMED_SLOTS if pool.slots == "auto" else pool.slots
    needed = -(-ROWS_PER_SLOT * slots // (pool.max_batches_in_flight * rows_per_sample))
    most = max(needed, most_rows // rows_per_sample, 1)
    least = max(needed, min(MIN_BATCH_ROWS, most))
    fair = most if num_samples is None else num_samples // (pool.max_size * BATCHES_PER_ACTOR)
    return max(least, min(fair, most))
