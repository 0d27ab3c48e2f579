"""Defines the Arrow schemas of rows at their three stages, and the stable codes of row errors.

    READ     encoded media or their location, the prompt's values    (output of `pipeline.manifest.datasource`)
    DECODED  chat messages, with RGB pixels and clips of frames or   (output of `pipeline.media.image_decoding`)
             with processor outputs
    RESULT   text, status, telemetry                                 (output of the actor, input of the writer)

One sample is one row at every stage, unless `source.video` splits its video into one row per clip, or
`columns.prompts` splits it into one row per prompt. A row whose `error_type` is not empty passes the later stages
unchanged and is written to `errors/`. String columns of this schema hold empty strings, never nulls; columns that are
kept from the source keep their types and nulls.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pyarrow as pa

from configs.schema import CaptionJobConfig
from pipeline.rows import columns

SCHEMA_VERSION = 1
SCHEMA_VERSION_KEY = b"draftfleet.schema_version"

STATUS_VALUES = ("success", "truncated", "blocked", "error", "skipped")

ERROR_CODES: dict[str, str] = {
    # reading
    "broken_shard": "a file cannot be read, from this row to the end of its span",
    "broken_sample": "a sample's members are not side by side in the tar, or one of them is unusable",
    "broken_line": "a line is no JSON object or CSV record, is not UTF-8, or is too long; the message says its number",
    "missing_id": "the id column has no value in this row",
    "duplicate_id": "the id column has a value that an earlier row already has",
    "invalid_value": "a value that the row needs cannot be had: text that is not UTF-8, a date out of range",
    "missing_image": "the row names no image, or its image does not exist",
    "unreadable_image": "the image exists and could not be fetched",
    "missing_video": "the row names no video, or its video does not exist",
    "unreadable_video": "the video exists and could not be fetched",
    "uri_refused": "the URI of an image or video has a scheme that is not allowed, or leaves the source root",
    # decoding
    "missing_column_value": "a column that the prompt names has no value in this row",
    "not_an_image": "the bytes are no image of a known format",
    "broken_image": "the image is truncated or damaged",
    "image_too_large": "the image has more bytes or pixels than the source section allows",
    "too_many_images": "the row has more images than source.max_images_per_row",
    "row_too_large": "the row's images together take more than its share of source.max_decoded_bytes",
    "unsupported_image": "HEIC or JPEG XL without its package, samples without a range (float), sides beyond 200 to 1",
    "not_a_video": "the bytes are no video of a known format",
    "no_video_stream": "the file holds no moving picture, only sound or cover art",
    "broken_video": "the video is truncated or damaged",
    "video_too_large": "the video has more bytes, pixels or frames than the source section allows",
    "unsupported_video": "there is no decoder for the video",
    "no_such_frame": "a moment of source.video.timestamps_s lies outside the video",
    "decode_timeout": "decoding an image or the video took longer than source.video.timeout_s",
    "decoder_died": "the process that decoded this row's images or video, or ran its processor, crashed",
    # conditions of an image
    "empty_prompt": "the prompt is empty, or nothing is left of it when it is cleaned as the text encoder's was",
    "prompt_too_long": "the prompt has more tokens than the image model takes",
    "invalid_condition": "ready features or the class label are missing, of another shape, not finite or out of range",
    "invalid_sampling": "the row's own seed or a sampling value of its own is no number or out of range",
    # the engine, see `decoding.errors`
    "prompt_refused": "the processor or chat template refuses the sample",
    "context_too_long": "prompt, images and max_new_tokens do not fit the slot",
    "non_finite_logits": "the target gave NaN for a token that was taken",
    "row_timeout": "the row was in its slot for longer than pool.max_row_s",
    "grammar_failed": "the output could not follow the grammar of output; the message says after how many tokens",
    "out_of_memory": "the device's memory does not hold this row, even with nothing beside it",
    "engine_died": "the engine's process died three times while it had this row, the last time with nothing beside it",
    # after it
    "non_finite_pixels": "the VQ model gave NaN for a pixel; try another dtype",
    # records of exports; these rows have their results in `data/`
    "export_refused": "the row's file or member would be outside of the export's root, or its source is not listed",
    "export_failed": "the row's file or member cannot be written, or its media or source member cannot be read again",
}
"""Error code → meaning. Codes are part of the output format: codes may be added and are never renamed."""

ERROR_ADVICE: dict[str, str] = {
    "broken_shard": "check that the files can be read with the job's credentials, and --retry-errors reads them again",
    "missing_image": "check source.path and source.columns.image",
    "unreadable_image": "check that the images can be fetched from the nodes, and --retry-errors fetches them again",
    "missing_video": "check source.path and source.columns.video",
    "unreadable_video": "check that the videos can be fetched from the nodes, and --retry-errors fetches them again",
    "uri_refused": "name the scheme in source.uri_schemes, or the folder in source.local_roots",
    "missing_column_value": "check the placeholders of prompt against the columns of the source",
    "missing_id": "choose another source.id_column, or leave it out",
    "duplicate_id": "choose another source.id_column, or leave it out",
    "image_too_large": "raise source.max_image_bytes or source.max_image_pixels",
    "too_many_images": "raise source.max_images_per_row",
    "row_too_large": "raise source.max_decoded_bytes",
    "decode_timeout": "raise source.video.timeout_s",
    "invalid_sampling": "check the columns of sampling values",
    "prompt_refused": "check the prompt against the target's chat template, and its images against its processor",
    "context_too_long": "raise pool.max_context_tokens, or lower sampling.max_new_tokens or the number of frames",
    "non_finite_logits": "take another model.target.dtype",
    "row_timeout": "raise pool.max_row_s",
    "grammar_failed": "check output against sampling.max_new_tokens",
    "out_of_memory": "lower pool.max_context_tokens or pool.max_prefill_tokens, or take a larger device",
    "engine_died": "_job/logs/ has the engine's last lines; pool.max_step_s may be shorter than a step",
    "non_finite_pixels": "take another model.vq.dtype",
}
"""Error code → what to do if most rows of a job have it."""


def _typed(described: columns.Columns) -> list[tuple[str, pa.DataType]]:
    return [(name, kind) for name, kind, _ in described]


ENCODED_IMAGES = pa.list_(pa.struct([("bytes", pa.large_binary()), ("uri", pa.string())]))
"""A row's images in order, each as encoded bytes, or as a URI that the decoding stage fetches."""
_PART_OF_FILE = [("path", pa.string()), ("offset", pa.int64()), ("size", pa.int64())]
ENCODED_VIDEOS = pa.list_(pa.struct([("bytes", pa.large_binary()), ("uri", pa.string()), *_PART_OF_FILE]))
"""A row's videos in order, each as encoded bytes, as a URI from the row, or as a file of the manifest (`path` relative
to the source root; `size` bytes from `offset` if the video is a part of the file)."""
IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
"""An encoded image in a dataset, in the layout of Hugging Face's `datasets`."""
HUGGING_FACE_KEY = b"huggingface"
IMAGE_ROWS_PER_GROUP = 100
"""Rows with images per Parquet row group; a reader of one image has to read one group."""
PIXELS = pa.struct([("height", pa.int32()), ("width", pa.int32()), ("rgb", pa.large_binary())])
"""One decoded image: `rgb` is uint8, row-major, height · width · 3 bytes."""
CLIP = pa.struct(
    [
        ("num_frames", pa.int32()),
        ("height", pa.int32()),
        ("width", pa.int32()),
        ("rgb", pa.large_binary()),
        ("timestamps_s", pa.list_(pa.float64())),
        ("fps", pa.float64()),
    ]
)
"""One decoded clip: `rgb` is uint8 (num_frames, height, width, 3), row-major; times count from the clip's beginning."""
TENSOR = pa.struct(
    [
        ("name", pa.string()),
        ("dtype", pa.string()),
        ("shape", pa.list_(pa.int64())),
        ("stored_dtype", pa.string()),
        ("stored_shape", pa.list_(pa.int64())),
        ("data", pa.large_binary()),
        ("levels", pa.large_binary()),
    ]
)
"""One packed tensor, see `models.inputs.packing.Packed`: `data` and `levels` are row-major. `data` is null if the
tensor equals that of the same name in the sample's first row with outputs."""
PACKED_INPUTS = pa.struct(
    [
        ("prompt", pa.string()),
        ("num_images", pa.int32()),
        ("num_frames", pa.list_(pa.int32())),
        ("tensors", pa.list_(TENSOR)),
    ]
)
"""The rendered prompt and its processor outputs, see `models.inputs.packing.PackedInputs`."""

