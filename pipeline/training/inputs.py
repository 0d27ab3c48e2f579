"""Opens and checks the rows that a job trains on: those of a source, or the answered rows of a caption job's source."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field, replace
from typing import Any

from configs.load import ConfigError
from configs.schema import CaptionJobConfig, CheckpointConfig
from configs.source import JobOutputConfig, SourceConfig
from configs.training import TrainDrafterJobConfig
from models.heads.training.trainer import key_of
from pipeline.manifest.datasource import SpanDatasource
from pipeline.manifest.manifest import Manifest
from pipeline.manifest.row_stream import SpanSource
from pipeline.media.image_decoding import DecodeOptions
from pipeline.output.recorded_job import RecordedJob, read_job, rows_without
from pipeline.prompts.row_options import PromptOptions
from pipeline.run.external_parts import install_recorded
from pipeline.storage import access
from pipeline.storage.output_dir import OutputDir
from pipeline.training.answers import MAX_ANSWERS, AnsweredSpans, Answers, collect, load, store
from pipeline.training.rows import freeze_source


@dataclass(frozen=True)
class Inputs:
    """A source, its manifest, the prompt of its rows, and limits of the run. For a `job_output`, also the recorded
    `job` and, in a run that has begun, its stored `answers`; the manifest then has the answered files only.
    `template_options` are those of the target's chat template."""

    source: SourceConfig
    manifest: Manifest
    prompt_options: PromptOptions
    max_rows: int | None
    max_tokens: int
    job: RecordedJob[CaptionJobConfig] | None = None
    answers: Answers | None = None
    template_options: dict[str, Any] = field(default_factory=dict)

    def check_target(self, training: TrainDrafterJobConfig, revision: str) -> None:
        """Raise ConfigError if the answers are those of another revision of the target."""
        if self.job is not None:
            check_revision(self.job, training.target, revision)

    def begun(self, output: OutputDir) -> Inputs:
        """Choose and store the answers of a new run; raise ConfigError if there are none, or their rows are gone."""
        if self.job is None:
            return self
        chosen = collect(self.job, MAX_ANSWERS if self.max_rows is None else self.max_rows, self.max_tokens)
        self._with(chosen)  # checks the source before anything is written
        return self._with(store(chosen, output))

    def resumed(self, output: OutputDir) -> Inputs:
        """Read the stored answers of a run that has begun; raise ConfigError as `begun`."""
        return self if self.job is None else self._with(load(output))

    def _with(self, answers: Answers) -> Inputs:
        assert self.job is not None
        return replace(self, answers=answers, manifest=self.job.reopened(self.job.files_of(answers.table)))

    def spans(self) -> SpanSource:
        """Return the spans of the rows to train on."""
        fields = tuple(self.prompt_options.fields())
        if self.job is None:
            return SpanDatasource(self.source, self.manifest, fields, self.max_rows)
        assert self.answers is not None
        skipped = rows_without(self.answers.table, self.manifest)
        has_conversations = self.prompt_options.has_conversations
        spans = SpanDatasource(self.source, self.manifest, fields, done=skipped, has_conversations=has_conversations)
        return AnsweredSpans(spans, self.answers)

    def decode_options(self, special_tokens: tuple[str, ...]) -> DecodeOptions:
        """Return how rows are decoded; `special_tokens` in columns stay text."""
        options = replace(self.prompt_options, special_tokens=special_tokens)
        return DecodeOptions.of(self.source, self.manifest.root, options)

    def describe(self) -> dict[str, Any]:
        """Return the identity of the rows: their files' number and a hash of paths, sizes and version tokens; for a
        `job_output`, also the fingerprint of the job, and number and hash of the answers."""
        listed = self.manifest.files.select(["path", "size_bytes", "token"]).to_pydict()
        description = {"num_files": self.manifest.num_files, "listing": f"{key_of(json.dumps(listed)):016x}"}
        if self.job is None or self.answers is None:
            return description
        return {**description, "config_fingerprint": self.job.fingerprint, "answers": self.answers.describe()}


def open_inputs(job: TrainDrafterJobConfig) -> Inputs:
    """Open the job's source; raise ConfigError if it is missing, empty, lacks a column, or is an output of a job that
    cannot teach the target's drafter."""
    training = job.training
    if isinstance(job.source, JobOutputConfig):
        recorded = read_job(job.source.path, "source.path")
        check_answers(recorded, job.target)
        install_recorded(recorded.config, recorded.source_code, recorded.check_code)
        options = PromptOptions.of(recorded.config)
        limits = (training.max_rows, training.max_tokens)
        source, template_options = recorded.config.source, recorded.config.template_options
        return Inputs(source, recorded.manifest, options, *limits, recorded, template_options=template_options)
    limits, template_options = (training.max_rows, training.max_tokens), dict(job.prompt.template_options)
    prompts = PromptOptions(job.prompt)
    return Inputs(job.source, freeze_source(job), prompts, *limits, template_options=template_options)


def check_answers(recorded: RecordedJob[CaptionJobConfig], target: CheckpointConfig) -> None:
    """Raise ConfigError if the answers are not this target's own, or not one for each row of the source."""
    config, path = recorded.config, recorded.output.shown()
    theirs = config.model.target
    if not _is_same_location(theirs.path, target.path):
        raise ConfigError(
            f"target: {access.shown(target.path)} is another target than {access.shown(theirs.path)}, whose answers "
            f"are in {path}; a drafter learns from its own target's answers"
        )
    if theirs.quantization != "none":
        raise ConfigError(
            f"target: the answers in {path} are those of the target in {theirs.quantization} "
            "(model.target.quantization), and a training runs it as it is stored; train on an output without "
            "quantization"
        )
    if theirs.adapter is not None:
        raise ConfigError(
            f"target: the answers in {path} are those of the target with an adapter (model.target.adapter), and a "
            "training runs it as it is stored; save the merged model, and caption with that"
        )
    if lossy := [method.label for method in config.method.methods if not method.acceptance.lossless]:
        raise ConfigError(
            f"source.path: the job in {path} has the lossy method {lossy[0]!r}, which accepts tokens that the target "
            "would not choose; train on an output of a lossless method, for example of method.acceptance.kind=exact"
        )
    if config.multiplies_rows:
        name = "columns.prompts" if config.columns.prompts is not None else f"source.video.{config.source.video.cut_by}"
        if (number := config.sampling.num_captions_per_prompt) > 1:
            name = f"sampling.num_captions_per_prompt {number}"
        raise ConfigError(
            f"source.path: the job in {path} has {name}, so a row of its source has several answers; train on an "
            "output with one answer per row"
        )
    if not config.sink.keep_tokens:
        raise ConfigError(
            f"source.path: the job in {path} did not keep its tokens, and its texts do not determine them; run it "
            "with sink.keep_tokens=true and another sink.path"
        )


def _is_same_location(path: str, other: str) -> bool:
    if access.uri_scheme(path) or access.uri_scheme(other):
        return path.rstrip("/") == other.rstrip("/")
    return path == other or (os.path.exists(path) and os.path.realpath(path) == os.path.realpath(other))


def check_revision(job: RecordedJob[CaptionJobConfig], target: CheckpointConfig, revision: str) -> None:
    """Raise ConfigError if the target that is trained for has another revision than the job's."""
    if revision != job.target_revision:
        raise ConfigError(
            f"target: {access.shown(target.path)} is revision {revision}, and the answers in {job.output.shown()} "
            f"are those of revision {job.target_revision}; name that one in target.revision, or train on an "
            "output of this one"
        )
