"""The actor that decodes codes to pixels: fixed shapes, order, failing and failed rows."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from actors.paint import Paint
from pipeline.rows.schemas import ERROR_CODES
from pipeline.synthesis.rows import coded_schema, painted_schema
from tests.actors.image_fakes import SIDE_PX, FakePainter, image_job

KEEP = (pa.field("mine", pa.int32()),)


def coded_table(rows: list[dict[str, Any]]) -> pa.Table:
    """A table of the stage `coded`; a row has `id`, `codes` or `error`, and a kept column."""
    schema = coded_schema(KEEP)
    texts = {field.name: "" for field in schema if field.type == pa.string()}
    filled = [
        {
            **texts,
            "sample_id": row["id"],
            "codes": row.get("codes", []),
            "status": "error" if "error" in row else "success",
            "finish_reason": "error" if "error" in row else "length",
            "error_type": row.get("error", ""),
            "mine": row.get("mine"),
        }
        for row in rows
    ]
    return pa.Table.from_pylist(filled, schema=schema)


def paint(rows: list[dict[str, Any]], batch_rows: int = 4) -> tuple[list[dict[str, Any]], FakePainter]:
    painter = FakePainter()
    actor = Paint(image_job(vq={"batch_rows": batch_rows}), painted_schema(KEEP), load=lambda config, threads: painter)
    result = actor(coded_table(rows))
    assert result.schema == painted_schema(KEEP)
    return result.to_pylist(), painter


def images(count: int) -> list[dict[str, Any]]:
    return [{"id": f"i{number}", "codes": [number, 0, 0, 0], "mine": number} for number in range(count)]


def test_pixels_and_codes_are_returned_in_input_order() -> None:
    rows, _ = paint(images(10))
    assert [row["sample_id"] for row in rows] == [f"i{number}" for number in range(10)]
    assert [row["rgb"] for row in rows] == [bytes([number] * SIDE_PX * SIDE_PX * 3) for number in range(10)]
    assert {(row["width_px"], row["height_px"]) for row in rows} == {(SIDE_PX, SIDE_PX)}
    assert [row["codes"][0] for row in rows] == [row["mine"] for row in rows] == list(range(10))


def test_every_batch_has_the_same_shape_so_that_no_image_depends_on_its_neighbours() -> None:
    _, painter = paint(images(10))
    assert [batch.shape for batch in painter.batches] == [(4, 4)] * 3
    _, painter = paint(images(1))
    assert [batch.shape for batch in painter.batches] == [(4, 4)]


def test_rows_with_an_error_pass_and_cost_no_decoding() -> None:
    rows, painter = paint([{"id": "a", "error": "empty_prompt", "mine": 5}, *images(1)])
    assert [batch[:, 0].tolist() for batch in painter.batches] == [[0, 0, 0, 0]]
    assert (rows[0]["error_type"], rows[0]["rgb"], rows[0]["width_px"], rows[0]["mine"]) == ("empty_prompt", b"", 0, 5)
    rows, painter = paint([{"id": "a", "error": "empty_prompt"}])
    assert (len(rows), painter.batches) == (1, [])


def test_an_image_without_finite_pixels_is_an_error_row_that_keeps_its_codes() -> None:
    rows, _ = paint([*images(2), {"id": "bad", "codes": [13, 1, 2, 3]}, *images(1)])
    assert [row["status"] for row in rows] == ["success", "success", "error", "success"]
    bad = rows[2]
    assert (bad["error_type"], bad["finish_reason"], bad["rgb"]) == ("non_finite_pixels", "error", b"")
    assert bad["codes"] == [13, 1, 2, 3]
    assert bad["error_message"]
    assert bad["error_type"] in ERROR_CODES


def test_a_decoder_that_breaks_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[BaseException] = []
    monkeypatch.setattr("actors.paint.end_process", ended.append)

    class Broken(FakePainter):
        def paint(self, codes: Any) -> Any:
            raise RuntimeError("CUDA error")

    actor = Paint(image_job(), painted_schema(KEEP), load=lambda config, threads: Broken())
    with pytest.raises(RuntimeError, match="CUDA error"):
        actor(coded_table(images(1)))
    assert [str(error) for error in ended] == ["CUDA error"]


def test_an_empty_batch_gives_an_empty_batch() -> None:
    rows, painter = paint([])
    assert (rows, painter.batches) == ([], [])
