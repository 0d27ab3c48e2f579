"""Weights of rows and the fillers that represent them; headers are read in plain Python."""

from __future__ import annotations

import io
import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from actors.media import FILLER_INDEX, without_fillers
from configs.schema import PromptConfig, RowColumnsConfig
from configs.source import SHARES, SourceConfig
from pipeline.media.image_size import size_of
from pipeline.media.row_weights import Weigher, padded, share_of
from pipeline.prompts.row_options import PromptOptions
from pipeline.rows import schemas

BATCH = 8
UNIT = 30_000


def encoded(kind: str, size: tuple[int, int] = (40, 30), mode: str = "RGB", **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, size).save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("PNG", {}),
        ("JPEG", {}),
        ("JPEG", {"progressive": True}),
        ("JPEG", {"exif": b"Exif\0\0" + bytes(5000)}),
        ("WEBP", {}),
        ("WEBP", {"lossless": True}),
        ("WEBP", {"exif": b"Exif\0\0"}),
        ("GIF", {}),
        ("BMP", {}),
    ],
)
def test_image_headers_give_the_size_that_pillow_reads(kind: str, options: dict[str, Any]) -> None:
    for size in ((40, 30), (1, 1), (257, 3)):
        assert size_of(encoded(kind, size, **options)) == size
    whole = encoded(kind, **options)
    for cut in range(min(len(whole), 60)):
        assert size_of(whole[:cut]) in (None, (40, 30))


STARTS = [b"", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"RIFF1234WEBPVP8 ", b"BM"]


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=80), st.sampled_from(STARTS))
def test_no_bytes_break_the_reading_of_headers(data: bytes, start: bytes) -> None:
    size = size_of(start + data)
    assert size is None or min(size) > 0


def read_table(cells: list[list[dict[str, Any]]], fields: list[dict[str, Any]] | None = None) -> pa.Table:
    count = len(cells)
    columns = {
        "sample_id": [f"s{index}" for index in range(count)],
        "source": ["f"] * count,
        "row_index": list(range(count)),
        "videos": [[] for _ in range(count)],
        "images": cells,
        "fields": [json.dumps(values) for values in fields or [{}] * count],
        "error_type": [""] * count,
        "error_message": [""] * count,
    }
    return pa.table(columns, schema=schemas.read_schema())


def weigher(columns: RowColumnsConfig | None = None, **source: Any) -> Weigher:
    bound = 16 << 20
    made = SourceConfig.model_validate_json(
        json.dumps({"kind": "parquet", "path": "x", "max_decoded_bytes": bound, "max_side_px": None, **source})
    )
    assert share_of(bound) == bound // SHARES
    return Weigher.of(
        made, BATCH, PromptOptions(PromptConfig(text="{prompt}" if columns else "x"), columns or RowColumnsConfig())
    )


def image(width: int, height: int) -> dict[str, Any]:
    return {"bytes": encoded("PNG", (width, height))}


def test_a_row_weighs_its_share_of_a_task_in_decoded_bytes() -> None:
    share = share_of(16 << 20)
    side = int((share / BATCH / 3) ** 0.5)
    table = read_table(
        [[image(side, side)], [image(side + 1, side + 1)], [image(side, side)] * 3, [], [image(4000, 4000)]]
    )
    assert weigher().weights(table) == [1, 2, 3, 1, BATCH]
    assert weigher(max_side_px=side).weights(table) == [1, 1, 3, 1, 1]


def test_an_image_that_is_fetched_later_weighs_the_most_it_may() -> None:
    table = read_table([[{"uri": "a.jpg"}], [{"uri": "a.jpg"}, {"uri": "b.jpg"}]])
    assert weigher().weights(table) == [BATCH, BATCH]
    assert weigher(max_side_px=336).weights(table) == [1, 2]


def test_a_row_counts_for_as_many_as_its_prompts() -> None:
    asked = weigher(RowColumnsConfig(prompts="p"))
    fields = [{"p": ["one"]}, {"p": ["one", "two", "three"]}, {"p": None}, {"p": ["x"] * 100}]
    assert asked.weights(read_table([[]] * 4, fields)) == [1, 3, 1, BATCH]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 2 * BATCH), max_size=25))
def test_tasks_of_weighted_rows_are_not_empty_and_exceed_their_share_by_at_most_one_row(heaviness: list[int]) -> None:
    share = share_of(16 << 20)
    cells = [[{"bytes": bytes(share * factor // BATCH)}] if factor else [] for factor in heaviness]
    table = read_table(cells)
    made = weigher(max_side_px=16)
    padded = made.with_fillers(table)
    weights = made.weights(table)
    assert padded.num_rows == sum(weights)
    seen: list[str] = []
    for start in range(0, padded.num_rows, BATCH):
        batch = without_fillers(padded.slice(start, BATCH))
        assert batch.num_rows > 0
        assert FILLER_INDEX not in batch["row_index"].to_pylist()
        held = [weights[index] for index in batch["row_index"].to_pylist()]
        assert sum(held) <= 2 * BATCH
        assert sum(held[1:]) < BATCH
        seen += batch["sample_id"].to_pylist()
    assert seen == table["sample_id"].to_pylist()
    assert without_fillers(padded).combine_chunks().equals(table.combine_chunks())


def test_a_stage_receives_samples_only_and_its_output_is_padded_to_batches() -> None:
    table = weigher().with_fillers(read_table([[image(4000, 4000)], []]))
    assert table.num_rows == BATCH + 1
    seen: list[int] = []

    def stage(rows_: pa.Table) -> pa.Table:
        seen.append(rows_.num_rows)
        return rows_

    made = padded(stage, BATCH)(table)
    assert seen == [2]
    assert made.num_rows == BATCH
    assert without_fillers(made)["sample_id"].to_pylist() == ["s0", "s1"]
    assert padded(stage, 1)(table).num_rows == 2
