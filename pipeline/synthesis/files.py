"""Encodes pixels as image files in memory (PAINTED to RESULT): PNG, WebP or JPEG."""

from __future__ import annotations

import io
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from PIL import Image

from configs.synthesis import ImageFileConfig
from pipeline.rows import schemas
from pipeline.synthesis import rows

DEFAULT_QUALITY = 95
WEBP_EFFORT = 4
"""Compression effort from 0 to 6; 4 is the default of libwebp's tools."""
_SUFFIXES = {"png": "png", "webp": "webp", "jpeg": "jpg"}


def encode_image(pixels: NDArray[np.uint8], file: ImageFileConfig) -> bytes:
    """Encode RGB pixels (height, width, 3) as an image file; equal pixels give equal bytes."""
    options: dict[str, Any] = {"lossless": file.lossless, "method": WEBP_EFFORT} if file.format == "webp" else {}
    if file.format != "png" and not file.lossless:
        options["quality"] = file.quality or DEFAULT_QUALITY
    if file.format == "jpeg" and options["quality"] >= DEFAULT_QUALITY:
        options["subsampling"] = 0  # otherwise colour at half resolution is the largest loss
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format=file.format.upper(), **options)
    return buffer.getvalue()


def file_name(sample_id: str, file: ImageFileConfig) -> str:
    """Return a file name for a unique id; all characters that are unsafe in paths are percent-encoded."""
    return f"{quote(sample_id, safe='#')}.{_SUFFIXES[file.format]}"


def encode_table(table: pa.Table, file: ImageFileConfig, keep_codes: bool) -> pa.Table:
    """Encode a PAINTED table as a RESULT table with the same rows in order; `image` is null for rows without pixels."""
    keep = schemas.kept_fields(table.schema, rows.RESERVED_COLUMNS)
    images: list[dict[str, Any] | None] = []
    sizes = zip(*(table[name].to_pylist() for name in ("sample_id", "height_px", "width_px")), strict=True)
    rgb = table["rgb"]
    for index, (sample_id, height, width) in enumerate(sizes):
        if not height:
            images.append(None)
            continue
        pixels = np.frombuffer(rgb[index].as_buffer(), np.uint8).reshape(height, width, 3)
        images.append({"bytes": encode_image(pixels, file), "path": file_name(sample_id, file)})
    schema = rows.result_schema(keep, codes=keep_codes)
    columns = [pa.array(images, schemas.IMAGE) if field.name == "image" else table[field.name] for field in schema]
    return pa.table(columns, schema=schema)
