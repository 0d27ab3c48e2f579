"""Decodes media and fills prompts, row by row: encoded images and videos to uint8 RGB pixels; errors stay in their row.

A function of Arrow tables (READ to DECODED), so that it runs on any CPU. Images and videos are decoded in the process
of `pipeline.media.video.worker`; this process reads stores, holds credentials and opens no image itself.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from configs.schema import MAX_DECODED_BYTES, MAX_IMAGES_PER_ROW, Source
from pipeline.media import pixels as image_pixels
from pipeline.media.pixel_column import PixelColumn
from pipeline.media.row_weights import media_of, share_of
from pipeline.media.video.clips import (
    NO_SPAN,
    Span,
    VideoOptions,
    clip_column,
    close_worker,
    decode_videos,
    image_worker,
    span_columns,
)
from pipeline.media.video.worker import DecodedClip
from pipeline.prompts import templates
from pipeline.prompts.row_options import Asked, Asking
from pipeline.rows import schemas
from pipeline.rows.schemas import RowError
from pipeline.sources.uris import Fetcher

MAX_MESSAGE_CHARS = 500
FETCHED_AT_ONCE = 32
"""URIs that are fetched together at most, unless one row names more: each may then have 8 MiB by default before it has
to be fetched alone."""


@dataclass(frozen=True)
class DecodeOptions:
    """How rows are decoded: their prompt options, the limits on images, the longer side that images are shrunk to
    (None: unchanged), the fetcher of images by URI, and how videos are decoded."""

    asking: Asking
    max_image_pixels: int = 64_000_000
    max_side_px: int | None = None
    fetcher: Fetcher | None = None
    videos: VideoOptions | None = None
    max_images_per_row: int = MAX_IMAGES_PER_ROW
    max_decoded_bytes: int = MAX_DECODED_BYTES

    @classmethod
    def of(cls, source: Source, root: str, asking: Asking) -> DecodeOptions:
        """The options of a job on this source, whose root is `root` as a URL.

        `source.max_side_px` has been resolved (`pipeline.run.plan.make_plan`); `auto` that has not keeps everything.
        """
        return cls(
            asking,
            source.max_image_pixels,
            source.max_side_px if isinstance(source.max_side_px, int) else None,
            Fetcher(source, root),
            VideoOptions.of(source, root),
            source.max_images_per_row,
            source.max_decoded_bytes,
        )

    def shrunk_to(self, side_px: int) -> DecodeOptions:
        """The same options with a longer side of `side_px` at most."""
        side = side_px if self.max_side_px is None else min(side_px, self.max_side_px)
        videos = self.videos
        if videos is not None:
            videos = replace(videos, limits=replace(videos.limits, max_side_px=side))
        return replace(self, max_side_px=side, videos=videos)

    @property
    def row_bytes(self) -> int:
        """Most bytes of one row's images, encoded and decoded."""
        return share_of(self.max_decoded_bytes)


close_decoder = close_worker
"""End this process's decoders' process, if it has one."""


def decode_image(data: bytes, max_pixels: int, max_side_px: int | None = None) -> NDArray[np.uint8]:
    """One encoded image as uint8 RGB (height, width, 3), decoded in this process: for images that this job has made.

    Raises:
        RowError: see `pipeline.media.pixels.decode`.
    """
    try:
        return image_pixels.decode(data, max_pixels, max_side_px)
    except image_pixels.PixelError as error:
        raise RowError(error.code, error.message) from None


@dataclass(frozen=True)
class _Decoded:
    """One row as decoded, without its images: `of` is the index of the row that it was made of."""

    of: int
    sample_id: str
    span: Span = NO_SPAN
    videos: Sequence[DecodedClip] = ()
    asked: Asked | None = None
    error: tuple[str, str] = ("", "")


