"""Pixels become files that decode to the same pixels, under unique names."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pydantic import ValidationError

from configs.synthesis import ImageFileConfig
from pipeline.rows.schemas import HUGGING_FACE_KEY, SCHEMA_VERSION_KEY
from pipeline.synthesis.files import encode_image, encode_table, file_name
from pipeline.synthesis.rows import painted_schema

KEEP = (pa.field("mine", pa.int32()),)


def picture(height: int = 24, width: int = 40) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Smooth colours, which lossy formats keep well."""
    y, x = np.mgrid[0:height, 0:width]
    return np.stack([6 * x, 5 * y, 3 * (x + y)], axis=-1).astype(np.uint8)


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


@pytest.mark.parametrize("file", [ImageFileConfig(), ImageFileConfig(format="webp", lossless=True)])
def test_formats_without_loss_give_every_pixel_back(file: ImageFileConfig) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (16, 16, 3), np.uint8)
    image = opened(encode_image(noise, file))
    assert image.format == file.format.upper()
    assert np.asarray(image.convert("RGB")).tolist() == noise.tolist()


@pytest.mark.parametrize("format", ["webp", "jpeg"])
def test_lossy_formats_are_close_to_the_pixels_depending_on_quality(format: Any) -> None:
    sizes, distances = [], []
    for quality in (None, 30):
        data = encode_image(picture(), ImageFileConfig(format=format, quality=quality))
        image = opened(data)
        assert image.format == format.upper()
        sizes.append(len(data))
        distances.append(np.abs(np.asarray(image.convert("RGB")).astype(int) - picture()).mean())
    assert sizes[0] > sizes[1]
    assert distances[0] < 3 < distances[1] + 2


def test_the_same_pixels_give_the_same_bytes() -> None:
    assert encode_image(picture(), ImageFileConfig()) == encode_image(picture(), ImageFileConfig())


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"format": "jpeg", "lossless": True}, "JPEG always loses"),
        ({"format": "png", "quality": 80}, "nothing is lost in PNG"),
        ({"format": "webp", "lossless": True, "quality": 80}, "nothing is lost in lossless WebP"),
        ({"format": "webp", "quality": 101}, "less than or equal to 100"),
    ],
)
def test_options_that_contradict_each_other_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        ImageFileConfig(**fields)


def test_names_are_unique_and_hold_no_separators() -> None:
    ids = ["a/b#0", "a_b#0", "a%2Fb#0", "../up#1", "ä ö#0", "a.b#0"]
    names = [file_name(sample_id, ImageFileConfig(format="jpeg")) for sample_id in ids]
    assert names[0] == "a%2Fb#0.jpg"
    assert len(set(names)) == len(ids)
    assert not [name for name in names if "/" in name or "\\" in name]


def table(rows: list[dict[str, Any]]) -> pa.Table:
    schema = painted_schema(KEEP)
    texts = {field.name: "" for field in schema if field.type == pa.string()}
    return pa.Table.from_pylist([{**texts, **row} for row in rows], schema=schema)


def test_a_table_gets_files_in_place_of_pixels_and_rows_without_pixels_get_none() -> None:
    pixels = picture(3, 5)
    rows = [
        {"sample_id": "a#0", "rgb": pixels.tobytes(), "height_px": 3, "width_px": 5, "codes": [1, 2], "mine": 4},
        {"sample_id": "b#0", "rgb": b"", "height_px": 0, "width_px": 0, "codes": [], "error_type": "empty_prompt"},
    ]
    result = encode_table(table(rows), ImageFileConfig(), keep_codes=True)
    good, bad = result.to_pylist()
    assert np.asarray(opened(good["image"]["bytes"])).tolist() == pixels.tolist()
    assert (good["image"]["path"], good["codes"], good["mine"], good["width_px"]) == ("a#0.png", [1, 2], 4, 5)
    assert (bad["image"], bad["error_type"], bad["width_px"]) == (None, "empty_prompt", 0)
    assert "rgb" not in result.schema.names
    assert set(result.schema.metadata) == {SCHEMA_VERSION_KEY, HUGGING_FACE_KEY}
    assert "codes" not in encode_table(table(rows), ImageFileConfig(), keep_codes=False).schema.names
