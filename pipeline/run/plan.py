"""Plans a job: makes every check that is possible before Ray starts. Writes only a probe."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from actors.engine_actor import row_id
from actors.media import media_rows
from actors.serving.engine_thread import Waits
from configs.acceptance import AuditConfig
from configs.load import ConfigError
from configs.schema import CaptionJobConfig
from configs.synthesis import SynthesizeJobConfig
from files.external_code import is_external
from files.installation import is_shipped
from pipeline.cluster.partitions import Workers
from pipeline.exports.run import check_exports
from pipeline.formats import FAULT
from pipeline.manifest.done_bitmap import Ints
from pipeline.manifest.freezing import needs_of
from pipeline.manifest.manifest_parts import reopen
from pipeline.media.image_decoding import DecodeOptions, decode_table, pixels
from pipeline.media.row_weights import Weigher
from pipeline.media.video.clips import some_frames
from pipeline.output.recorded_job import RecordedJob, source_folders
from pipeline.prompts.conversations import text_of_messages
from pipeline.prompts.row_options import PromptOptions
from pipeline.reports.gallery import MAX_IMAGES_PER_ROW, SIDE_PX, ResultRow, Shown
from pipeline.reports.summary import NO_WAITS, Summary
from pipeline.resources.request_checks import check_memory, check_requests
from pipeline.resources.resolve import resolve
from pipeline.rows.schemas import job_schema
from pipeline.run.external_parts import check_contracts, external_names, install_external
from pipeline.run.job_plan import DEFAULT_RESUME, AnyPlan, JobPlan, ResumeOptions
from pipeline.run.plan_checks import check_audit, check_checks, check_models, open_output, runs_here
from pipeline.run.processing import Processing, processing_of
from pipeline.run.resume import read_prior_state
from pipeline.storage.shard import WHOLE, Shard

if TYPE_CHECKING:
    from actors.loading.pair import TextPairInfo

TRIAL_PAIR = (
    "the shipped models were trained on drawn scenes: their captions of other images are wrong; for photographs, take "
    "a pretrained target, as configs/jobs/caption_folder.yaml does"
)
DEMO_SOURCE = "demo/source"
"""Part of the paths of the scenes that `make demo` writes."""
PICTURES_AT_ONCE = 8
"""Samples that are read and decoded together for the report; bounds its memory."""


@dataclass(frozen=True)
class Plan(JobPlan):
    """Plan of a caption job. `asked` is its configuration before `lossless` changed the method; None if it did not."""

    config: CaptionJobConfig
    pair: TextPairInfo
    asked: CaptionJobConfig | None = None

    @property
    def audit(self) -> AuditConfig | None:
        return self.config.active_audit

    @property
    def warning(self) -> str:
        reads_media = self.config.reads_images or self.config.reads_videos
        is_own = not any(DEMO_SOURCE in path for path in self.config.source.paths)
        return TRIAL_PAIR if reads_media and is_own and is_shipped(self.config.model.target.path) else ""

    @property
    def identified(self) -> CaptionJobConfig:
        return self.asked or self.config

    def empty_summary(self, wall_s: float = 0.0, waits: Waits = NO_WAITS) -> Summary:
        return replace(super().empty_summary(wall_s, waits), audit=self.identified.audit)

    def lossless(self) -> Plan:
        """Return the plan of the rows that are left if the loss budget is exceeded."""
        config = self.config.model_copy(update={"method": self.config.lossless_method})
        return replace(self, config=config, asked=self.config)

    @property
    def rows_per_sample(self) -> int | None:
        if (number := self.config.sampling.num_captions_per_prompt) > 1:
            return number
        return None if self.config.multiplies_rows else 1

    @property
    def prompt_options(self) -> PromptOptions:
        return PromptOptions.of(self.config, self.pair.front_end.special_tokens)

    @property
    def fields(self) -> tuple[str, ...]:
        return tuple(self.prompt_options.fields())

    @property
    def has_conversations(self) -> bool:
        return self.prompt_options.has_conversations

    @property
    def schema(self) -> pa.Schema:
        return job_schema(self.config, self.manifest.keep)

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

    def pictures(self, rows: Sequence[ResultRow]) -> Iterator[Shown]:
        options = self.decode_options.shrunk_to(SIDE_PX)
        keys = sorted({(row["source"], row["row_index"]) for row in rows})
        for start in range(0, len(keys), PICTURES_AT_ONCE):
            samples = self.datasource.read_rows(keys[start : start + PICTURES_AT_ONCE])
            decoded = decode_table(samples, options)
            images, clips = decoded["images"].to_pylist(), decoded["videos"].to_pylist()
            named = (decoded[name].to_pylist() for name in ("sample_id", "messages"))
            for sample_id, messages, row in zip(*named, media_rows(decoded), strict=True):
                shown = (*pixels(images[row]), *some_frames(clips[row], MAX_IMAGES_PER_ROW))
                prompt = text_of_messages(messages)
                yield from ((name, shown, prompt) for name in self._row_ids(sample_id))

    def _row_ids(self, sample_id: str) -> list[str]:
        """Return the ids of the results of a decoded row."""
        number = self.config.sampling.num_captions_per_prompt
        return [sample_id] if number == 1 else [row_id(sample_id, replica) for replica in range(number)]


def make_plan(
    config: CaptionJobConfig,
    limit: int | None = None,
    runs: bool = True,
    resume: ResumeOptions = DEFAULT_RESUME,
    shard: Shard = WHOLE,
    folder: Path | None = None,
) -> Plan:
    """Check what can be checked without weights, and return the plan of the job or of one shard. External code is
    looked up in `folder` first.

    If the job `runs`, its output is probed, and a long survey of the source runs as Ray tasks. Otherwise nothing is
    started.

    Raises:
        ConfigError: a check failed; the message names the dotted path of the field.
    """
    external = install_external(external_names(config), folder)
    if config.audit is not None:
        check_audit(config.audit)
    check_checks(config)
    output = open_output(config, shard)
    if config.sink.exports and shard != WHOLE:
        raise ConfigError("sink.exports: a shard does not have all rows; run jobs.export when the shards have ended")
    resources = resolve(config, config.job)
    config = resources.apply(config)
    check_requests(config)
    check_memory(config, runs_here(config))
    config, pair = check_models(config)
    check_contracts(config.method.places)
    needs = needs_of(config.source, PromptOptions.of(config), config.sink.keep_columns)
    with Workers(config.job if runs else None) as workers:
        reopened = reopen(needs, output, resume.accept_touched, workers)
        plan = Plan(config, pair, reopened.manifest, output, limit, resume, resources=resources, external=external)
        plan = checked(plan, reopened.gone, workers, runs)
    if config.sink.exports:
        check_exports(recorded(plan), config.sink.exports, "sink.exports", runs)
    return plan


def recorded(plan: JobPlan) -> RecordedJob[Any]:
    """Return the record of the job that its attempts write into the output."""
    revision, output = plan.pair.revisions["target"], plan.output
    newest = [output.read_attempt(number) for number in output.list_attempts()[-1:]]
    folders = source_folders(newest)
    columns = tuple(plan.schema.names) if isinstance(plan.config, SynthesizeJobConfig) else ()
    return RecordedJob(
        *(output, (output,), plan.config, plan.identity.fingerprint, revision, plan.manifest), folders, columns=columns
    )


def checked(plan: AnyPlan, gone: Ints, workers: Workers, probe_output: bool) -> AnyPlan:
    """Add the state of earlier attempts to the plan and make the last checks; `gone` are ordinals of missing files."""
    plan = read_prior_state(plan, gone, workers)
    check_plan(plan, probe_output)
    check_source_code(plan)
    return plan.sized_for(plan.datasource.num_samples)


def check_source_code(plan: JobPlan) -> None:
    """Raise ConfigError if the external code of `source.kind` fails at the first sample by a fault of its own."""
    kind = plan.config.source.kind
    if not is_external(kind):
        return
    for message in plan.read_first(1)["error_message"].to_pylist():
        if (start := message.find(FAULT.format(kind))) >= 0:
            raise ConfigError(f"source.kind: {message[start:]}")


def check_plan(plan: JobPlan, probe_output: bool) -> None:
    """Raise ConfigError if there are no samples, or the output cannot be written; a shard may have no samples."""
    if not plan.datasource.planned and plan.output.shard == WHOLE:
        raise ConfigError("source.path: the files hold no samples")
    if probe_output or not plan.output.is_local:  # only a put shows whether a store can be written
        plan.output.check_writable()
