"""Reads what a caption job has recorded in its output: configuration, target and manifest. Checks that a training job
can learn from its answers."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from configs.load import ConfigError, validate
from configs.schema import CaptionJob, Checkpoint
from pipeline.source.done_bitmap import PathIndex
from pipeline.source.manifest import Manifest, list_source
from pipeline.source.manifest_parts import read_parts
from pipeline.storage import access
from pipeline.storage.listing import Skipped
from pipeline.storage.output_dir import OutputDir
from pipeline.storage.shard import Shard

MAX_NAMED = 3


@dataclass(frozen=True)
class RecordedJob:
    """The record of a caption job: its output, or the views of its shards, its newest configuration with fingerprint
    and target revision, and its manifest."""

    output: OutputDir
    views: tuple[OutputDir, ...]
    config: CaptionJob
    fingerprint: str
    target_revision: str
    manifest: Manifest

    def check_revision(self, target: Checkpoint, revision: str) -> None:
        """Raise ConfigError if the target that is trained for has another revision than the job's."""
        if revision != self.target_revision:
            raise ConfigError(
                f"target: {access.shown(target.path)} is revision {revision}, and the answers in {self.output.shown()} "
                f"are those of revision {self.target_revision}; name that one in target.revision, or train on an "
                "output of this one"
            )

    def reopened(self, manifest: Manifest) -> Manifest:
        """Return a part of the job's manifest with the current root of the source; raise ConfigError if one of its
        files is gone or has changed since the job read it."""
        source = self.config.source
        try:
            filesystem, root, listing = list_source(source, Skipped())
        except ConfigError as error:
            raise ConfigError(f"{error}\n(it is the source of the job in {self.output.shown()})") from None
        places = PathIndex(listing["path"]).find(manifest.files["path"].combine_chunks())
        _refuse_files(manifest, places < 0, f"gone, and the job in {self.output.shown()} has read")
        now = listing.take(pa.array(places))
        differ = np.zeros(manifest.num_files, bool)
        for name in ("size_bytes", "token"):
            pairs = zip(manifest.files[name].to_pylist(), now[name].to_pylist(), strict=True)
            differ |= np.fromiter((old != new for old, new in pairs), bool, manifest.num_files)
        _refuse_files(manifest, differ, f"other (size, etag or time) than when the job in {self.output.shown()} read")
        return replace(manifest, root=access.unstripped(filesystem, root))


def _refuse_files(manifest: Manifest, wrong: Any, what: str) -> None:
    found = np.flatnonzero(wrong)
    if len(found):
        names = ", ".join(manifest.files["path"][row].as_py() for row in found[:MAX_NAMED].tolist())
        more = f" and {len(found) - MAX_NAMED:,} more" if len(found) > MAX_NAMED else ""
        raise ConfigError(f"source.path: {names}{more}: {what} it; answers are taught with the rows that they answer")


def read_job(path: str, target: Checkpoint) -> RecordedJob:
    """Read the record of the caption job in `path`, for a drafter of `target`.

    Raises:
        ConfigError: there is no output of a caption job, it cannot be read, or its answers cannot teach this drafter.
    """
    access.open_url(path, "source.path")
    output = OutputDir(path)
    try:
        found = _read(output)
    except ConfigError as error:
        raise ConfigError(str(error).replace("sink.path", "source.path", 1)) from None
    except Exception as error:  # drivers raise errors of no common class
        raise ConfigError(f"source.path: {output.shown()} cannot be read: {access.reason_of(error)}") from None
    _check(found, target)
    return found


def _read(output: OutputDir) -> RecordedJob:
    manifest = read_parts(output)
    views = [output]
    if manifest is not None and manifest.num_shards > 1:
        views = [replace(output, shard=Shard(number, manifest.num_shards)) for number in range(manifest.num_shards)]
    newest = {view: max(numbers) for view in views if (numbers := view.list_attempts())}
    if manifest is None or not newest:
        raise ConfigError(
            f"source.path: {output.shown()} is no output of a job: it holds no manifest and attempts in _job/; name "
            "the sink.path of a caption job"
        )
    records = {view: view.read_attempt(number) for view, number in newest.items()}
    fingerprints = {str(record.get("config_fingerprint")) for record in records.values()}
    if len(fingerprints) > 1:
        raise mixed(output, f"its shards have the configs {', '.join(sorted(fingerprints))}")
    record = next(iter(records.values()))
    data = record.get("config")
    where = f"source.path: the record of the job in {output.shown()}"
    if not isinstance(data, dict):
        raise ConfigError(f"{where} has no configuration; it was made by an old version")
    if "num_images_per_prompt" in data.get("sampling", {}):
        raise ConfigError(
            f"source.path: {output.shown()} is the output of a synthesis job, and source.kind job_output reads texts "
            "of caption jobs; train on its rows with source.kind parquet and image.columns.codes"
        )
    revision = str(record.get("content", {}).get("revisions", {}).get("target"))
    config = validate(CaptionJob, data, where)
    return RecordedJob(output, tuple(newest), config, fingerprints.pop(), revision, manifest)


def mixed(output: OutputDir, how: str) -> ConfigError:
    """Return the error of an output whose rows were made by several configurations."""
    return ConfigError(
        f"source.path: {output.shown()} mixes configurations ({how}), so its rows have no common prompt and target; "
        "train on the output of one configuration"
    )


def _check(found: RecordedJob, target: Checkpoint) -> None:
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
        name = "columns.prompts" if config.columns.prompts is not None else "source.video.clip_s"
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
