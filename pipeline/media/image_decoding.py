"""Decodes images and videos in a supervised subprocess, fills prompts, and processes them if the job's tasks do so:
READ to DECODED."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from configs.source import MAX_DECODED_BYTES, MAX_IMAGES_PER_ROW, SourceConfig
from pipeline.media import pixels as image_pixels
from pipeline.media.pixel_column import PixelColumn
from pipeline.media.prompt_processor import InputColumn, ProcessedPrompt, PromptProcessor
from pipeline.media.row_weights import media_of, share_of
from pipeline.media.video.clips import NO_SPAN, MediaOptions, Span, clip_column, decode_videos, worker_of
from pipeline.media.video.worker import DecodedClip
from pipeline.prompts import templates
from pipeline.prompts.row_options import PromptOptions, RowPrompt
from pipeline.rows import schemas
from pipeline.rows.schemas import RowError

MAX_MESSAGE_CHARS = 500
FETCHED_AT_ONCE = 32
"""Maximum number of URIs that are fetched together, unless one row has more. With the defaults, each image may then
have 8 MiB; larger images are fetched one by one."""


@dataclass(frozen=True)
class DecodeOptions:
    """How rows are decoded, and limits of one row. Without a `processor`, rows have pixels and no processor outputs."""

    prompt_options: PromptOptions
    media: MediaOptions = field(default_factory=lambda: MediaOptions.of(SourceConfig(kind="images", path="."), "."))
    max_images_per_row: int = MAX_IMAGES_PER_ROW
    max_decoded_bytes: int = MAX_DECODED_BYTES
    processor: PromptProcessor | None = None

    @classmethod
    def of(cls, source: SourceConfig, root: str, prompt_options: PromptOptions) -> DecodeOptions:
        """Build the options of a job on this source at the URL `root`; images keep their size if it is still `auto`."""
        return cls(prompt_options, MediaOptions.of(source, root), source.max_images_per_row, source.max_decoded_bytes)

    def shrunk_to(self, side_px: int) -> DecodeOptions:
        limits = self.media.limits
        side_px = side_px if limits.max_side_px is None else min(side_px, limits.max_side_px)
        return replace(self, media=replace(self.media, limits=replace(limits, max_side_px=side_px)))

    @property
    def row_bytes(self) -> int:
        """Maximum bytes of one row's images, both encoded and decoded."""
        return share_of(self.max_decoded_bytes)

    @property
    def row_limit(self) -> str:
        name = f"source.max_decoded_bytes ({self.max_decoded_bytes})"
        return f"{self.row_bytes} bytes, the share of one row in {name}"


def decode_image(data: bytes, max_pixels: int, max_side_px: int | None = None) -> NDArray[np.uint8]:
    """Call `pipeline.media.pixels.decode` in this process; only for images that this job produced. Raises RowError."""
    try:
        return image_pixels.decode(data, max_pixels, max_side_px)
    except image_pixels.MediaError as error:
        raise RowError(error.code, error.message) from None


@dataclass(frozen=True)
class _Decoded:
    """One row of the DECODED table without its images: index in the READ table, values by column, and clips."""

    row: int
    values: dict[str, Any]
    videos: Sequence[DecodedClip] = ()
    processed: ProcessedPrompt | None = None
    holder: ProcessedPrompt | None = None
    """The processed prompt of an earlier row of the sample, whose tensors the row may refer to."""