def decode_table(table: pa.Table, options: DecodeOptions, present: Collection[str] = frozenset()) -> pa.Table:
    """Decode every row's images and videos and fill its prompt: READ to DECODED, in the same order.

    As many rows, unless videos are cut into clips or rows have several prompts. Of several prompts about the same media
    only the first row holds them (see `actors.media.media_rows`). A row that arrives with an error passes; one that
    fails here gets its code, no pixels and no messages. Rows whose ids are `present` are left out.
    """
    keep = schemas.kept_fields(table.schema)
    column = PixelColumn(options.row_bytes)
    decoded: list[_Decoded] = []
    codes, sample_ids = table["error_type"].to_pylist(), table["sample_id"].to_pylist()
    for index, row, fetched in _asked_rows(table, codes, options):
        sample_id = sample_ids[index]
        if row is None:
            made = [_Decoded(index, sample_id, error=(codes[index], table["error_message"][index].as_py()))]
        else:
            try:
                if isinstance(row, RowError):
                    raise row
                made = _decode_row(index, sample_id, row, fetched, column, options, present)
                decoded += made
                continue
            except RowError as error:
                message = templates.whole_text(error.message)[:MAX_MESSAGE_CHARS]
                made = [_Decoded(index, sample_id, error=(error.code, message))]
        column.forget_row()
        if sample_id not in present:
            decoded += made
            column.end_row()
    taken = pa.array([row.of for row in decoded], pa.int64())
    questions = [row.asked for row in decoded]
    columns = {
        "sample_id": pa.array([row.sample_id for row in decoded], pa.string()),
        **{name: table[name].take(taken) for name in ("source", "row_index")},
        **span_columns([row.span for row in decoded]),
        "prompt_index": pa.array([one and one.index for one in questions], pa.int32()),
        "num_prompts": pa.array([one and one.num_asked for one in questions], pa.int32()),
        "images": column.finish(),
        "videos": clip_column([row.videos for row in decoded]),
        "messages": pa.array(
            [json.dumps(one.messages, ensure_ascii=False) if one else "" for one in questions], pa.string()
        ),
        "sampling": pa.array([one.sampling if one else "" for one in questions], pa.string()),
        "error_type": pa.array([row.error[0] for row in decoded], pa.string()),
        "error_message": pa.array([row.error[1] for row in decoded], pa.string()),
        **{field.name: table[field.name].take(taken) for field in keep},
    }
    return pa.table(columns, schema=schemas.decoded_schema(keep))


def decode_missing(table: pa.Table, options: DecodeOptions, present: frozenset[str] = frozenset()) -> pa.Table:
    """`decode_table` without rows that an earlier attempt has made: of one sample some may be there."""
    return decode_table(table, options, present)


@dataclass(frozen=True)
class _Asked:
    """One row's questions, and its media, still encoded, in the order of their places."""

    questions: Sequence[Asked]
    images: Sequence[dict[str, Any]]
    videos: Sequence[dict[str, Any]]

    @property
    def uris(self) -> list[str]:
        """Of its images that are fetched."""
        return [image["uri"] for image in self.images if image["bytes"] is None]


Fetched = Mapping[str, bytes | RowError]


def _asked_rows(
    table: pa.Table, codes: Sequence[str], options: DecodeOptions
) -> Iterator[tuple[int, _Asked | RowError | None, Fetched]]:
    """The rows in order, each with its index and its fetched images; failed rows are None.

    Images are fetched for a few rows at a time, so that the encoded bytes in memory do not grow with the table.
    """
    at_once = FETCHED_AT_ONCE if options.fetcher is None else options.fetcher.source.fetch.max_parallel
    at_once = min(at_once, FETCHED_AT_ONCE)
    window: list[tuple[int, _Asked | RowError | None]] = []
    uris: list[str] = []
    for index, code in enumerate(codes):
        row = None if code else _ask(table, index, options)
        window.append((index, row))
        uris += row.uris if isinstance(row, _Asked) else []
        if len(uris) >= at_once or not uris or index + 1 == len(codes):
            fetched = _fetch(list(dict.fromkeys(uris)), options)
            for place, one in window:
                yield place, one, fetched
            window, uris = [], []


def _ask(table: pa.Table, index: int, options: DecodeOptions) -> _Asked | RowError:
    try:
        fields = json.loads(table["fields"][index].as_py())
        questions, *media = options.asking.ask(fields, *media_of(table, index))
        images, videos = ([_NAMED | {"uri": one} if isinstance(one, str) else one for one in cell] for cell in media)
        _check_row(images, options)
    except RowError as error:
        return error
    return _Asked(questions, images, videos)


_NAMED: dict[str, Any] = dict.fromkeys(("bytes", "uri", "path", "offset", "size"))


