"""What a row's image cell holds: bytes, URIs, `struct<bytes, path>`, or lists of those; fetched and put into samples.

Knows no file format and no pixels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pipeline.rows import RowError
from pipeline.sources.kind import ReadSpec, Sample
from pipeline.sources.uris import fetch_all


def add_images(filesystem: Any, spec: ReadSpec, samples: list[Sample], cell_of: Callable[[int], Any]) -> None:
    """Fill every sound sample's images from its cell; the first image that cannot be had is the sample's error."""
    column = spec.source.columns.image
    wanted: list[tuple[Sample, int, str]] = []  # (sample, its image's place, URI) of what must be fetched
    for offset, sample in enumerate(samples):
        if sample.error is not None:
            continue
        cell = cell_of(offset)
        parts = cell if isinstance(cell, list) else [cell]
        try:
            if not parts:
                raise RowError("missing_image", f"the column {column!r} names no image in this row")
            for part in parts:
                data, uri = _bytes_or_uri(part, column)
                if data is not None:
                    if len(data) > spec.source.max_image_bytes:
                        message = f"an image has {len(data)} bytes, more than {spec.source.max_image_bytes}"
                        raise RowError("image_too_large", message)
                    sample.images.append(data)
                elif uri:
                    wanted.append((sample, len(sample.images), uri))
                    sample.images.append(b"")
                else:
                    raise RowError("missing_image", f"the column {column!r} has no image in this row")
        except RowError as error:
            sample.error = error
    wanted = [want for want in wanted if want[0].error is None]
    fetched = fetch_all(filesystem, spec, [uri for _, _, uri in wanted])
    for (sample, place, _), got in zip(wanted, fetched, strict=True):
        if not isinstance(got, RowError):
            sample.images[place] = got
        elif sample.error is None:
            sample.error = got


def _bytes_or_uri(part: Any, column: str | None) -> tuple[bytes | None, str | None]:
    if isinstance(part, dict):
        return part.get("bytes") or None, part.get("path")
    if isinstance(part, bytes):
        return part or None, None
    if part is None or isinstance(part, str):
        return None, part
    raise RowError("invalid_value", f"the column {column!r} holds {part!r:.100}, which is neither bytes nor a URI")
