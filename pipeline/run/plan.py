"""Plans a job: makes every check that is possible before Ray starts. Writes only a probe."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Self

import pyarrow as pa
from ray.data import Datasource

from actors.media import media_rows
from actors.results import Stamp
from actors.serving.engine_thread import Waits
from configs.acceptance import Audit
from configs.load import ConfigError
from configs.schema import CaptionJob
from configs.synthesis import SynthesizeJob
from pipeline.cluster.partitions import Workers
from pipeline.exports.run import check_exports
from pipeline.media.image_decoding import DecodeOptions, decode_table, pixels
from pipeline.media.row_weights import Weigher
from pipeline.media.video.clips import some_frames
from pipeline.output.recorded_job import RecordedJob, source_folders
from pipeline.prompts.row_options import PromptOptions
from pipeline.reports.gallery import MAX_IMAGES_PER_ROW, SIDE_PX, Images, Row
from pipeline.reports.summary import NO_WAITS, Summary
from pipeline.resources.resolve import CONFIGURED, Resources, resolve
from pipeline.rows.schemas import result_schema
from pipeline.run.batches import MOST_BATCH_ROWS, choose_batch_rows
from pipeline.run.checks import check_audit, check_models, open_output
from pipeline.run.processing import Processing, processing_of
from pipeline.run.resume import DEFAULT_RESUME, AnyPlan, Earlier, ResumeOptions, read_earlier
from pipeline.source.datasource import SpanDatasource, read_first
from pipeline.source.done_bitmap import Ints
from pipeline.source.manifest import Manifest, needs_of
from pipeline.source.manifest_parts import NoteCount, reopen
from pipeline.storage.output_dir import OutputDir
from pipeline.storage.shard import WHOLE, Shard

if TYPE_CHECKING:
    from actors.loading.image_pair import ImagePairInfo
    from actors.loading.pair import PairInfo

PICTURES_AT_ONCE = 8
"""Samples that are read and decoded together for the report; bounds its memory."""


@dataclass(frozen=True)
class JobPlan(ABC):
    """Plan of a job of any kind: its configuration, models, source manifest and output directory.

    `limit` caps the number of samples (None: all), `earlier` is the state of earlier attempts (None: no attempt yet).
    """

    config: CaptionJob | SynthesizeJob
    pair: PairInfo | ImagePairInfo
    manifest: Manifest
    output: OutputDir
    limit: int | None = None
    resume: ResumeOptions = DEFAULT_RESUME
    earlier: Earlier | None = None
    resources: Resources = CONFIGURED

    reads_images: ClassVar[bool] = True
    most_batch_rows: ClassVar[int] = MOST_BATCH_ROWS
    picture_columns: ClassVar[tuple[str, ...]] = ()
    """Columns of written rows that `pictures` needs, besides those of the gallery."""
    _summary: ClassVar[type[Summary]] = Summary

    @property
    @abstractmethod
    def fields(self) -> tuple[str, ...]:
        """Source columns whose values READ rows hold as one JSON object."""

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
        done = self.earlier.done if self.earlier else None
        source, counts = self.config.source, NoteCount(self.output)
        shard = self.output.shard.number
        return SpanDatasource(source, self.manifest, self.fields, self.limit, self.reads_images, done, counts, shard)

    def read_first(self, limit: int) -> pa.Table:
        shard = self.output.shard.number
        return read_first(self.config.source, self.manifest, self.fields, limit, self.reads_images, shard)

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
        return self.earlier.present_ids if self.earlier else frozenset()

    @property
    def audit(self) -> Audit | None:
        """The audit of the rows that are decoded now, if any."""
        return None

    @property
    def identity(self) -> CaptionJob | SynthesizeJob:
        """The configuration that identifies the job, which attempts record."""
        return self.config

    @property
    def recorded_config(self) -> dict[str, Any]:
        """`identity` as plain data, with `num_gpus: auto` where it was."""
        return self.resources.as_configured(self.identity).resolved()

    @property
    def content(self) -> dict[str, Any]:
        """The settings that determine the output's content."""
        return self.identity.content(self.pair.revisions)

    @cached_property
    def fingerprint(self) -> str:
        return self.identity.fingerprint(self.pair.revisions)

    @property
    def job_id(self) -> str:
        return f"{self.config.job.name}-{self.fingerprint}"

    @abstractmethod
    def pictures(self, rows: Sequence[Row]) -> Iterator[tuple[str, Images]]:
        """Yield the sample ids of written rows with their images, shrunk; rows without images are left out."""

    def empty_summary(self, wall_s: float = 0.0, waits: Waits = NO_WAITS) -> Summary:
        """Return a summary without rows; `wall_s` is the time from the first task to the last file."""
        method = self.identity.method
        return self._summary(self.job_id, method.label, method.verify_mode, max(wall_s, 1e-9), waits)

    def stamp(self, attempt: int) -> Stamp:
        return Stamp(self.job_id, attempt, self.fingerprint)

    def reading(self, datasource: Datasource, num_samples: int | None) -> Self:
        """Return this plan for the rows of a data source, with `pool.batch_rows` chosen for them."""
        pool = self.config.pool
        num_rows = choose_batch_rows(pool, num_samples, self.rows_per_sample or 1, self.most_batch_rows)
        pool = pool.model_copy(update={"batch_rows": num_rows})
        plan = replace(self, config=self.config.model_copy(update={"pool": pool}))
        vars(plan)["datasource"] = datasource  # the cached property
        return plan