def _check_row(images: Sequence[dict[str, Any]], options: DecodeOptions) -> None:
    if len(images) > options.max_images_per_row:
        limit = f"source.max_images_per_row ({options.max_images_per_row})"
        raise RowError("too_many_images", f"the row has {len(images)} images, more than {limit}")
    encoded = sum(image["bytes"].size for image in images if image["bytes"] is not None)
    if encoded > options.row_bytes:
        raise RowError("row_too_large", f"the row's encoded images have {encoded} bytes, more than {_limit(options)}")


def _limit(options: DecodeOptions) -> str:
    return f"{options.row_bytes} bytes, the share of one row in source.max_decoded_bytes ({options.max_decoded_bytes})"


def _decode_row(
    index: int,
    sample_id: str,
    row: _Asked,
    fetched: Fetched,
    column: PixelColumn,
    options: DecodeOptions,
    present: Collection[str],
) -> list[_Decoded]:
    """The rows that one row makes: itself, or one for each clip of its video and each of its prompts."""
    cuts = bool(row.videos) and options.videos is not None and options.videos.sampling.clip_s is not None
    if not cuts and all(question.name(sample_id) in present for question in row.questions):
        return []
    _decode_images(row.images, fetched, column, options)
    clips: Sequence[tuple[Span, Sequence[DecodedClip]]] = [(NO_SPAN, ())]
    if row.videos:
        assert options.videos is not None, "rows have videos, and nobody decodes them"
        clips = decode_videos(row.videos, options.videos)
    made: list[_Decoded] = []
    for span, frames in clips:
        for question in row.questions:
            name = question.name(span.name(sample_id) if cuts else sample_id)
            if name in present:
                continue
            if made and cuts:  # rows of clips are cut apart afterwards, so each holds its own
                for image in column.last_row():
                    column.add_copy(image)
            column.end_row()
            shown = frames if cuts or not made else ()
            made.append(_Decoded(index, name, span, shown, question))
    if not made:
        column.forget_row()
    return made


def _fetch(uris: Sequence[str], options: DecodeOptions) -> dict[str, bytes | RowError]:
    """Bytes or error by URI; together at most `row_bytes`. Larger ones are fetched one by one when their turn comes."""
    if not uris:
        return {}
    assert options.fetcher is not None, "rows name images by URI, and nobody fetches them"
    most = options.fetcher.source.max_image_bytes
    each = min(most, options.row_bytes // len(uris))
    fetched = options.fetcher.fetch(list(uris), each)
    if each == most:
        return fetched
    return {uri: data for uri, data in fetched.items() if not _is_too_large(data)}


def _is_too_large(data: bytes | RowError) -> bool:
    return isinstance(data, RowError) and data.code == "image_too_large"


def _decode_images(
    cell: Sequence[dict[str, Any]], fetched: Fetched, column: PixelColumn, options: DecodeOptions
) -> None:
    """Decode one row's images into the column."""
    if not cell:
        return
    worker = image_worker(options.videos, options.max_image_pixels, options.max_side_px)
    for number, image in enumerate(cell, start=1):
        try:
            data = image["bytes"]
            if data is None:
                data = fetched[image["uri"]] if image["uri"] in fetched else _fetch_one(image["uri"], options)
            if isinstance(data, RowError):
                raise data
            left = options.row_bytes - column.row_bytes
            column.add_image(*worker.decode_image(data, column.take, left, _limit(options)))
        except RowError as error:
            if len(cell) == 1:
                raise
            raise RowError(error.code, f"image {number} of {len(cell)}: {error.message}") from None


def _fetch_one(uri: str, options: DecodeOptions) -> bytes | RowError:
    assert options.fetcher is not None, "the URI was tried before"
    [data] = options.fetcher.fetch([uri], min(options.fetcher.source.max_image_bytes, options.row_bytes)).values()
    return data


def pixels(cell: Sequence[dict[str, Any]]) -> tuple[NDArray[np.uint8], ...]:
    """One row's images out of the column's Python value: read-only uint8 arrays (height, width, 3)."""
    return tuple(np.frombuffer(image["rgb"], np.uint8).reshape(image["height"], image["width"], 3) for image in cell)
