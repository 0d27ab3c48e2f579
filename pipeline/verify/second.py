"""Derives the configuration of the second decoding from that of a job of captions or images."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.load import ConfigError, apply_override, load_job, validate
from configs.method import MethodConfig
from configs.schema import CaptionJobConfig
from configs.synthesis import SynthesizeJobConfig
from pipeline.output.recorded_job import RecordedJob
from pipeline.run.plan_checks import check_models, runs_here
from pipeline.storage import checkpoints
from pipeline.verify.rows import OUTPUT


@dataclass(frozen=True)
class Settings:
    """What is verified, and how: `share` and `seed` choose the rows; `against` is the job file of the second decoding
    (None: plain decoding); `metric` as in `actors.losses`; `tolerance` replaces the tie tolerance of the dtype."""

    output: str
    share: float
    seed: int = 0
    against: Path | None = None
    metric: str = "exact"
    tolerance: float | None = None
    overrides: tuple[str, ...] = ()


def check_second_models(config: Any) -> tuple[Any, Any]:
    """Check the checkpoints of a job of captions or images; see `plan_checks.check_models`."""
    if not isinstance(config, SynthesizeJobConfig):
        return check_models(config)
    from actors.loading import image_pair  # imports torch and transformers, after the fast checks

    return checkpoints.check(config, image_pair.check, runs_here(config))


def second_config(job: RecordedJob[Any], settings: Settings) -> CaptionJobConfig | SynthesizeJobConfig:
    """Return the configuration of the second decoding: that of the job with its method replaced by plain decoding, or
    with `model`, `method`, `sampling` and `pool` of another job file; then with overrides. Images are decoded to codes.
    """
    model: Any = type(job.config)
    data = job.config.resolved()
    if settings.against is None:
        data["method"] = MethodConfig().model_dump(mode="json")
        data["model"]["drafter"] = None
    else:
        other = load_job(model, settings.against)
        data |= {name: other.resolved()[name] for name in ("model", "method", "pool")}
        # What the job file does not set may be a generation setting of its target.
        data["sampling"] = other.sampling.model_dump(mode="json", exclude_unset=True)
    data["sink"] |= {"keep_columns": [], "exports": []}
    if job.makes_images:
        if not job.config.sink.keep_codes:
            raise ConfigError(
                f"{OUTPUT}: {job.output.shown()} was made with sink.keep_codes: false, and images are compared by "
                "their codes"
            )
        data["sink"] |= {"images": False, "keep_codes": True}
    else:
        data["sink"]["keep_tokens"] = True
        data["audit"] = None
    for override in settings.overrides:
        apply_override(data, override)
    config: CaptionJobConfig | SynthesizeJobConfig = validate(model, data, f"the configuration in {job.output.shown()}")
    return config


def inexact_reason(config: CaptionJobConfig | SynthesizeJobConfig) -> str:
    """Return why a job's tokens may differ from plain decoding without a fault; empty if they may not."""
    for method in config.method.methods:
        if not method.acceptance.lossless:
            return f"the method {method.label!r} is lossy: its rows may differ"
    retries = isinstance(config, CaptionJobConfig) and config.retry is not None
    is_sampled = config.sampling.temperature > 0 or config.columns.temperature is not None or retries
    if is_sampled and config.method.acceptance.kind == "rejection":
        return "rejection sampling preserves the distribution and not each row's draw: rows may differ"
    return ""
