"""Reads a training job's source as rows for training samples; an unusable row is replaced by its error code."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from actors.media import clips, rgb_images
from actors.training.samples import TrainingRow
from configs.source import JobOutputConfig, SourceConfig
from configs.training import TrainDrafterJobConfig, TrainingImageColumnsConfig
from models.heads.training.trainer import key_of
from models.llamagen.shape import GptShape
from pipeline.manifest.freezing import freeze
from pipeline.manifest.manifest import Manifest
from pipeline.media.image_decoding import DecodeOptions, decode_table
from pipeline.prompts.row_options import PromptOptions
from pipeline.prompts.templates import neutralise
from pipeline.rows.schemas import RowError
from pipeline.storage.first_touch import check_stores
from pipeline.synthesis.conditions import read_features, read_label

TOKEN_IDS = "token_ids"


def columns_of(job: TrainDrafterJobConfig) -> dict[str, str]:
    """Return the source columns of training samples, each with the dotted config path that names it."""
    if job.image is None:
        assert job.answer_column is not None
        return {job.answer_column: "answer_column"}
    given = job.image.columns
    named = {"codes": given.codes, "features": given.features, "label": given.label}
    return {column: f"image.columns.{name}" for name, column in named.items() if column is not None}


def freeze_source(job: TrainDrafterJobConfig) -> Manifest:
    """Return the manifest of the job's source of rows; raise ConfigError if it is missing, empty, or lacks a column."""
    assert isinstance(job.source, SourceConfig)
    check_stores("source.path", job.source.paths)
    return freeze(job.source, PromptOptions(job.prompt), columns_of(job))


def is_held_out(job: TrainDrafterJobConfig, sample_id: str) -> bool:
    """Return whether a row is held out; depends only on its id, so it does not change when the source grows."""
    return key_of("held out", sample_id) < job.training.held_out_share * 2**63


def read_rows(
    table: pa.Table, job: TrainDrafterJobConfig, options: DecodeOptions, shape: GptShape | None
) -> list[TrainingRow | str]:
    """Decode a READ table into one `TrainingRow`, or error code, per row; `shape` is required for image jobs. A table
    of a `job_output` has the further column `token_ids`."""
    decoded = decode_table(table, options)
    columns = [decoded.column(name).to_pylist() for name in ("sample_id", "messages", "error_type")]
    images, videos = decoded.column("images"), decoded.column("videos")
    assert decoded.num_rows == table.num_rows, "a row cannot become several in a training job"
    rows: list[TrainingRow | str] = []
    for index, (sample_id, messages, code) in enumerate(zip(*columns, strict=True)):
        if code:
            rows.append(code)
            continue
        row = TrainingRow(sample_id, json.loads(messages), rgb_images(images[index]), clips(videos[index]))
        try:
            if isinstance(job.source, JobOutputConfig):
                rows.append(replace(row, answer_ids=tuple(table.column(TOKEN_IDS)[index].as_py())))
            elif job.image is None:
                answer = table.column(job.answer_column)[index].as_py()
                text = None if answer is None else neutralise(str(answer), options.prompt_options.special_tokens)
                rows.append(replace(row, answer=text))
            else:
                assert shape is not None
                condition = _condition(table, index, job.image.columns, shape)
                rows.append(replace(row, codes=_codes(table, index, job.image.columns.codes), condition=condition))
        except RowError as error:
            rows.append(error.code)
    return rows


def _condition(
    table: pa.Table, index: int, columns: TrainingImageColumnsConfig, shape: GptShape
) -> NDArray[np.float32] | int | None:
    if columns.label is not None:
        return read_label(table.column(columns.label)[index].as_py(), shape.num_classes)
    if columns.features is not None:
        cell = table.column(columns.features)[index]
        return read_features(cell, columns.features_dtype, shape.condition_dim, shape.num_condition_tokens)
    return None


def _codes(table: pa.Table, index: int, column: str | None) -> NDArray[np.int64] | None:
    """Read a row's VQ codes (num_codes,), also from JSON text; None for anything but integers."""
    if column is None:
        return None
    value = table.column(column)[index].as_py()
    try:
        codes = np.array(json.loads(value) if isinstance(value, str) else value).reshape(-1)
    except (TypeError, ValueError):
        return None
    return codes.astype(np.int64) if codes.dtype.kind in "iu" else None
