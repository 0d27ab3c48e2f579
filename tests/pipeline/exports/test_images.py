"""Images with their texts leave as img2dataset's tars, loose files, and folders that `datasets` opens."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from PIL import Image

from configs.load import ConfigError, validate
from configs.output import ExportJobConfig
from configs.pool import JobSectionConfig
from pipeline.exports.run import ExportReport, run_exports
from pipeline.output.recorded_job import read_any_job, read_job
from tests.pipeline.attempts import job, run
from tests.pipeline.exports.small_jobs import export, files_below, image_job, killed, members, tar_job
from tests.pipeline.formats.shards import tar_bytes
from tests.pipeline.image_jobs import image_synthesis, picture, run_images

PROMPTS = ["a red cat", "a dog <b> by a tree", "snow & ice"]


def export_any(output: Path, *sections: dict[str, Any]) -> list[ExportReport]:
    """Run exports of an output of images or captions."""
    exports = validate(ExportJobConfig, {"exports": list(sections)}, "test").exports
    return run_exports(read_any_job(str(output), "--from"), exports, JobSectionConfig(progress=False))


@pytest.fixture
def made(tmp_path: Path) -> Path:
    run_images(image_synthesis(tmp_path, PROMPTS), fails=lambda own: own == "p.txt#1#1")
    return tmp_path


def samples_of(folder: Path) -> list[dict[str, Any]]:
    """Members of all tars by key: bytes by suffix."""
    samples: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.rglob("*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                key, _, suffix = member.name.partition(".")
                file = tar.extractfile(member)
                assert file is not None
                samples.setdefault(key, {"key": key})[suffix] = file.read()
    return list(samples.values())


def test_tars_of_images_have_img2datasets_members_with_prompt_seed_and_guidance(made: Path) -> None:
    [report] = export_any(made / "out", {"kind": "tars", "path": str(made / "tars")})
    assert (report.num_written, report.num_refused) == (5, 0)
    samples = samples_of(made / "tars")
    assert [sorted(sample) for sample in samples] == [["json", "key", "png", "txt"]] * 5
    facts = [json.loads(sample["json"]) for sample in samples]
    assert [row["sample_id"] for row in facts] == [
        f"p.txt#{n}#{r}" for n, r in ((0, 0), (0, 1), (1, 0), (2, 0), (2, 1))
    ]
    for sample, row in zip(samples, facts, strict=True):
        number, replica = int(row["prompt_id"].split("#")[1]), row["replica"]
        assert row["key"] == sample["key"]
        assert "." not in sample["key"]
        assert sample["txt"].decode() == row["caption"] == PROMPTS[number]
        assert (row["seed"], row["guidance_scale"], row["width_px"]) == (7, 3.0, 8)
        assert row["sha256"] == hashlib.sha256(sample["png"]).hexdigest()
        pixels = np.asarray(Image.open(io.BytesIO(sample["png"])))
        assert (pixels == picture(2 * number + replica)).all()
    before = files_below(made / "tars")
    assert export_any(made / "out", {"kind": "tars", "path": str(made / "tars")})[0].num_parts == 0
    assert files_below(made / "tars") == before


def test_tars_of_images_are_read_as_a_source_again(made: Path) -> None:
    export_any(made / "out", {"kind": "tars", "path": str(made / "tars")})
    config = job({"kind": "webdataset", "path": str(made / "tars")}, made / "again", prompt={"text": "{txt}"})
    assert json.loads(run(config).read_first(3)["fields"][2].as_py()) == {"txt": PROMPTS[1]}


def test_loose_files_have_the_names_of_rows_and_a_text_beside_them(made: Path) -> None:
    [report] = export_any(made / "out", {"kind": "files", "path": str(made / "loose")})
    assert report.num_written == 5
    names = ["p.txt#0#0", "p.txt#0#1", "p.txt#1#0", "p.txt#2#0", "p.txt#2#1"]
    files = files_below(made / "loose")
    assert sorted(files) == sorted(f"{name}.{suffix}" for name in names for suffix in ("png", "txt"))
    assert files["p.txt#1#0.txt"].decode() == f"{PROMPTS[1]}\n"
    export_any(made / "out", {"kind": "files", "path": str(made / "objects"), "text": "json", "columns": ["seed"]})
    facts = json.loads(files_below(made / "objects")["p.txt#2#1.json"])
    assert facts == {"file_name": "p.txt#2#1.png", "caption": PROMPTS[2], "seed": 7}


def test_image_folders_open_in_datasets(made: Path) -> None:
    export_any(made / "out", {"kind": "imagefolder", "path": str(made / "folders")})
    rows = datasets.load_dataset(
        "imagefolder", data_dir=str(made / "folders"), split="train", cache_dir=str(made / "c")
    )
    assert len(rows) == 5
    for row in rows:
        number = int(row["prompt_id"].split("#")[1])
        assert (row["caption"], row["seed"], row["guidance_scale"]) == (PROMPTS[number], 7, 3.0)
        assert (np.asarray(row["image"]) == picture(2 * number + row["replica"])).all()


def test_a_dataset_of_images_opens_with_its_prompts(made: Path) -> None:
    export_any(made / "out", {"kind": "dataset", "path": str(made / "set"), "title": "Cats"})
    rows = datasets.load_dataset(str(made / "set"), split="train", cache_dir=str(made / "c"))
    assert rows.column_names[:3] == ["sample_id", "prompt", "image"]
    assert (np.asarray(rows[3]["image"]) == picture(4)).all()
    assert rows[3]["prompt"] == PROMPTS[2]
    assert "Images generated by a model" in (made / "set/README.md").read_text()


@pytest.mark.parametrize(
    ("section", "reason"),
    [
        ({"kind": "sidecars"}, "exports.0.kind: sidecars exports texts, and the job makes images; take tars"),
        ({"kind": "webdataset", "path": "x"}, "exports.0.kind: webdataset exports texts"),
        ({"kind": "tars", "path": "x", "columns": ["none"]}, "exports.0.columns: .* has no column 'none'"),
        ({"kind": "files", "path": "x", "columns": ["image"]}, "exports.0.columns: 'image' is exported as a file"),
        ({"kind": "dataset", "path": "x", "images": "first"}, "exports.0.images: the job makes images"),
    ],
)
def test_exports_that_images_cannot_have_are_refused(made: Path, section: dict[str, Any], reason: str) -> None:
    if "path" in section:
        section = section | {"path": str(made / "x")}
    with pytest.raises(ConfigError, match=reason):
        export_any(made / "out", section)


def test_codes_without_images_have_nothing_to_export(tmp_path: Path) -> None:
    run_images(image_synthesis(tmp_path, PROMPTS, sink={"images": False}))
    with pytest.raises(ConfigError, match=r"exports.0: the job has sink.images: false"):
        export_any(tmp_path / "out", {"kind": "tars", "path": str(tmp_path / "x")})
    with pytest.raises(ConfigError, match=r"--from: .* is the output of a synthesis job"):
        read_job(str(tmp_path / "out"), "--from")


def test_captions_of_any_source_leave_as_tars_with_their_images(tmp_path: Path) -> None:
    image_job(tmp_path, ["a.png", "b/c.png", "d.png", "e.png"])
    [report] = export(tmp_path / "out", {"kind": "tars", "path": str(tmp_path / "tars")})
    assert report.num_written == 4
    for sample in samples_of(tmp_path / "tars"):
        facts = json.loads(sample["json"])
        assert sample["png"] == (tmp_path / "in" / facts["source"]).read_bytes()
        assert sample["txt"].decode() == facts["caption"] == f"text of {facts['sample_id']}"
    tar_job(tmp_path / "tar", {"a.tar": tar_bytes(members(3))})
    export(tmp_path / "tar/out", {"kind": "tars", "path": str(tmp_path / "tar/new")})
    assert [sample["txt"].decode() for sample in samples_of(tmp_path / "tar/new")] == [
        f"text of a.tar#{n}" for n in range(3)
    ]
    assert all("png" in sample for sample in samples_of(tmp_path / "tar/new"))


def test_texts_without_images_leave_as_tars_and_not_as_image_files(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.txt").write_text("one\ntwo\n")
    run(job({"kind": "text", "path": str(tmp_path / "in")}, tmp_path / "out", prompt={"text": "{text}"}))
    export(tmp_path / "out", {"kind": "tars", "path": str(tmp_path / "tars")})
    assert [sorted(sample) for sample in samples_of(tmp_path / "tars")] == [["json", "key", "txt"]] * 2
    [report] = export(tmp_path / "out", {"kind": "files", "path": str(tmp_path / "files")})
    assert (report.num_written, report.num_refused) == (0, 2)
    assert "export_refused: the row has no image" in report.lines()[1]


def test_an_image_that_is_gone_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    image_job(tmp_path, ["a.png", "b.png"])
    (tmp_path / "in/a.png").unlink()
    with pytest.raises(ConfigError, match=r"source\.path: a.png: gone"):
        export(tmp_path / "out", {"kind": "tars", "path": str(tmp_path / "tars")})
    assert not (tmp_path / "tars").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tars", "files", "imagefolder"])
def test_kills_between_changes_of_files_lose_and_double_nothing(tmp_path: Path, kind: str) -> None:
    run_images(image_synthesis(tmp_path, PROMPTS))
    export_any(tmp_path / "out", {"kind": kind, "path": str(tmp_path / "whole")})
    expected = files_below(tmp_path / "whole")
    for index in range(1, 400, 7):
        section = {"kind": kind, "path": str(tmp_path / f"cut-{index}")}
        was_killed = killed(lambda section=section: export_any(tmp_path / "out", section), index)
        export_any(tmp_path / "out", section)
        assert files_below(tmp_path / f"cut-{index}") == expected
        if not was_killed:
            return
    raise AssertionError("every export was killed: raise the number of passages")