def decode_table(table: pa.Table, options: DecodeOptions, present: Collection[str] = frozenset()) -> pa.Table:
    """Decode every row's images and videos and fill its prompt: READ to DECODED, in the same order.

    The number of rows changes only if videos are cut into clips or rows have several prompts. Of several prompts with
    the same media, only the first row contains the media (see `actors.media`), unless they are clips. Rows
    with a read error pass through; a row that fails here gets an error code, no pixels and no messages. Rows whose ids
    are in `present` are left out.
    """
    keep = schemas.kept_fields(table.schema)
    column, inputs = PixelColumn(options.row_bytes), InputColumn()
    decoded: list[_Decoded] = []
    sample_ids = table["sample_id"].to_pylist()
    for index, row, fetched in _prompt_rows(table, options):
        try:
            if isinstance(row, RowError):
                raise row
            outputs = _decode_row(index, sample_ids[index], row, fetched, column, options, present)
        except RowError as error:
            column.forget_row()
            outputs = []
            if sample_ids[index] not in present:
                message = templates.whole_text(error.message)[:MAX_MESSAGE_CHARS]
                values = {"sample_id": sample_ids[index], "messages": "", "sampling": "", "partial_video": ""}
                values |= {"error_type": error.code, "error_message": message}
                outputs = [_Decoded(index, values)]
                column.end_row()
        for output in outputs:
            inputs.add(output.processed, output.holder)
        decoded += [replace(output, processed=None, holder=None) for output in outputs]
    schema = schemas.decoded_schema(keep)
    rows = pa.array([output.row for output in decoded], pa.int64())
    columns = {name: table[name].take(rows) for name in ("source", "row_index", *(field.name for field in keep))}
    columns |= {"images": column.finish(), "videos": clip_column([output.videos for output in decoded])}
    columns["packed_inputs"] = inputs.finish()
    for name in schema.names:
        if name not in columns:
            columns[name] = pa.array([output.values.get(name) for output in decoded], schema.field(name).type)
    return pa.table([columns[name] for name in schema.names], schema=schema)


@dataclass(frozen=True)
class _RowPrompts:
    """One row's prompts, and its encoded media in the order of their placeholders."""

    prompts: Sequence[RowPrompt]
    images: Sequence[dict[str, Any]]
    videos: Sequence[dict[str, Any]]


Fetched = Mapping[str, bytes | RowError]


def _prompt_rows(table: pa.Table, options: DecodeOptions) -> Iterator[tuple[int, _RowPrompts | RowError, Fetched]]:
    """Yield every row's index, its prompts or error, and the fetched images by URI, in row order. Images are fetched
    for a few rows at a time, so that the encoded bytes in memory do not grow with the table."""
    max_uris = min(FETCHED_AT_ONCE, options.media.fetcher.source.fetch.max_parallel)
    window: list[tuple[int, _RowPrompts | RowError]] = []
    uris: list[str] = []
    for index in range(table.num_rows):
        row = _read_row(table, index, options)
        window.append((index, row))
        if isinstance(row, _RowPrompts):
            uris += [image["uri"] for image in row.images if image["bytes"] is None]
        if len(uris) >= max_uris or not uris or index + 1 == table.num_rows:
            fetched = _fetch(list(dict.fromkeys(uris)), options)
            for row_index, window_row in window:
                yield row_index, window_row, fetched
            window, uris = [], []


def _read_row(table: pa.Table, index: int, options: DecodeOptions) -> _RowPrompts | RowError:
    """Return the prompts and media of a row, or its error from reading or from its prompt options."""
    if code := table["error_type"][index].as_py():
        return RowError(code, table["error_message"][index].as_py())
    try:
        fields = json.loads(table["fields"][index].as_py())
        prompts, *media = options.prompt_options.ask(fields, *media_of(table, index))
        images, videos = ([_NAMED | {"uri": ref} if isinstance(ref, str) else ref for ref in cell] for cell in media)
        if len(images) > options.max_images_per_row:
            limit = f"source.max_images_per_row ({options.max_images_per_row})"
            raise RowError("too_many_images", f"the row has {len(images)} images, more than {limit}")
        encoded = sum(image["bytes"].size for image in images if image["bytes"] is not None)
        if encoded > options.row_bytes:
            message = f"the row's encoded images have {encoded} bytes, more than {options.row_limit}"
            raise RowError("row_too_large", message)
    except RowError as error:
        return error
    return _RowPrompts(prompts, images, videos)


_NAMED: dict[str, Any] = dict.fromkeys(("bytes", "uri", "path", "offset", "size"))


