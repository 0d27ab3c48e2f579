"""Checks that a training job can learn from the answers of a caption job."""

from __future__ import annotations

import os

from configs.load import ConfigError
from configs.schema import Checkpoint
from pipeline.output.recorded_job import RecordedJob
from pipeline.storage import access


def check(found: RecordedJob, target: Checkpoint) -> None:
    """Raise ConfigError if the answers are not this target's own, or not one for each row of the source."""
    config, shown = found.config, found.output.shown()
    theirs = config.model.target
    if not _is_same_place(theirs.path, target.path):
        raise ConfigError(
            f"target: {access.shown(target.path)} is another target than {access.shown(theirs.path)}, whose answers "
            f"are in {shown}; a drafter learns from its own target's answers"
        )
    if theirs.quantization != "none":
        raise ConfigError(
            f"target: the answers in {shown} are those of the target in {theirs.quantization} "
            "(model.target.quantization), and a training runs it as it is stored; train on an output without "
            "quantization"
        )
    if lossy := [one.label for one in config.method.methods if not one.acceptance.lossless]:
        raise ConfigError(
            f"source.path: the job in {shown} has the lossy method {lossy[0]!r}, which accepts tokens that the target "
            "would not choose; train on an output of a lossless method, for example of method.acceptance.kind=exact"
        )
    if config.multiplies_rows:
        name = "columns.prompts" if config.columns.prompts is not None else f"source.video.{config.source.video.cut_by}"
        raise ConfigError(
            f"source.path: the job in {shown} has {name}, so a row of its source has several answers; train on an "
            "output with one answer per row"
        )
    if not config.sink.keep_tokens:
        raise ConfigError(
            f"source.path: the job in {shown} did not keep its tokens, and its texts do not determine them; run it "
            "with sink.keep_tokens=true and another sink.path"
        )


def _is_same_place(one: str, other: str) -> bool:
    if access.uri_scheme(one) or access.uri_scheme(other):
        return one.rstrip("/") == other.rstrip("/")
    return one == other or (os.path.exists(one) and os.path.realpath(one) == os.path.realpath(other))


def check_revision(job: RecordedJob, target: Checkpoint, revision: str) -> None:
    """Raise ConfigError if the target that is trained for has another revision than the job's."""
    if revision != job.target_revision:
        raise ConfigError(
            f"target: {access.shown(target.path)} is revision {revision}, and the answers in {job.output.shown()} "
            f"are those of revision {job.target_revision}; name that one in target.revision, or train on an "
            "output of this one"
        )
