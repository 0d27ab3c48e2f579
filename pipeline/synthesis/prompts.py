"""Prepares prompt rows for the engine (READ to PREPARED): fills the template, reads condition and sampling values. A
row that fails gets an error code. The text encoder checks the number of tokens of a prompt later."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa

from configs.synthesis import ImageColumnsConfig, ImagePromptConfig, ImageSamplingConfig, SynthesizeJobConfig
from pipeline.prompts import templates
from pipeline.prompts.sampling import read_sampling
from pipeline.rows.schemas import RowError
from pipeline.synthesis import conditions, rows

PROMPT_PATH = "prompt.text"
MAX_PROMPT_CHARS = 100_000
"""Longer prompts are error rows and are not tokenized; far above the limit of any text encoder."""


@dataclass(frozen=True)
class ConditionShape:
    """Shape of the target's condition: text features of at most (max_tokens, width), or one of `num_classes` labels."""

    kind: Literal["text", "class"]
    width: int = 0
    max_tokens: int = 0
    num_classes: int = 0


@dataclass(frozen=True)
class PrepareOptions:
    """Options of `prepare_table`: template, columns and default sampling values of the job, and the condition shape."""

    prompt: ImagePromptConfig | None
    columns: ImageColumnsConfig
    sampling: ImageSamplingConfig
    seed: int
    condition: ConditionShape
    keep: tuple[str, ...] = ()
    """Source columns that are copied to the output."""

    @property
    def has_negatives(self) -> bool:
        """Whether any row may have a negative prompt."""
        return self.sampling.negative_prompt is not None or self.columns.negative_prompt is not None


def wanted_columns(job: SynthesizeJobConfig) -> dict[str, str]:
    """Return the columns whose values READ rows hold as JSON, each with the dotted config path that names it."""
    names = dict.fromkeys(templates.names_in(job.prompt.text, PROMPT_PATH), PROMPT_PATH) if job.prompt else {}
    columns = job.columns.model_dump(exclude={"features", "features_dtype"}, exclude_none=True)
    for field, name in columns.items():
        names.setdefault(name, f"columns.{field}")
    return names


def prepare_table(table: pa.Table, options: PrepareOptions) -> pa.Table:
    """Prepare a READ table: PREPARED, with the same rows in order. Rows that have an error already are passed on."""
    values: list[dict[str, Any]] = table.select(["error_type", "error_message"]).to_pylist()
    for index, row in enumerate(values):
        row["prompt"] = row[rows.NEGATIVE.name] = ""
        try:
            if not row["error_type"]:
                row |= _prepare(table, index, options)
        except RowError as error:
            message = templates.whole_text(error.message)[:500]
            row |= {"error_type": error.code, "error_message": message, **_shown(table, index, options)}
    negative = [rows.NEGATIVE] if options.has_negatives else []
    prepared = pa.Table.from_pylist(values, pa.schema([*rows.PREPARED_VALUES, *negative]))
    schema = rows.prepared_schema([*(table.schema.field(name) for name in options.keep), *negative])
    columns = [prepared[name] if name in prepared.column_names else table[name] for name in schema.names]
    return pa.table(columns, schema=schema)


def _prepare(table: pa.Table, index: int, options: PrepareOptions) -> dict[str, Any]:
    fields = json.loads(table["fields"][index].as_py())
    columns, shape = options.columns, options.condition
    row: dict[str, Any] = read_sampling(fields, columns, options.sampling, options.seed)
    row[rows.NEGATIVE.name] = _negative(fields, options)
    if columns.features is not None:
        cell = table[columns.features][index]
        features = conditions.read_features(cell, columns.features_dtype, shape.width, shape.max_tokens)
        row["features"] = {"num_tokens": features.shape[0], "values": features.tobytes()}
    elif columns.label is not None:
        row["label"] = conditions.read_label(fields.get(columns.label), shape.num_classes)
    else:
        assert options.prompt is not None, "the schema requires a prompt if rows have no condition"
        row["prompt"] = templates.filled(options.prompt.text, PROMPT_PATH, fields)[0]
        if not row["prompt"].strip():
            raise RowError("empty_prompt", "the prompt is empty")
        if len(row["prompt"]) > MAX_PROMPT_CHARS:
            raise RowError("prompt_too_long", f"the prompt has {len(row['prompt'])} characters")
        return row
    return row | _shown(table, index, options)


def _negative(fields: dict[str, Any], options: PrepareOptions) -> str:
    """Return the negative prompt of a row, by default that of the job; empty without one."""
    value = None if options.columns.negative_prompt is None else fields.get(options.columns.negative_prompt)
    if value is None or (isinstance(value, str) and not value.strip()):
        return options.sampling.negative_prompt or ""
    if not isinstance(value, str):
        raise RowError("invalid_sampling", f"negative_prompt: {value!r:.100} is no text")
    if len(value) > MAX_PROMPT_CHARS:
        raise RowError("prompt_too_long", f"the negative prompt has {len(value)} characters")
    return templates.whole_text(value)


def _shown(table: pa.Table, index: int, options: PrepareOptions) -> dict[str, Any]:
    """Render the prompt of a row that has features, a label or an error, for display only; empty if impossible."""
    if options.prompt is None:
        return {}
    try:
        fields = json.loads(table["fields"][index].as_py())
        return {"prompt": templates.filled(options.prompt.text, PROMPT_PATH, fields)[0][:MAX_PROMPT_CHARS]}
    except RowError:
        return {}
