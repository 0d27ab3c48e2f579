"""Defines the Arrow schemas of a synthesis job's rows at each stage; READ and the error codes are in
`pipeline.rows.schemas`.

    PREPARED  prompt, condition and sampling values, one row per prompt      (output of `pipeline.synthesis.prompts`)
    CODED     codes, status, telemetry, from here on one row per image       (output of the engine's actor)
    PAINTED   CODED with RGB pixels                                          (output of the VQ model's actor)
    RESULT    PAINTED with an encoded image in place of pixels               (output of `pipeline.synthesis.files`)

A row whose `error_type` is not empty passes the later stages unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

import pyarrow as pa

from pipeline.rows import columns, schemas
from pipeline.rows.columns import INT32, INT64, NUMBER, TEXT, Columns

FEATURES = pa.struct([("num_tokens", pa.int32()), ("values", pa.large_binary())])
"""Precomputed text features of one prompt: little-endian float32, row-major, num_tokens · width · 4 bytes."""

_LABEL = ("label", INT64, "class label; null if there is none")
_SAMPLING: Columns = [
    ("seed", INT64, "seed of the row, or of the job"),
    ("temperature", NUMBER, "temperature of the row, or of the job"),
    ("top_k", INT64, "top_k of the row, or of the job"),
    ("top_p", NUMBER, "top_p of the row, or of the job"),
    ("guidance_scale", NUMBER, "guidance scale of the row, or of the job"),
]
IMAGES: Columns = [
    ("sample_id", TEXT, "id of the prompt and number of the image: `<id>#0`"),
    *columns.SOURCE,
    ("row_index", INT64, "index of the prompt in that file"),
    ("prompt_id", TEXT, "id of the prompt: the value of `source.id_column`, or `path#index`"),
    ("replica", INT32, "number of the image among the images of its prompt"),
    *columns.ATTEMPT,
    ("status", TEXT, "`success` or `error`"),
    *columns.ERROR,
    ("finish_reason", TEXT, "`length` or `error`"),
    ("image", schemas.IMAGE, "encoded image and a file name; null in error rows"),
    ("width_px", INT32, "width; 0 in error rows"),
    ("height_px", INT32, "height; 0 in error rows"),
    ("codes", pa.list_(INT32), "VQ codes in raster order; empty in error rows, unless only decoding the pixels failed"),
    ("prompt", TEXT, "rendered prompt"),
    (
        "negative_prompt",
        TEXT,
        "negative prompt of the row, or of the job; empty without one; the last column, and only of jobs with negative "
        "prompts",
    ),
    _LABEL,
    (
        "mean_logprob",
        NUMBER,
        "mean log probability of the codes under the guided target, before temperature and filters",
    ),
    ("num_input_tokens", INT64, "condition tokens without padding"),
    ("num_generated_tokens", INT64, "generated codes"),
    *_SAMPLING,
    *columns.PROVENANCE,
]
"""Name, Arrow type and meaning of the columns of image outputs."""
NEGATIVE = pa.field("negative_prompt", TEXT)
"""The column of negative prompts, which jobs with them add to the columns that are kept from the source."""
_RESULT = [(name, kind) for name, kind, _ in IMAGES if name != NEGATIVE.name]
_VALUES = [("prompt", TEXT), _LABEL[:2], ("features", FEATURES), *(field[:2] for field in _SAMPLING)]
PREPARED_VALUES = pa.schema([*_VALUES, *schemas.ERROR])
"""Columns that the stage `prepare` adds or changes."""
_PREPARED = [*schemas.IDENTITY, *_VALUES, *schemas.ERROR]

RESERVED_COLUMNS = frozenset(name for name, _ in (*_RESULT, *_PREPARED, ("rgb", None))) | {*schemas.read_schema().names}
"""Names that columns kept from the source must not have, because a stage uses them."""


def prepared_schema(keep: Iterable[pa.Field] = ()) -> pa.Schema:
    """Return the schema of PREPARED tables, the input of the engine's actor; missing `label` or `features` are null."""
    return schemas.schema_of(_PREPARED, keep)


def coded_schema(keep: Iterable[pa.Field] = ()) -> pa.Schema:
    """Return the schema of CODED tables, the output of the engine's actor, and of jobs without images."""
    return schemas.schema_of([field for field in _RESULT if field[0] not in ("image", "width_px", "height_px")], keep)


def painted_schema(keep: Iterable[pa.Field] = ()) -> pa.Schema:
    """Return the schema of PAINTED tables; `rgb` is uint8, row-major, height · width · 3 bytes; empty in error rows."""
    return schemas.schema_of([("rgb", pa.large_binary()) if field[0] == "image" else field for field in _RESULT], keep)


def result_schema(keep: Iterable[pa.Field] = (), images: bool = True, codes: bool = True) -> pa.Schema:
    """Return the schema of `data/` and `errors/`; its metadata declares `image` as an image for `datasets`."""
    if not images:
        return coded_schema(keep)
    schema = schemas.schema_of([field for field in _RESULT if codes or field[0] != "codes"], keep)
    features = json.dumps({"info": {"features": {"image": {"_type": "Image"}}}}).encode()
    return schema.with_metadata({**schema.metadata, schemas.HUGGING_FACE_KEY: features})
