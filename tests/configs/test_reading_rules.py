"""Rules of reading that changed: an older output resumes with the older rule, and the newer one is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from configs.load import ConfigError
from configs.source import OLDER, VIDEO_OLDER, SourceConfig, with_older
from pipeline.run.resume import refuse_other_content
from pipeline.storage.output_dir import OutputDir
from tests.pipeline.attempts import job

ROWS = ("integral_ids", "text_only_rows", "final_answers", "companions", "content_marks")


def content(source: dict[str, Any]) -> dict[str, Any]:
    return job({"path": "x", **source}, "out").content({})


def older(source: dict[str, Any]) -> dict[str, Any]:
    """The content that version 0.2.0 recorded."""
    found = content(source)
    found["source"] = {name: value for name, value in found["source"].items() if name not in ROWS}
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


def recorded(source: dict[str, Any]) -> dict[str, Any]:
    """The section `source` as version 0.2.0 recorded it: all keys, without the newer ones."""
    data = job({"path": "x", **source}, "out").resolved()["source"]
    video = {name: value for name, value in data["video"].items() if name not in VIDEO_OLDER}
    return {name: value for name, value in data.items() if name not in OLDER} | {"video": video, "delimiter": None}


def test_a_recorded_source_is_read_by_the_rules_that_it_was_read_by() -> None:
    config = SourceConfig.model_validate(with_older(recorded({"kind": "webdataset"})), strict=False)
    assert {name: getattr(config, name) for name in OLDER} == OLDER
    assert {name: getattr(config.video, name) for name in VIDEO_OLDER} == VIDEO_OLDER
    assert config.delimiter is None
    newer = SourceConfig(kind="webdataset", path="x")
    assert with_older(newer.model_dump(mode="json")) == newer.model_dump(mode="json")


@pytest.mark.parametrize("kind", ["images", "webdataset", "videos"])
def test_every_newer_key_has_another_default(kind) -> None:
    config = SourceConfig(kind=kind, path="x")
    assert all(getattr(config, name) != value for name, value in OLDER.items())
    assert all(getattr(config.video, name) != value for name, value in VIDEO_OLDER.items())


def test_rows_of_conversations_may_have_images_and_videos() -> None:
    asked = job({"kind": "jsonl", "path": "x"}, "out", prompt=None, columns={"messages": "m"}).content({})["source"]
    assert asked["convert_to_srgb"]
    assert asked["video"]["square_pixels"]
    plain = job({"kind": "jsonl", "path": "x"}, "out").content({})["source"]
    assert "convert_to_srgb" not in plain
    assert "square_pixels" not in plain["video"]


def test_marks_in_texts_matter_to_conversations_only(tmp_path) -> None:
    def found(**sections: Any) -> dict[str, Any]:
        return job({"kind": "jsonl", "path": "x", "columns": {"image": "i"}}, "out", **sections).content({})

    chat = {"prompt": None, "columns": {"messages": "m"}}
    assert "content_marks" not in found()["source"]
    before = found(**chat)
    assert before["source"].pop("content_marks") == "read"
    older_rule = {"kind": "jsonl", "path": "x", "columns": {"image": "i"}, "content_marks": "text"}
    refuse_other_content(before, job(older_rule, "out", **chat).content({}), OutputDir(str(tmp_path)))
    with pytest.raises(ConfigError, match=r"source\.content_marks"):
        refuse_other_content(before, found(**chat), OutputDir(str(tmp_path)))


def test_a_media_root_is_a_part_of_the_content_if_it_is_set() -> None:
    assert "media_root" not in content({"kind": "json"})["source"]
    assert content({"kind": "json", "media_root": "../x"})["source"]["media_root"] == "../x"