TELEMETRY = pa.struct(_typed(columns.TELEMETRY))
ERROR = _typed(columns.ERROR)
_RESULT = _typed(columns.CAPTIONS)
IDENTITY, SPAN, PROMPT = _RESULT[:3], _RESULT[3:8], _RESULT[8:10]
_READ = [*IDENTITY, ("images", ENCODED_IMAGES), ("videos", ENCODED_VIDEOS), ("fields", pa.string()), *ERROR]
_MEDIA = [("images", pa.list_(PIXELS)), ("videos", pa.list_(CLIP)), ("packed_inputs", PACKED_INPUTS)]
_DECODED = [*IDENTITY, *SPAN, *PROMPT, *_MEDIA, ("messages", pa.string()), ("sampling", pa.string()), *ERROR]

RESERVED_COLUMNS = frozenset(name for name, _ in (*_READ, *_DECODED, *_RESULT))
"""Names that columns kept from the source must not have, because a stage uses them."""


class RowError(Exception):
    """An error of one row: a code from `ERROR_CODES` and a message."""

    def __init__(self, code: str, message: str) -> None:
        assert code in ERROR_CODES, code
        super().__init__(message)
        self.code = code
        self.message = message


def schema_of(names: Sequence[tuple[str, pa.DataType]], keep: Iterable[pa.Field]) -> pa.Schema:
    """Return a schema of `names`, then the kept columns; its metadata holds the schema version."""
    kept_columns = [(field.name, field.type) for field in keep]
    return pa.schema([*names, *kept_columns], metadata={SCHEMA_VERSION_KEY: str(SCHEMA_VERSION).encode()})


