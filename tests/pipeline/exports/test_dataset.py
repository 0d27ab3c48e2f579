"""Exported folders open with `datasets.load_dataset`, hold each finished row once, and keep an edited card."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import datasets
import pyarrow.parquet as pq
import pytest
import yaml

from configs.load import ConfigError
from pipeline.run.job_plan import ResumeOptions
from tests.pipeline.attempts import job, run
from tests.pipeline.exports.small_jobs import RED, export, files_below, image_job, images, records, some_tars, tar_job
from tests.pipeline.formats.shards import encode, write_parquet

NAMES = ["a.png", "b.png", "s/c.png", "s/d.png"]


def load(folder: Path) -> datasets.Dataset:
    """Load the folder without what an earlier call has cached of it."""
    cache = tempfile.mkdtemp(dir=folder.parent)
    return datasets.load_dataset(str(folder), split="train", cache_dir=cache)


def section(tmp_path: Path, **options: object) -> dict[str, object]:
    return {"kind": "dataset", "path": str(tmp_path / "new"), **options}


def test_a_folder_is_loaded_with_its_captions(tmp_path) -> None:
    image_job(tmp_path, NAMES)
    [report] = export(tmp_path / "out", section(tmp_path))
    assert report.num_written == 4
    dataset = load(tmp_path / "new")
    assert dataset.column_names == ["sample_id", "source", "generated_text"]
    assert sorted(dataset["generated_text"]) == [f"text of {name}#0" for name in NAMES]


def test_images_are_the_bytes_of_the_source(tmp_path) -> None:
    image_job(tmp_path, NAMES)
    export(tmp_path / "out", section(tmp_path, images="first", columns=["sample_id"]))
    dataset = load(tmp_path / "new")
    assert isinstance(dataset.features["image"], datasets.Image)
    stored = dataset.cast_column("image", datasets.Image(decode=False))
    assert {row["sample_id"]: row["image"]["bytes"] for row in stored} == {
        f"{name}#0": (tmp_path / "in" / name).read_bytes() for name in NAMES
    }
    assert dataset[0]["image"].size == (8, 6)


@pytest.mark.slow
def test_all_images_of_rows_and_uris_are_read_again(tmp_path) -> None:
    images(tmp_path / "in", ["one.png", "two.png"])
    cells = [["one.png", "two.png"], ["two.png"], []]
    write_parquet(tmp_path / "in/a.parquet", {"i": cells, "q": ["x", "y", "z"]})
    source = {"kind": "parquet", "path": str(tmp_path / "in"), "columns": {"image": "i"}}
    run(job(source, tmp_path / "out", prompt={"text": "{q}"}, sampling={}))
    [report] = export(tmp_path / "out", section(tmp_path, images="all", columns=["sample_id", "generated_text"]))
    assert report.num_refused == 0, report.refused
    data = {name: (tmp_path / "in" / name).read_bytes() for name in ("one.png", "two.png")}
    rows = {
        row["sample_id"]: [image["bytes"] for image in row["images"]]
        for name in (tmp_path / "new/data").iterdir()
        for row in pq.read_table(name).to_pylist()
    }
    expected = {f"a.parquet#{row}": [data[name] for name in cell] for row, cell in enumerate(cells) if cell}
    assert {key: value for key, value in rows.items() if value} == expected
    assert isinstance(load(tmp_path / "new").features["images"].feature, datasets.Image)


@pytest.mark.slow
def test_images_of_tars_are_read_again(tmp_path) -> None:
    tar_job(tmp_path, some_tars())
    export(tmp_path / "out", section(tmp_path, images="first"))
    dataset = load(tmp_path / "new").cast_column("image", datasets.Image(decode=False))
    assert {row["sample_id"]: row["image"]["bytes"] for row in dataset}["b/c.tar#2"] == encode((2, 1, 2))
    assert len(dataset) == 10


def test_an_image_that_is_gone_is_a_refused_row(tmp_path, monkeypatch) -> None:
    image_job(tmp_path, NAMES)
    with monkeypatch.context() as patch:
        from pipeline.output import recorded_job

        patch.setattr(recorded_job, "_refuse_files", lambda *_: None)
        (tmp_path / "in/a.png").write_bytes(b"")
        [report] = export(tmp_path / "out", section(tmp_path, images="first"))
    assert report.num_written + report.num_refused == 4


def test_a_source_that_changed_is_refused_if_images_are_needed(tmp_path) -> None:
    image_job(tmp_path, NAMES)
    (tmp_path / "in/a.png").write_bytes(RED + b"more")
    with pytest.raises(ConfigError, match=r"source\.path: a\.png: other \(size, etag or time\)"):
        export(tmp_path / "out", section(tmp_path, images="first"))
    assert export(tmp_path / "out", section(tmp_path))[0].num_written == 4


def test_later_results_are_added_and_rows_of_a_file_that_was_set_aside_stay_once(tmp_path) -> None:
    images(tmp_path / "in", NAMES)
    config = job({"kind": "images", "path": str(tmp_path / "in")}, tmp_path / "out", sink={"rows_per_file": 2})
    run(config, fails=lambda own: own == "a.png#0")
    export(tmp_path / "out", section(tmp_path))
    assert len(load(tmp_path / "new")) == 3
    damaged = next(path for path in (tmp_path / "out/data").iterdir() if pq.read_metadata(path).num_rows)
    damaged.write_bytes(damaged.read_bytes()[:-9])
    run(config, ResumeOptions(retry_errors=True))
    export(tmp_path / "out", section(tmp_path))
    dataset = load(tmp_path / "new")
    assert sorted(dataset["sample_id"]) == [f"{name}#0" for name in NAMES]
    assert "rows          4" in (tmp_path / "new/README.md").read_text()


def test_the_card_has_valid_metadata_whatever_the_texts_are(tmp_path) -> None:
    hostile = '---\n"x": [\n# heading <script>alert(1)</script> {'
    image_job(tmp_path, NAMES, prompt={"text": hostile.replace("{", "{{")})
    export(tmp_path / "out", section(tmp_path, title=hostile))
    text = (tmp_path / "new/README.md").read_text()
    _, front, body = text.split("---\n", 2)[0], *text.split("\n---\n\n# ", 1)
    metadata = yaml.safe_load(front.removeprefix("---\n"))
    assert metadata["pretty_name"] == hostile
    assert metadata["configs"][0]["data_files"][0]["path"] == "data/train-*.parquet"
    assert [line for line in body.splitlines()[4:] if line and not line.startswith("    ")] == []
    assert len(load(tmp_path / "new")) == 4


def test_an_edited_card_is_kept_and_an_old_one_is_replaced(tmp_path) -> None:
    config = image_job(tmp_path, NAMES)
    export(tmp_path / "out", section(tmp_path))
    images(tmp_path / "in", ["new.png"])
    run(config)
    export(tmp_path / "out", section(tmp_path))
    card = tmp_path / "new/README.md"
    assert "rows          5" in card.read_text()
    card.write_text("my own words")
    export(tmp_path / "out", section(tmp_path))
    assert card.read_text() == "my own words"


def test_a_folder_with_other_files_or_of_other_settings_is_refused(tmp_path) -> None:
    image_job(tmp_path, NAMES)
    (tmp_path / "new").mkdir()
    (tmp_path / "new/mine.txt").write_text("x")
    with pytest.raises(ConfigError, match=r"exports\.0\.path: .* is not empty: it holds mine\.txt"):
        export(tmp_path / "out", section(tmp_path))
    (tmp_path / "new/mine.txt").unlink()
    export(tmp_path / "out", section(tmp_path))
    before = files_below(tmp_path / "new")
    with pytest.raises(ConfigError, match="an export with other settings has a folder of its own"):
        export(tmp_path / "out", section(tmp_path, title="Other"))
    assert files_below(tmp_path / "new") == before


def test_unknown_columns_are_refused_by_name(tmp_path) -> None:
    image_job(tmp_path, NAMES)
    with pytest.raises(ConfigError, match=r"exports\.0\.columns: .* no column 'caption'"):
        export(tmp_path / "out", section(tmp_path, columns=["caption"]))


def test_records_name_what_was_written(tmp_path) -> None:
    image_job(tmp_path, NAMES, rows_per_file=20)
    export(tmp_path / "out", section(tmp_path))
    assert sum(record["num_written"] for record in records(tmp_path / "out", "dataset")) == 4
    [claim] = (tmp_path / "out").glob("_job/exports/dataset-*/export.json")
    assert json.loads(claim.read_text())["path"] == str(tmp_path / "new")
