from __future__ import annotations

import pyarrow as pa
import pytest

from decoding.errors import CODES
from pipeline.rows import schemas


def test_every_code_of_the_engine_has_a_meaning() -> None:
    assert set(CODES) <= set(schemas.ERROR_CODES)


def test_no_column_of_any_stage_has_a_null_type() -> None:
    for schema in (schemas.read_schema(), schemas.decoded_schema(), schemas.result_schema()):
        assert not any(pa.types.is_null(field.type) for field in schema)


def test_kept_columns_follow_ours_and_keep_their_values() -> None:
    keep = [pa.field("url", pa.string()), pa.field("score", pa.float32())]
    for make in (schemas.read_schema, schemas.decoded_schema, schemas.result_schema):
        schema = make(keep)
        assert schema.names[-2:] == ["url", "score"]
        assert schemas.kept_fields(schema) == keep


def test_the_schema_version_is_in_the_metadata() -> None:
    assert schemas.result_schema().metadata[b"draftfleet.schema_version"] == b"1"


def test_names_of_every_stage_are_reserved_whatever_their_case() -> None:
    assert schemas.find_reserved(["url", "Telemetry", "images", "messages", "fields", "score"]) == [
        "Telemetry",
        "images",
        "messages",
        "fields",
    ]


def test_a_row_error_needs_a_known_code() -> None:
    with pytest.raises(AssertionError):
        schemas.RowError("no_such_code", "x")