def read_schema(keep: Iterable[pa.Field] = ()) -> pa.Schema:
    """Return the schema of READ tables, the output of read tasks: media are encoded, `fields` is a JSON object."""
    return schema_of(_READ, keep)


def decoded_schema(keep: Iterable[pa.Field] = ()) -> pa.Schema:
    """Return the schema of DECODED tables. `messages` is a JSON list of chat turns; `sampling` is a JSON object of the
    row's own seed and sampling values, or empty if the job has no columns for them. `packed_inputs` is null if the
    actor runs the processor; rows with `packed_inputs` have images and videos only if the drafter needs pixels."""
    return schema_of(_DECODED, keep)


def result_schema(
    keep: Iterable[pa.Field] = (),
    tokens: bool = False,
    audit: bool = False,
    partial: bool = False,
    loops: bool = False,
    checks: bool = False,
    retries: bool = False,
    replicas: bool = False,
) -> pa.Schema:
    """Return the schema of RESULT tables, the files of `data/` and `errors/`; `tokens` adds the columns of token ids,
    `audit` the columns `columns.AUDIT`, `partial` the column `partial_video`, `loops` the column `loop_start`, `checks`
    the column `failed_checks`, `retries` the column `retry_index`, and `replicas` the column `replica`."""
    left_out = set() if tokens else {"token_ids", "audit_token_ids"}
    left_out |= set() if audit else {name for name, _, _ in columns.AUDIT}
    left_out |= set() if partial else {name for name, _, _ in columns.PARTIAL}
    optional = (
        *((columns.LOOPS, loops), (columns.CHECKS, checks)),
        *((columns.RETRY, retries), (columns.REPLICA, replicas)),
    )
    left_out |= {name for group, is_there in optional if not is_there for name, _, _ in group}
    return schema_of([column for column in _RESULT if column[0] not in left_out], keep)


def job_schema(config: CaptionJobConfig, keep: Iterable[pa.Field] = ()) -> pa.Schema:
    """Return the schema of the RESULT tables of a caption job."""
    return result_schema(
        keep,
        tokens=config.sink.keep_tokens,
        audit=config.audit is not None,
        partial=config.reports_partial,
        loops=config.sampling.stop_loops > 0,
        checks=config.checks is not None,
        retries=config.retry is not None,
        replicas=config.sampling.num_captions_per_prompt > 1,
    )


def kept_fields(schema: pa.Schema, reserved: frozenset[str] = RESERVED_COLUMNS) -> list[pa.Field]:
    """Return the columns of a table, at any stage, that were kept from the source, in order."""
    return [field for field in schema if field.name not in reserved]


def find_reserved(names: Sequence[str], reserved: Iterable[str] = RESERVED_COLUMNS) -> list[str]:
    """Return the names that collide with reserved names; case is ignored, because SQL engines ignore it."""
    lower = {name.lower() for name in reserved}
    return [name for name in names if name.lower() in lower]


def find_read(names: Sequence[str]) -> list[str]:
    """Return the names that collide with columns of READ tables, ignoring case."""
    return find_reserved(names, [name for name, _ in _READ])
