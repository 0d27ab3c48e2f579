"""A synthesis job that has passed every check that is possible before Ray starts.

Like `pipeline.run.plan` for captions, with which it shares code; starts nothing, and writes only the probe of the
output.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import pyarrow as pa

from configs.load import ConfigError
from configs.synthesis import SynthesizeJob
from pipeline.rows import schemas
from pipeline.run.plan import (
    NUM_ROWS_LOOKED_AT,
    JobPlan,
    actors_of,
    check_plan,
    engines,
    method_lines,
    open_output,
    output_lines,
    runs_here,
    show_lines,
    source_lines,
)
from pipeline.run.resume import AS_BEFORE, Going, look_back
from pipeline.source.datasource import SpanDatasource, read_first
from pipeline.source.manifest_parts import reopen
from pipeline.sources.kind import Needs
from pipeline.storage import checkpoints
from pipeline.synthesis import rows
from pipeline.synthesis.conditions import SAMPLED, check_features_type
from pipeline.synthesis.files import DEFAULT_QUALITY
from pipeline.synthesis.prompts import ConditionShape, PrepareOptions, prepare_table, wanted_columns

if TYPE_CHECKING:
    from actors.loading.image_pair import ImagePairInfo


@dataclass(frozen=True)
class SynthesisPlan(JobPlan):
    """A checked synthesis job."""

    config: SynthesizeJob
    pair: ImagePairInfo

    @cached_property
    def datasource(self) -> SpanDatasource:
        """The source as Ray reads it."""
        return SpanDatasource(
            self.config.source, self.manifest, self.fields, self.limit, with_images=False, **self.left_out
        )

    @property
    def fields(self) -> tuple[str, ...]:
        """Columns whose values travel as JSON."""
        return tuple(wanted_columns(self.config))

    @property
    def rows_per_sample(self) -> int:
        """Images: every prompt has as many."""
        return self.config.sampling.num_images_per_prompt

    @property
    def kept(self) -> list[pa.Field]:
        """The columns that travel through to the output."""
        return [self.manifest.keep.field(name) for name in self.config.sink.keep_columns]

    @property
    def schema(self) -> pa.Schema:
        """Of the rows that are written."""
        return rows.result_schema(self.kept, self.config.sink.images, self.config.sink.keep_codes)

    @property
    def prepare_options(self) -> PrepareOptions:
        """What the preparing stage needs to know."""
        target = self.pair.target
        width = target.condition_dim if target.condition == "text" else 0
        num_classes = target.num_classes if target.condition == "class" else 0
        shape = ConditionShape(target.condition, width, target.num_condition_tokens, num_classes)
        return PrepareOptions.of(self.config, shape)

    def prepare_first(self, limit: int) -> pa.Table:
        """The first rows, read and prepared in this process."""
        found = read_first(self.config.source, self.manifest, self.fields, limit, with_images=False)
        return prepare_table(found, self.prepare_options)


def needs_of(config: SynthesizeJob) -> Needs:
    """The columns that a job reads; ready features are passed on like a kept column, with their own type.

    Raises:
        ConfigError: the prompt has a lone brace, or a name occurs twice or collides with a column of the output.
    """
    keep, features = config.sink.keep_columns, config.columns.features
    for name in rows.find_reserved(keep):
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
    config: SynthesizeJob, limit: int | None = None, probe_output: bool = True, going: Going = AS_BEFORE
) -> SynthesisPlan:
    """Check everything that can be checked without weights and without Ray.

    Raises:
        ConfigError: the paths, the output, a checkpoint, the source, the prompt or a column is refused; the message
            names the dotted path.
    """
    output = open_output(config)
    import actors.loading.image_pair  # torch and transformers, which a refusal above need not wait for

    config, pair = checkpoints.check(config, actors.loading.image_pair.check, runs_here(config))
    reopened = reopen(needs_of(config), output, going.accept_touched)
    manifest = reopened.manifest
    if config.columns.features is not None:
        check_features_type(manifest.keep.field(config.columns.features).type, config.columns.features)
    plan = look_back(SynthesisPlan(config, pair, manifest, output, limit, going), reopened.gone)
    check_plan(plan, probe_output)
    return plan


def describe(plan: SynthesisPlan) -> str:
    """The plan as lines of text."""
    config, target = plan.config, plan.pair.target
    lines = {**source_lines(plan), **method_lines(plan)}
    lines["images"] = f"{config.sampling.num_images_per_prompt} per prompt, {target.grid} × {target.grid} codes"
    if config.sink.images:
        lines["images"] += f", {plan.pair.image_px} × {plan.pair.image_px} px as {_file(config)}"
        number, device = actors_of(config.vq)
        lines["vq"] = f"{number} × {config.vq.batch_rows} images at once on {device}"
    lines["sampling"] = _sampling(config)
    lines["actors"] = engines(config.pool)
    own = config.columns.model_dump(exclude={"features_dtype"}, exclude_none=True)
    if own:
        lines["columns"] = ", ".join(f"{name} from {column!r}" for name, column in own.items())
    return show_lines({**lines, **output_lines(plan)})


def _file(config: SynthesizeJob) -> str:
    file = config.image
    if file.format == "png":
        return "PNG"
    return f"{file.format.upper()} ({'lossless' if file.lossless else f'quality {file.quality or DEFAULT_QUALITY}'})"


def _sampling(config: SynthesizeJob) -> str:
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
    """The first prompt and its sampling values; an error message if none of the first rows can be used."""
    table = plan.prepare_first(NUM_ROWS_LOOKED_AT if plan.limit is None else min(plan.limit, NUM_ROWS_LOOKED_AT))
    problems = []
    for row in table.to_pylist():
        if row["error_type"]:
            problems.append(f"  {row['sample_id']}: {row['error_type']}: {row['error_message']}")
            continue
        parts = [row["prompt"]] if row["prompt"] else []
        if row["label"] is not None:
            parts.append(f"class {row['label']}")
        if row["features"] is not None:
            parts.append(f"features of {row['features']['num_tokens']} tokens")
        drawn = ", ".join(f"{name} {row[name]:g}" for name in SAMPLED)
        return f"first prompt ({row['sample_id']}):\n{', '.join(parts)}\n({drawn}, seed {row['seed']})"
    return "\n".join([f"none of the first {len(problems)} rows can be used:", *problems[:5]])
