"""Rules of reading that changed: an older output resumes with the older rule, and the newer one is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from configs.load import ConfigError
from pipeline.run.resume import refuse_other_content
from pipeline.storage.output_dir import OutputDir
from tests.pipeline.attempts import job

OLDER = ("integral_ids", "text_only_rows", "final_answers", "companions")


def content(source: dict[str, Any]) -> dict[str, Any]:
    return job({"path": "x", **source}, "out").content({})


def older(source: dict[str, Any]) -> dict[str, Any]:
    """The content that version 0.2.0 recorded."""
    found = content(source)
    found["source"] = {name: value for name, value in found["source"].items() if name not in OLDER}
    assert found["source"]["delimiter"] is None
    return found


@pytest.mark.parametrize(
    ("source", "old_value"),
    [
        ({"kind": "webdataset"}, {"companions": "show"}),
        ({"kind": "csv", "id_column": "id"}, {"integral_ids": False}),
        ({"kind": "hf", "id_column": "id"}, {"integral_ids": False}),
        ({"kind": "webdataset", "id_column": "id"}, {"integral_ids": False, "companions": "show"}),
    ],
)
def test_a_changed_rule_is_refused_by_name_and_the_older_value_resumes(tmp_path, source, old_value) -> None:
    before, output = older(source), OutputDir(str(tmp_path))
    refuse_other_content(before, content(source | old_value), output)
    for name in old_value:
        with pytest.raises(ConfigError, match=rf"source\.{name}"):
            refuse_other_content(before, content(source), output)


@pytest.mark.parametrize(
    "source",
    [
        {"kind": "images"},
        {"kind": "csv"},
        {"kind": "csv", "delimiter": "auto"},
        {"kind": "parquet", "id_column": "id", "columns": {"image": "i"}},
        {"kind": "jsonl", "id_column": "id", "text_only_rows": "always", "final_answers": "error"},
    ],
)
def test_rules_that_cannot_change_results_do_not_matter(tmp_path, source) -> None:
    refuse_other_content(older(source), content(source), OutputDir(str(tmp_path)))
