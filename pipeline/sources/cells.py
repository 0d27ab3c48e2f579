"""Parses values of image and video columns: bytes, URI, `struct<bytes, path>`, or a list of these. Fetches nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pipeline.prompts.templates import whole_text
from pipeline.rows.schemas import RowError
from pipeline.sources.kind import ReadSpec, Sample, VideoRef


def add_media(spec: ReadSpec, samples: Sequence[Sample], cell_of: Callable[[str, int], Any]) -> None:
    """Set images and videos of every sample without an error from `cell_of(column, index)`; missing or invalid media
    become the sample's error: `missing_*`, `*_too_large` or `invalid_value`."""
    source = spec.source
    for offset, sample in enumerate(samples):
        try:
            if sample.error is None and (column := source.columns.image) is not None:
                sample.images = _check_cell(cell_of(column, offset), column, "image", source.max_image_bytes)
            if sample.error is None and (column := source.columns.video) is not None:
                videos = _check_cell(cell_of(column, offset), column, "video", source.video.max_video_bytes)
                sample.videos = [VideoRef(uri=one) if isinstance(one, str) else VideoRef(bytes=one) for one in videos]
        except RowError as error:
            sample.error = error


def _check_cell(cell: Any, column: str, kind: str, max_bytes: int) -> list[bytes | str]:
    parts = cell if isinstance(cell, list) else [cell]
    if not parts:
        raise RowError(f"missing_{kind}", f"the column {column!r} names no {kind} in this row")
    return [_check_part(part, column, kind, max_bytes) for part in parts]


def _check_part(part: Any, column: str, kind: str, max_bytes: int) -> bytes | str:
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
