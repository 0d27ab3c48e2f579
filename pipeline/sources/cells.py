"""A row's cell of images or videos: bytes, URIs, `struct<bytes, path>`, or lists of those. Fetches nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pipeline.prompts.templates import whole_text
from pipeline.rows.schemas import RowError
from pipeline.sources.kind import ReadSpec, Sample, VideoRef


def add_images(spec: ReadSpec, samples: list[Sample], cell_of: Callable[[int], Any]) -> None:
    """Fill every sound sample's images from its cell; a cell that names none is the sample's error."""
    column = spec.source.columns.image
    assert column is not None
    for offset, sample in enumerate(samples):
        if sample.error is None:
            try:
                sample.images = images_of(cell_of(offset), column, spec.source.max_image_bytes)
            except RowError as error:
                sample.error = error


def add_videos(spec: ReadSpec, samples: list[Sample], cell_of: Callable[[int], Any]) -> None:
    """Fill every sound sample's videos from its cell; a cell that names none is the sample's error."""
    column = spec.source.columns.video
    assert column is not None
    for offset, sample in enumerate(samples):
        if sample.error is None:
            try:
                cell = cell_of(offset)
                parts = cell if isinstance(cell, list) else [cell]
                if not parts:
                    raise RowError("missing_video", f"the column {column!r} names no video in this row")
                found = [_media_of(part, column, "video", spec.source.video.max_video_bytes) for part in parts]
                sample.videos = [VideoRef(uri=one) if isinstance(one, str) else VideoRef(bytes=one) for one in found]
            except RowError as error:
                sample.error = error


def images_of(cell: Any, column: str, max_bytes: int) -> list[bytes | str]:
    """The images of a cell in order.

    Raises:
        RowError: `missing_image`, `image_too_large`, `invalid_value`.
    """
    parts = cell if isinstance(cell, list) else [cell]
    if not parts:
        raise RowError("missing_image", f"the column {column!r} names no image in this row")
    return [_media_of(part, column, "image", max_bytes) for part in parts]


def _media_of(part: Any, column: str, kind: str, max_bytes: int) -> bytes | str:
    if isinstance(part, dict):
        part = part.get("bytes") or part.get("path")
    if isinstance(part, bytes) and part:
        if len(part) > max_bytes:
            raise RowError(f"{kind}_too_large", f"an encoded {kind} has {len(part)} bytes, more than {max_bytes}")
        return part
    if not part and (part is None or isinstance(part, bytes | str)):
        raise RowError(f"missing_{kind}", f"the column {column!r} has no {kind} in this row")
    if isinstance(part, str):
        return whole_text(part)
    raise RowError("invalid_value", f"the column {column!r} holds {part!r:.100}, which is neither bytes nor a URI")
