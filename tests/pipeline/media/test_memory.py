"""The memory of decoding has one bound, regardless of the files' headers; measured in a separate process."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

pytestmark = pytest.mark.slow

BOUND = 384 << 20
"""Of one task, in these tests."""
SHARE = BOUND // 6
CHILD_BOUND = 768 << 20
"""Of the decoders' process: libraries and `worker_max_bytes`, of which images here need far less."""
ROOT = Path(__file__).resolve().parents[3]


def flat_png(width: int, height: int) -> bytes:
    """A PNG of one colour: thousands of pixels to a byte."""
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), (10, 200, 30)).save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def photo(width: int, height: int, quality: int = 60) -> bytes:
    """A JPEG of smooth noise."""
    noise = np.random.default_rng(0).integers(0, 256, (48, 64, 3)).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).resize((width, height)).save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()


def write(path: Path, images: list[Any], kind: pa.DataType) -> dict[str, Any]:
    """One Parquet file; its source."""
    path.parent.mkdir()
    pq.write_table(pa.table({"image": pa.array(images, kind)}), path, compression="zstd", compression_level=19)
    columns = {"image": "image"}
    return {"kind": "parquet", "path": str(path.parent), "columns": columns, "max_decoded_bytes": BOUND}


def measure(source: dict[str, Any], batch_rows: int = 32, *more: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.pipeline.media.peak_memory", json.dumps(source), str(batch_rows), *more]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    measured: dict[str, Any] = json.loads(done.stdout)
    assert measured["peak"] - measured["base"] <= BOUND
    assert measured["child"] <= CHILD_BOUND
    return measured


def test_a_few_kilobytes_of_parquet_that_name_one_large_image_many_times(tmp_path: Path) -> None:
    path = tmp_path / "in" / "x.parquet"
    source = write(path, [flat_png(4000, 4000)] * 64, pa.binary())
    assert path.stat().st_size < 8_000
    measured = measure({**source, "max_side_px": None})
    assert measured["codes"] == [""] * 64
    # 48 MB each: one to a share, two where a share is not full yet.
    assert max(measured["tasks"]) <= 2
    assert sum(measured["tasks"]) == 64


def test_sixteen_photos_of_twelve_megapixels(tmp_path: Path) -> None:
    source = write(tmp_path / "in" / "x.parquet", [photo(4032, 3024)] * 16, pa.binary())
    measured = measure({**source, "max_side_px": None})
    assert measured["codes"] == [""] * 16
    assert sum(measured["tasks"]) == 16
    assert max(measured["tasks"]) <= 3
    shrunk = measure({**source, "max_side_px": 1344})
    assert shrunk["codes"] == [""] * 16
    assert len(shrunk["tasks"]) < len(measured["tasks"])


def test_a_row_of_a_hundred_and_fifty_images(tmp_path: Path) -> None:
    rows = [[photo(4032, 3024, quality=10)] * 150, [photo(64, 64)]]
    source = write(tmp_path / "in" / "x.parquet", rows, pa.list_(pa.binary()))
    assert measure({**source, "max_side_px": None})["codes"] == ["too_many_images", ""]
    many = {**source, "max_images_per_row": 150}
    assert measure({**many, "max_side_px": None})["codes"] == ["row_too_large", ""]
    assert measure({**many, "max_side_px": 336})["codes"] == ["", ""]


def test_rows_of_many_encoded_bytes_are_cut_too(tmp_path: Path) -> None:
    # Bytes behind the end of a picture: nearly nothing to decode, much to hold. Six would exceed the bound of a span.
    heavy = flat_png(8, 8) + bytes(SHARE // 3)
    source = write(tmp_path / "in" / "x.parquet", [heavy] * 5, pa.binary())
    measured = measure({**source, "max_side_px": None})
    assert max(measured["tasks"]) <= 4
    assert measured["codes"] == [""] * 5
    beyond = [[flat_png(8, 8) + bytes(SHARE // 2)] * 2, [flat_png(8, 8) + bytes(SHARE // 2)]]
    assert measure(write(tmp_path / "more" / "x.parquet", beyond, pa.list_(pa.binary())))["codes"] == [
        "row_too_large",
        "",
    ]


@pytest.mark.parametrize("batch_rows", [1, 4])
def test_the_bound_holds_for_small_tasks(tmp_path: Path, batch_rows: int) -> None:
    source = write(tmp_path / "in" / "x.parquet", [flat_png(4000, 4000)] * 6, pa.binary())
    assert measure({**source, "max_side_px": None}, batch_rows)["codes"] == [""] * 6


def test_the_bound_holds_for_tasks_that_run_a_processor(tmp_path: Path) -> None:
    small, large = [photo(1000, 1000)] * 24, [photo(4032, 3024)] * 4
    source = write(tmp_path / "in" / "x.parquet", [*small, *large, *small], pa.binary())
    measured = measure({**source, "max_side_px": None}, 32, "processor")
    assert measured["codes"] == [""] * 52
    # Float patches of the large ones would take 290 MB each, so they travel as pixels.
    assert measured["processed"] == 48
    assert sum(measured["tasks"]) == 52
