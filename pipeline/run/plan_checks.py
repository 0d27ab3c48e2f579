"""Checks of a job before Ray starts: models, audit, paths and the output directory."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from actors.checks import Checks
from actors.losses import loss_of
from configs.acceptance import AuditConfig
from configs.load import ConfigError
from configs.schema import CaptionJobConfig
from configs.source import SourceConfig
from configs.synthesis import SynthesizeJobConfig
from pipeline.cluster import ray_session
from pipeline.manifest.overlap import refuse_overlap
from pipeline.output.sink_folder import refuse_foreign_files, refuse_unusable
from pipeline.reports import loss
from pipeline.run.processing import check_processing
from pipeline.storage import access, checkpoints
from pipeline.storage.first_touch import check_stores
from pipeline.storage.output_dir import OutputDir
from pipeline.storage.shard import WHOLE, Shard

if TYPE_CHECKING:
    from actors.loading.pair import TextPairInfo

DECODER_PACKAGES = {"auto": "av", "pyav": "av", "decord": "decord"}
"""The Python package of each decoder. PyAV is always needed, because it opens every file."""


def check_models(config: CaptionJobConfig) -> tuple[CaptionJobConfig, TextPairInfo]:
    """Check a job's checkpoints and what depends on them; return the job with revisions pinned, and with sizes and the
    target's generation settings filled in, and the metadata of the pair. Raises ConfigError."""
    from actors.loading import pair as loading  # imports torch and transformers, after the fast checks

    config, pair = checkpoints.check(config, loading.check, runs_here(config))
    if pair.generation.sampling is not None:
        config = config.model_copy(update={"sampling": pair.generation.sampling})
    if config.source.max_side_px == "auto":
        source = config.source.model_copy(update={"max_side_px": pair.front_end.useful_side_px})
        config = config.model_copy(update={"source": source})
    check_processing(config, pair)
    check_videos(config.source, pair.front_end.takes_videos, config.model.target.path)
    return config, pair


def check_videos(source: SourceConfig, takes_videos: bool, target: str) -> None:
    """Raise ConfigError if the job file declares videos and they cannot be decoded here or the target takes no videos.

    Videos inside tars are not declared and not checked.
    """
    if source.kind != "videos" and source.columns.video is None:
        return
    decoder = source.video.decoder
    for module in dict.fromkeys(("av", DECODER_PACKAGES[decoder])):
        if importlib.util.find_spec(module) is None:
            raise ConfigError(
                f"source.video.decoder: {decoder!r} needs the Python package {module!r}, which is not installed; "
                f"install it into this environment, or choose another decoder"
            )
    if not takes_videos:
        dotted = "source.kind" if source.kind == "videos" else "source.columns.video"
        raise ConfigError(f"{dotted}: {target} takes no videos; LLaVA-OneVision and the Qwen-VL families do")


def check_audit(audit: AuditConfig) -> None:
    """Raise ConfigError if the metric cannot be imported, or so few rows cannot show that the budget holds."""
    loss_of(audit.metric, "audit.metric")
    if audit.max_loss is not None and audit.min_rows < (fewest := loss.fewest_rows(audit)):
        raise ConfigError(
            f"audit.min_rows: {audit.min_rows:,} rows cannot show a loss of at most {audit.max_loss:g} "
            f"(audit.max_loss), even if all are equal; take at least {fewest:,}"
        )


def check_checks(config: CaptionJobConfig) -> None:
    """Raise ConfigError if a script or the function of `checks` is unknown."""
    if config.checks is not None:
        Checks(config.checks)


def open_output(config: CaptionJobConfig | SynthesizeJobConfig, shard: Shard = WHOLE) -> OutputDir:
    """Return the job's output directory, which is empty or contains an output of a job.

    Raises:
        ConfigError: a path is relative although the job does not run in this folder, one of output and source contains
            the other, a store cannot be used, or the output is a file, is not writable or holds other files.
    """
    if not runs_here(config):
        submitted = ray_session.INSIDE_SUBMITTED_JOB in os.environ
        reason = "the job runs from an uploaded working directory" if submitted else "the job runs on a cluster"
        paths = [*(("source.path", path) for path in config.source.paths), ("sink.path", config.sink.path)]
        refuse_relative(paths, reason)
    path = config.sink.path
    output = OutputDir(path if access.uri_scheme(path) else str(Path(path).resolve()), shard)
    check_stores("source.path", config.source.paths)
    check_stores("sink.path", [output.url])
    refuse_overlap(config.source, output.url)
    with access.refusals("sink.path", output.url):
        whole = replace(output, shard=WHOLE)
        refuse_unusable(whole)
        if not output.is_begun():
            whole.refuse_if_used()
            refuse_foreign_files(whole)
    return output


def runs_here(config: CaptionJobConfig | SynthesizeJobConfig) -> bool:
    """Return whether the job's actors run on this machine."""
    return config.job.ray_address == "local" and ray_session.INSIDE_SUBMITTED_JOB not in os.environ


def refuse_relative(paths: Iterable[tuple[str, str]], reason: str) -> None:
    """Raise ConfigError for the first relative path, with its dotted name and the reason."""
    for where, path in paths:
        if not access.uri_scheme(path) and not os.path.isabs(path):
            raise ConfigError(f"{where}: {path} is relative, but {reason}; give an absolute path or a URL")