def _decode_row(
    index: int,
    sample_id: str,
    row: _RowPrompts,
    fetched: Fetched,
    column: PixelColumn,
    options: DecodeOptions,
    present: Collection[str],
) -> list[_Decoded]:
    """Decode one READ row to DECODED rows: one for each clip of its video and each of its prompts."""
    cuts = bool(row.videos) and options.media.sampling.cuts
    if not cuts and all(prompt.name(sample_id) in present for prompt in row.prompts):
        return []
    _decode_images(row.images, fetched, column, options)
    clips: Sequence[tuple[Span, Sequence[DecodedClip]]] = [(NO_SPAN, ())]
    if row.videos:
        clips = decode_videos(row.videos, options.media)
    images = column.row_images()
    groups = []
    for span, frames in clips:
        names = [(prompt, prompt.name(span.name(sample_id) if cuts else sample_id)) for prompt in row.prompts]
        asked = [(name, prompt) for prompt, name in names if name not in present]
        if asked:
            groups.append(_processed(span, frames, asked, images, options, cuts))
    if not any(group.has_pixels for group in groups):
        column.forget_row()
    rows: list[_Decoded] = []
    for group in groups:
        holder: ProcessedPrompt | None = None
        for (name, prompt), messages, processed in zip(group.prompts, group.messages, group.processed, strict=True):
            if rows and cuts:  # a later stage may separate rows of clips, so each needs its own copy
                column.copy_last_row()
            column.end_row()
            row_clips = group.frames if group.has_pixels and (cuts or not rows) else ()
            error = (processed.code, processed.message) if isinstance(processed, RowError) else ("", "")
            outputs = None if isinstance(processed, RowError) else processed
            values = {"sample_id": name, "messages": messages, "sampling": prompt.sampling, **asdict(group.span)}
            values |= {"prompt_index": prompt.index, "num_prompts": prompt.num_asked}
            values |= dict(zip(("error_type", "error_message"), error, strict=True))
            rows.append(_Decoded(index, values, row_clips, outputs, holder))
            holder = holder or (None if cuts else outputs)
    return rows


@dataclass(frozen=True)
class _Group:
    """A sample's prompts about the same images and frames, with their conversations as JSON; `processed` has nothing
    but None if the actor's process runs the processor."""

    span: Span
    frames: Sequence[DecodedClip]
    prompts: Sequence[tuple[str, RowPrompt]]
    messages: Sequence[str]
    processed: Sequence[ProcessedPrompt | RowError | None]
    has_pixels: bool


def _processed(
    span: Span,
    frames: Sequence[DecodedClip],
    asked: Sequence[tuple[str, RowPrompt]],
    images: Sequence[NDArray[np.uint8]],
    options: DecodeOptions,
    cuts: bool,
) -> _Group:
    """Process the prompts `asked` about images and frames, if tasks do that and the outputs are not too large."""
    messages = [json.dumps(prompt.messages, ensure_ascii=False) for _, prompt in asked]
    if options.processor is not None:
        processed = options.processor.process([json.loads(text) for text in messages], images, frames, cuts)
        if processed is not None:
            return _Group(span, frames, asked, messages, processed, options.processor.keeps_pixels)
    return _Group(span, frames, asked, messages, [None] * len(asked), True)


def _fetch(uris: Sequence[str], options: DecodeOptions) -> Fetched:
    """Fetch URIs, together at most `row_bytes`; larger images are left out and later fetched one by one."""
    if not uris:
        return {}
    fetcher = options.media.fetcher
    limit = min(fetcher.source.max_image_bytes, options.row_bytes // len(uris))
    fetched = fetcher.fetch(uris, limit)

    is_final = limit == fetcher.source.max_image_bytes
    too_large = {uri for uri, data in fetched.items() if isinstance(data, RowError) and data.code == "image_too_large"}
    return {uri: data for uri, data in fetched.items() if is_final or uri not in too_large}


def _decode_images(
    cell: Sequence[dict[str, Any]], fetched: Fetched, column: PixelColumn, options: DecodeOptions
) -> None:
    """Decode one row's images into the memory of `column`; RowError for the first image that fails."""
    if not cell:
        return
    worker = worker_of(options.media)
    for number, image in enumerate(cell, start=1):
        try:
            data, uri = image["bytes"], image["uri"]
            if data is None and (data := fetched.get(uri)) is None:
                fetcher = options.media.fetcher
                data = fetcher.fetch([uri], min(fetcher.source.max_image_bytes, options.row_bytes))[uri]
            if isinstance(data, RowError):
                raise data
            num_free_bytes = options.row_bytes - column.row_bytes
            column.add_image(*worker.decode_image(data, column.take, num_free_bytes, options.row_limit))
        except RowError as error:
            if len(cell) == 1:
                raise
            raise RowError(error.code, f"image {number} of {len(cell)}: {error.message}") from None


def pixels(cell: Sequence[dict[str, Any]]) -> tuple[NDArray[np.uint8], ...]:
    """Convert one row's images from the column's Python value to read-only uint8 arrays (height, width, 3)."""
    return tuple(np.frombuffer(image["rgb"], np.uint8).reshape(image["height"], image["width"], 3) for image in cell)