@dataclass(frozen=True)
class Plan(JobPlan):
    """Plan of a caption job. `asked` is its configuration before `lossless` changed the method; None if it did not."""

    config: CaptionJob
    pair: PairInfo
    asked: CaptionJob | None = None

    @property
    def audit(self) -> Audit | None:
        return self.config.active_audit

    @property
    def identity(self) -> CaptionJob:
        return self.asked or self.config

    def empty_summary(self, wall_s: float = 0.0, waits: Waits = NO_WAITS) -> Summary:
        return replace(super().empty_summary(wall_s, waits), audit=self.identity.audit)

    def lossless(self) -> Plan:
        """Return the plan of the rows that are left if the loss budget is exceeded."""
        config = self.config.model_copy(update={"method": self.config.lossless_method})
        return replace(self, config=config, asked=self.config)

    @property
    def rows_per_sample(self) -> int | None:
        return None if self.config.multiplies_rows else 1

    @property
    def prompt_options(self) -> PromptOptions:
        return PromptOptions.of(self.config, self.pair.front_end.special_tokens)

    @property
    def fields(self) -> tuple[str, ...]:
        return tuple(self.prompt_options.fields())

    @property
    def schema(self) -> pa.Schema:
        config = self.config
        return result_schema(self.manifest.keep, config.sink.keep_tokens, config.audit is not None)

    @property
    def decode_options(self) -> DecodeOptions:
        return DecodeOptions.of(self.config.source, self.manifest.root, self.prompt_options)

    @cached_property
    def processing(self) -> Processing | None:
        """How decoding tasks run the target's processor; None if the actors run it."""
        return processing_of(self.config, self.pair)

    @property
    def processes_in_actors(self) -> bool:
        return self.processing is None

    @property
    def weigher(self) -> Weigher:
        outputs = () if self.processing is None else (self.processing.sizes, self.processing.keeps_pixels)
        return Weigher.of(self.config.source, self.config.pool.rows_per_batch, self.prompt_options, *outputs)

    def decode_first(self, limit: int) -> Iterator[pa.Table]:
        """Yield the first `limit` samples, decoded in this process, in one table each."""
        rows = self.read_first(limit)
        for start in range(rows.num_rows):
            yield decode_table(rows.slice(start, 1), self.decode_options)

    def pictures(self, rows: Sequence[Row]) -> Iterator[tuple[str, Images]]:
        options = self.decode_options.shrunk_to(SIDE_PX)
        places = sorted({(row["source"], row["row_index"]) for row in rows})
        for start in range(0, len(places), PICTURES_AT_ONCE):
            samples = self.datasource.read_rows(places[start : start + PICTURES_AT_ONCE])
            decoded = decode_table(samples, options)
            images, clips = decoded["images"].to_pylist(), decoded["videos"].to_pylist()
            for sample_id, row in zip(decoded["sample_id"].to_pylist(), media_rows(decoded), strict=True):
                yield sample_id, (*pixels(images[row]), *some_frames(clips[row], MAX_IMAGES_PER_ROW))


def make_plan(
    config: CaptionJob,
    limit: int | None = None,
    runs: bool = True,
    resume: ResumeOptions = DEFAULT_RESUME,
    shard: Shard = WHOLE,
) -> Plan:
    """Check what can be checked without weights, and return the plan of the job or of one shard.

    If the job `runs`, its output is probed, and a long survey of the source runs as Ray tasks. Otherwise nothing is
    started.

    Raises:
        ConfigError: a check failed; the message names the dotted path of the field.
    """
    if config.audit is not None:
        check_audit(config.audit)
    output = open_output(config, shard)
    if config.sink.exports and shard != WHOLE:
        raise ConfigError("sink.exports: a shard does not have all rows; run jobs.export when the shards have ended")
    resources = resolve(config, config.job)
    config, pair = check_models(resources.apply(config))
    needs = needs_of(config.source, PromptOptions.of(config), config.sink.keep_columns)
    with Workers(config.job if runs else None) as workers:
        reopened = reopen(needs, output, resume.accept_touched, workers)
        plan = Plan(config, pair, reopened.manifest, output, limit, resume, resources=resources)
        plan = checked(plan, reopened.gone, workers, runs)
    if config.sink.exports:
        check_exports(recorded(plan), config.sink.exports, "sink.exports", runs)
    return plan


def recorded(plan: Plan) -> RecordedJob:
    """Return the record of the job that its attempts write into the output."""
    revision, output = plan.pair.revisions["target"], plan.output
    newest = [output.read_attempt(number) for number in output.list_attempts()[-1:]]
    folders = source_folders(newest)
    return RecordedJob(output, (output,), plan.config, plan.fingerprint, revision, plan.manifest, folders)


def checked(plan: AnyPlan, gone: Ints, workers: Workers, probe_output: bool) -> AnyPlan:
    """Add the state of earlier attempts to the plan and make the last checks; `gone` are ordinals of missing files."""
    plan = read_earlier(plan, gone, workers)
    check_plan(plan, probe_output)
    return plan.reading(plan.datasource, plan.datasource.num_samples)


def check_plan(plan: JobPlan, probe_output: bool) -> None:
    """Raise ConfigError if there are no samples, or the output cannot be written; a shard may have no samples."""
    if not plan.datasource.planned and plan.output.shard == WHOLE:
        raise ConfigError("source.path: the files hold no samples")
    if probe_output:
        plan.output.check_writable()
