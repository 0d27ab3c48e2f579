"""Prompt rows prepared for the engine: template filled, condition and sampling values taken from their columns.

A function of Arrow tables (READ to PREPARED), so that it runs on any CPU; errors stay in their row. The text encoder
checks the length of a prompt.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa

from configs.synthesis import ImageColumns, ImagePrompt, ImageSampling, SynthesizeJob
from pipeline.prompts import templates
from pipeline.rows.schemas import RowError
from pipeline.synthesis import conditions, rows

PROMPT_PATH = "prompt.text"
MAX_PROMPT_CHARS = 100_000
"""Far more than any text encoder takes; longer prompts are not even tokenized."""


@dataclass(frozen=True)
class ConditionShape:
    """What the target is conditioned on: features (max_tokens, width) of a text, or one of `num_classes`."""

    kind: Literal["text", "class"]
    width: int = 0
    max_tokens: int = 0
    num_classes: int = 0


@dataclass(frozen=True)
class PrepareOptions:
    """How rows are prepared: templates, columns and defaults of the job, and the target's sizes."""

    prompt: ImagePrompt | None
    columns: ImageColumns
    sampling: ImageSampling
    seed: int
    condition: ConditionShape
    keep: tuple[str, ...] = ()
    """Input columns that travel on; a features column that is not among them ends here."""

    @classmethod
    def of(cls, job: SynthesizeJob, condition: ConditionShape) -> PrepareOptions:
        """Options of the job, for a target of these sizes."""
        return cls(job.prompt, job.columns, job.sampling, job.job.seed, condition, job.sink.keep_columns)


def wanted_columns(job: SynthesizeJob) -> dict[str, str]:
    """The columns whose values travel as JSON, each with the dotted path that names it.

    Raises:
        ConfigError: the prompt has a lone brace.
    """
    names = dict.fromkeys(templates.names_in(job.prompt.text, PROMPT_PATH), PROMPT_PATH) if job.prompt else {}
    for field in ("label", "seed", *conditions.SAMPLED):
        name = getattr(job.columns, field)
        if name is not None:
            names.setdefault(name, f"columns.{field}")
    return names


def prepare_table(table: pa.Table, options: PrepareOptions) -> pa.Table:
    """READ to PREPARED, as many rows in the same order; a row that arrives with an error passes."""
    keep = [table.schema.field(name) for name in options.keep]
    codes, texts = table["error_type"].to_pylist(), table["error_message"].to_pylist()
    values: dict[str, list[Any]] = {name: [] for name in rows.OWN_VALUES}
    for index in range(table.num_rows):
        row: dict[str, Any] = {"prompt": ""}
        try:
            if not codes[index]:
                row |= _prepare(table, index, options)
        except RowError as error:
            codes[index], texts[index] = error.code, templates.whole_text(error.message)[:500]
            row |= _shown(table, index, options)
        for name, column in values.items():
            column.append(row.get(name))
    schema = rows.prepared_schema(keep)
    own = {**values, "error_type": codes, "error_message": texts}
    return pa.table(
        [pa.array(own[field.name], field.type) if field.name in own else table[field.name] for field in schema],
        schema=schema,
    )


def _prepare(table: pa.Table, index: int, options: PrepareOptions) -> dict[str, Any]:
    fields = json.loads(table["fields"][index].as_py())
    columns, shape = options.columns, options.condition
    row: dict[str, Any] = conditions.read_sampling(fields, columns, options.sampling, options.seed)
    if columns.features is not None:
        features = conditions.read_features(
            table[columns.features][index], columns.features_dtype, shape.width, shape.max_tokens
        )
        row["features"] = {"num_tokens": features.shape[0], "values": features.tobytes()}
    elif columns.label is not None:
        row["label"] = conditions.read_label(fields.get(columns.label), shape.num_classes)
    else:
        assert options.prompt is not None, "the schema asks for a prompt where no condition comes with the rows"
        row["prompt"] = templates.fill_text(options.prompt.text, PROMPT_PATH, fields)
        if not row["prompt"].strip():
            raise RowError("empty_prompt", "the prompt is empty")
        if len(row["prompt"]) > MAX_PROMPT_CHARS:
            raise RowError("prompt_too_long", f"the prompt has {len(row['prompt'])} characters")
        return row
    return row | _shown(table, index, options)


def _shown(table: pa.Table, index: int, options: PrepareOptions) -> dict[str, Any]:
    """The prompt for the record alone: of a row whose condition is ready, or that has failed."""
    if options.prompt is None:
        return {}
    try:
        fields = json.loads(table["fields"][index].as_py())
        return {"prompt": templates.fill_text(options.prompt.text, PROMPT_PATH, fields)[:MAX_PROMPT_CHARS]}
    except RowError:
        return {}
