"""The row of a synthesis job at its stages, as Arrow schemas; the READ stage and the error codes are those of
`pipeline.rows.schemas`.

    PREPARED  prompt, condition and sampling values, one row per prompt      (output of `pipeline.synthesis.prompts`)
    CODED     codes, status, telemetry, one row per image from here on       (output of the engine's actor)
    PAINTED   the same with RGB pixels                                       (output of the VQ model's actor)
    RESULT    the same with an encoded image in their place                  (output of `pipeline.synthesis.files`)

A row whose `error_type` is not empty passes the later stages unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

import pyarrow as pa

from pipeline.rows import schemas

FEATURES = pa.struct([("num_tokens", pa.int32()), ("values", pa.large_binary())])
"""Ready text features of one prompt: little-endian float32, row-major, num_tokens · width · 4 bytes."""
IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
"""An encoded image as Hugging Face's `datasets` stores it."""
HUGGING_FACE_KEY = b"huggingface"
ROWS_PER_GROUP = 100
"""Rows of a Parquet row group; a reader of one image reads one group."""

_SAMPLING: list[tuple[str, pa.DataType]] = [
    ("seed", pa.int64()),
    ("temperature", pa.float64()),
    ("top_k", pa.int64()),
    ("top_p", pa.float64()),
    ("guidance_scale", pa.float64()),
]
PREPARED_VALUES = pa.schema(
    [("prompt", pa.string()), ("label", pa.int64()), ("features", FEATURES), *_SAMPLING, *schemas.ERROR]
)
"""Columns that the stage PREPARED makes or changes."""
_PREPARED = [*schemas.IDENTITY, *((field.name, field.type) for field in PREPARED_VALUES)]
_BEFORE_IMAGE = [
    *schemas.IDENTITY,
    ("prompt_id", pa.string()),
    ("replica", pa.int32()),
    ("job_id", pa.string()),
    ("attempt", pa.int32()),
    ("status", pa.string()),
    *schemas.ERROR,
    ("finish_reason", pa.string()),
]
_PIXELS, _IMAGE = ("rgb", pa.large_binary()), ("image", IMAGE)
_SIZE = [("width_px", pa.int32()), ("height_px", pa.int32())]
_CODES = ("codes", pa.list_(pa.int32()))
_AFTER_IMAGE = [
    ("prompt", pa.string()),
    ("label", pa.int64()),
    ("mean_logprob", pa.float64()),
    ("num_input_tokens", pa.int64()),
    ("num_generated_tokens", pa.int64()),
    *_SAMPLING,
    ("method", pa.string()),
    ("verify_mode", pa.string()),
    ("target_id", pa.string()),
    ("drafter_id", pa.string()),
    ("config_fingerprint", pa.string()),
    ("telemetry", schemas.TELEMETRY),
]
_ALL = (*_PREPARED, *_BEFORE_IMAGE, _PIXELS, _IMAGE, *_SIZE, _CODES, *_AFTER_IMAGE)

RESERVED_COLUMNS = frozenset(name for name, _ in _ALL) | frozenset(schemas.read_schema().names)
"""Names that kept columns must not have, because a stage uses them."""


def prepared_schema(keep: Iterable[pa.Field] = ()) -> pa.Schema:
    """The schema into the engine's actor: a `label` or `features` if the row has them, otherwise null."""
    return schemas.schema_of(_PREPARED, keep)


def coded_schema(keep: Iterable[pa.Field] = ()) -> pa.Schema:
    """The schema out of the engine's actor, and of the output of a job without images."""
    return schemas.schema_of([*_BEFORE_IMAGE, _CODES, *_AFTER_IMAGE], keep)


def painted_schema(keep: Iterable[pa.Field] = ()) -> pa.Schema:
    """The schema out of the VQ model's actor: `rgb` is uint8, row-major, height · width · 3 bytes; empty in errors."""
    return schemas.schema_of([*_BEFORE_IMAGE, _PIXELS, *_SIZE, _CODES, *_AFTER_IMAGE], keep)


def result_schema(keep: Iterable[pa.Field] = (), images: bool = True, codes: bool = True) -> pa.Schema:
    """The schema of `data/` and `errors/`; its footer declares `image` as an image for `datasets`."""
    if not images:
        return coded_schema(keep)
    schema = schemas.schema_of([*_BEFORE_IMAGE, _IMAGE, *_SIZE, *([_CODES] if codes else []), *_AFTER_IMAGE], keep)
    features = json.dumps({"info": {"features": {"image": {"_type": "Image"}}}}).encode()
    return schema.with_metadata({**schema.metadata, HUGGING_FACE_KEY: features})
