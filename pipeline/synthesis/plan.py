"""Plans a synthesis job: makes every check that is possible before Ray starts; see `pipeline.run.plan`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa

from configs.load import ConfigError
from configs.synthesis import SynthesizeJobConfig
from pipeline.cluster.partitions import Workers
from pipeline.exports.run import check_exports
from pipeline.formats.kind import Needs
from pipeline.manifest.manifest_parts import reopen
from pipeline.media.image_decoding import decode_image
from pipeline.reports.gallery import ResultRow, Shown
from pipeline.reports.summary import Summary
from pipeline.resources.resolve import resolve
from pipeline.rows import schemas
from pipeline.run.external_parts import check_contracts, external_names, install_external
from pipeline.run.job_plan import DEFAULT_RESUME, MAX_BATCH_IMAGES, JobPlan, ResumeOptions
from pipeline.run.plan import checked, recorded
from pipeline.run.plan_checks import open_output, runs_here
from pipeline.run.plan_text import actors_of, engines, first_usable, num_shown, show_plan
from pipeline.storage import checkpoints
from pipeline.storage.shard import WHOLE, Shard
from pipeline.synthesis import rows
from pipeline.synthesis.conditions import check_features_type
from pipeline.synthesis.files import DEFAULT_QUALITY
from pipeline.synthesis.prompts import ConditionShape, PrepareOptions, prepare_table, wanted_columns
from pipeline.synthesis.summary import ImageSummary

if TYPE_CHECKING:
    from actors.loading.image_pair import ImagePairInfo


@dataclass(frozen=True)
class SynthesisPlan(JobPlan):
    """Plan of a synthesis job."""

    config: SynthesizeJobConfig
    pair: ImagePairInfo

    reads_images: ClassVar[bool] = False
    most_batch_rows: ClassVar[int] = MAX_BATCH_IMAGES
    picture_columns: ClassVar[tuple[str, ...]] = (
        *("image", "width_px", "height_px", "prompt", "label"),
        *("prompt_id", "seed", "guidance_scale"),
    )
    _summary: ClassVar[type[Summary]] = ImageSummary

    @property
    def fields(self) -> tuple[str, ...]:
        return tuple(wanted_columns(self.config))

    @property
    def rows_per_sample(self) -> int:
        return self.config.sampling.num_images_per_prompt

    @property
    def kept(self) -> list[pa.Field]:
        """The source columns that are copied to the output (`sink.keep_columns`), and that of negative prompts."""
        kept = [self.manifest.keep.field(name) for name in self.config.sink.keep_columns]
        return [*kept, rows.NEGATIVE] if self.config.has_negatives else kept

    @property
    def schema(self) -> pa.Schema:
        return rows.result_schema(self.kept, self.config.sink.images, self.config.sink.keep_codes)

    @property
    def prepare_options(self) -> PrepareOptions:
        """Options of the stage `prepare`."""
        config, target = self.config, self.pair.target
        width = target.condition_dim if target.condition == "text" else 0
        num_classes = target.num_classes if target.condition == "class" else 0
        shape = ConditionShape(target.condition, width, target.num_condition_tokens, num_classes)
        keep = config.sink.keep_columns
        return PrepareOptions(config.prompt, config.columns, config.sampling, config.job.seed, shape, keep)

    def pictures(self, rows: Sequence[ResultRow]) -> Iterator[Shown]:
        for row in rows:
            if row.get("image"):
                image = decode_image(row["image"]["bytes"], max_pixels=row["width_px"] * row["height_px"])
                yield row["sample_id"], [image]

    def prepare_first(self, limit: int) -> pa.Table:
        return prepare_table(self.read_first(limit), self.prepare_options)


def needs_of(config: SynthesizeJobConfig) -> Needs:
    """Return the columns that a job reads; ConfigError if a name is reserved, or repeated in `sink.keep_columns`."""
    keep, features = config.sink.keep_columns, config.columns.features
    own = rows.RESERVED_COLUMNS | ({rows.NEGATIVE.name} if config.has_negatives else set())
    for name in schemas.find_reserved(keep, own):
        raise ConfigError(f"sink.keep_columns: {name!r} is a column of the output itself; rename it in the source")
    if len({name.lower() for name in keep}) != len(keep):
        raise ConfigError("sink.keep_columns: a column is named twice (upper and lower case are the same here)")
    if features is None:
        return Needs(config.source, wanted_columns(config), keep, with_images=False)
    for name in schemas.find_read([features]):
        raise ConfigError(f"columns.features: {name!r} is a name of our own; rename the column in the source")
    both = keep if features in keep else (*keep, features)
    return Needs(config.source, wanted_columns(config), both, {features: "columns.features"}, with_images=False)


def make_plan(
    config: SynthesizeJobConfig,
    limit: int | None = None,
    runs: bool = True,
    resume: ResumeOptions = DEFAULT_RESUME,
    shard: Shard = WHOLE,
    folder: Path | None = None,
) -> SynthesisPlan:
    """Check a synthesis job and return its plan; see `pipeline.run.plan.make_plan`."""
    external = install_external(external_names(config), folder)
    output = open_output(config, shard)
    if config.sink.exports and shard != WHOLE:
        raise ConfigError("sink.exports: a shard does not have all rows; run jobs.export when the shards have ended")
    resources = resolve(config, config.job)
    from actors.loading import image_pair  # imports torch and transformers, after the fast checks

    config, pair = checkpoints.check(resources.apply(config), image_pair.check, runs_here(config))
    check_contracts(config.method.places)
    with Workers(config.job if runs else None) as workers:
        reopened = reopen(needs_of(config), output, resume.accept_touched, workers)
        manifest = reopened.manifest
        if config.columns.features is not None:
            check_features_type(manifest.keep.field(config.columns.features).type, config.columns.features)
        plan = SynthesisPlan(config, pair, manifest, output, limit, resume, resources=resources, external=external)
        plan = checked(plan, reopened.gone, workers, runs)
    if config.sink.exports:
        check_exports(recorded(plan), config.sink.exports, "sink.exports", runs)
    return plan


def describe(plan: SynthesisPlan) -> str:
    """Return the plan as lines of text."""
    config, target = plan.config, plan.pair.target
    lines = {"images": f"{config.sampling.num_images_per_prompt} per prompt, {target.grid} × {target.grid} codes"}
    if config.sink.images:
        file = config.image
        how = "lossless" if file.lossless else f"quality {file.quality or DEFAULT_QUALITY}"
        kind = "PNG" if file.format == "png" else f"{file.format.upper()} ({how})"
        lines["images"] += f", {plan.pair.image_px} × {plan.pair.image_px} px as {kind}"
        number, device = actors_of(config.vq)
        lines["vq"] = f"{number} × {config.vq.batch_rows} images at once on {device}"
    lines["sampling"] = _sampling(config)
    lines["actors"] = engines(config.pool)
    named = config.columns.model_dump(exclude={"features_dtype"}, exclude_none=True)
    if named:
        lines["columns"] = ", ".join(f"{name} from {column!r}" for name, column in named.items())
    return show_plan(plan, lines)


def _sampling(config: SynthesizeJobConfig) -> str:
    sampling = config.sampling
    parts = [f"temperature {sampling.temperature:g}" if sampling.temperature else "greedy"]
    if sampling.temperature:
        parts += [f"top_k {sampling.top_k or 'off'}", f"top_p {sampling.top_p:g}"]
    if not config.is_guided:
        return ", ".join([*parts, "no guidance"])
    interval = sampling.guidance_interval
    until = "" if interval < 0 else f" for the first {interval + 2} codes"
    return ", ".join([*parts, f"guidance {sampling.guidance_scale:g}{until}"])


def first_prompt(plan: SynthesisPlan) -> str:
    """Return the first prompt and its sampling values as text; the errors if all of the first rows have one."""

    def describe_row(row: dict[str, Any]) -> str:
        parts = [row["prompt"]] if row["prompt"] else []
        if row["label"] is not None:
            parts.append(f"class {row['label']}")
        if row["features"] is not None:
            parts.append(f"features of {row['features']['num_tokens']} tokens")
        drawn = ", ".join(f"{name} {row[name]:g}" for name in ("temperature", "top_k", "top_p", "guidance_scale"))
        return f"{', '.join(parts)}\n({drawn}, seed {row['seed']})"

    return first_usable(lambda: plan.prepare_first(num_shown(plan)).to_pylist(), describe_row)
