"""Whole synthesis jobs on tiny models in the published formats: every image accounted for, and the output opens."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import datasets
import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from PIL import Image

from actors.loading.image_pair import VqPainter
from configs.load import load_job
from configs.synthesis import SynthesizeJobConfig
from jobs import synthesize, verify
from models.llamagen.condition import load_t5
from models.llamagen.vq_files import load_vq
from models.loading.checkpoints import CheckpointRef
from pipeline.rows.schemas import ERROR_CODES, IMAGE
from tests.toys import images
from tests.toys.image_checkpoints import IMAGE_PX, MAX_WORDS, ImageFolders, write_checkpoints

pytestmark = pytest.mark.usefixtures("local_ray")
CPU = torch.device("cpu")
PROMPTS: dict[str, str | None] = {
    "p0": "a red cat",
    "p1": "a blue dog by a tree",
    "p2": " ",
    "p3": "a " * (MAX_WORDS + 1),
    "p4": None,
    "p5": "old house",
    "p6": "tall tree",
    "p7": "@somebody",
    "p8": "green dog",
}
TEMPERATURES = {"p5": 0.0, "p6": -1.0}
SEEDS = {"p8": 99}
BROKEN = {
    "p2": "empty_prompt",
    "p3": "prompt_too_long",
    "p4": "missing_column_value",
    "p6": "invalid_sampling",
    "p7": "empty_prompt",
}
GOOD = [name for name in PROMPTS if name not in BROKEN]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> ImageFolders:
    return write_checkpoints(tmp_path_factory.mktemp("checkpoints"))


def run(job: dict[str, Any], folder: Path, *arguments: str) -> Path:
    """Run a job into `folder/out`; returns that."""
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump({**job, "sink": {**job.get("sink", {}), "path": str(folder / "out")}}))
    assert synthesize.main(["--config", str(path), *arguments]) == 0
    return folder / "out"


def rows_of(output: Path, *parts: str) -> dict[str, dict[str, Any]]:
    """All rows of some folders by sample id, of which none is there twice."""
    rows_by_id: dict[str, dict[str, Any]] = {}
    for part in parts or ("data", "errors"):
        for path in sorted((output / part).glob("*.parquet")):
            for row in pq.read_table(path).to_pylist():
                assert row["sample_id"] not in rows_by_id
                rows_by_id[row["sample_id"]] = row
    return rows_by_id


@pytest.fixture(scope="module")
def drafted(folders: ImageFolders, tmp_path_factory: pytest.TempPathFactory, local_ray: None) -> Path:
    """Prompts in Parquet through T5, three images each, EAGLE-2 with exact acceptance."""
    folder = tmp_path_factory.mktemp("drafted")
    columns = {
        "id": list(PROMPTS),
        "caption": list(PROMPTS.values()),
        "heat": [TEMPERATURES.get(name) for name in PROMPTS],
        "seed": pa.array([SEEDS.get(name) for name in PROMPTS], pa.int64()),
        "mine": [f"mine {name}" for name in PROMPTS],
    }
    (folder / "in").mkdir()
    pq.write_table(pa.table(columns), folder / "in/prompts.parquet", row_group_size=4)
    job = {
        "source": {"kind": "parquet", "path": str(folder / "in"), "id_column": "id", "span_max_rows": 4},
        "prompt": "{caption}",
        "columns": {"temperature": "heat", "seed": "seed"},
        "model": {
            "target": {"path": str(folders.text)},
            "drafter": {"path": str(folders.drafters["eagle"])},
            "vq": {"path": str(folders.vq)},
            "condition": {"path": str(folders.t5)},
        },
        "method": {
            "drafter": {"kind": "eagle"},
            "tree": {"kind": "dynamic", "top_k": 4, "depth": 3, "total_tokens": 12},
        },
        "sampling": {"num_images_per_prompt": 3, "top_k": 20, "guidance_scale": 3.0},
        "pool": {"slots": 4, "batch_rows": 2},
        "vq": {"batch_rows": 4},
        "sink": {"keep_columns": ["mine"]},
        "job": {"progress": False, "max_error_share": None},  # most prompts are broken
    }
    return run(job, folder)


def test_every_prompt_gives_three_rows_with_images_or_errors(drafted: Path) -> None:
    good, bad = rows_of(drafted, "data"), rows_of(drafted, "errors")
    assert set(good) == {f"{name}#{replica}" for name in GOOD for replica in range(3)}
    assert {name: row["error_type"] for name, row in bad.items()} == {
        f"{name}#{replica}": code for name, code in BROKEN.items() for replica in range(3)
    }
    assert set(BROKEN.values()) <= set(ERROR_CODES)
    for name, row in (good | bad).items():
        prompt_id, replica = name.split("#")
        assert (row["prompt_id"], row["replica"], row["mine"]) == (prompt_id, int(replica), f"mine {prompt_id}")
        assert (
            (row["image"] is None) == (row["codes"] == []) == (row["status"] == "error") == bool(row["error_message"])
        )


def test_rows_record_the_sampling_of_their_images(drafted: Path) -> None:
    for row in rows_of(drafted, "data").values():
        name = row["prompt_id"]
        assert (row["prompt"], row["temperature"], row["seed"]) == (
            PROMPTS[name], TEMPERATURES.get(name, 1.0), SEEDS.get(name, 0)
        )  # fmt: skip
        assert (row["guidance_scale"], row["top_k"], row["top_p"], row["label"]) == (3.0, 20, 1.0, None)
        assert (row["width_px"], row["height_px"], len(row["codes"])) == (IMAGE_PX, IMAGE_PX, images.GRID**2)
        assert (row["status"], row["finish_reason"], row["verify_mode"]) == ("success", "length", "lossless")
        assert row["num_input_tokens"] == len(str(PROMPTS[name]).split()) + 1
        telemetry = row["telemetry"]
        steps, accepted = telemetry["num_spec_steps"], telemetry["num_accepted_draft_tokens"]
        assert len(row["codes"]) == 1 + accepted + steps - telemetry["ended_inside_path"]
        assert telemetry["num_draft_tokens"] > 0


def test_images_of_a_prompt_differ_unless_they_are_greedy(drafted: Path) -> None:
    codes = {name: tuple(row["codes"]) for name, row in rows_of(drafted, "data").items()}
    for name in GOOD:
        different = {codes[f"{name}#{replica}"] for replica in range(3)}
        assert len(different) == (1 if TEMPERATURES.get(name) == 0.0 else 3)


def test_an_image_is_the_output_of_the_vq_model_for_its_codes(drafted: Path, folders: ImageFolders) -> None:
    painter = VqPainter(load_vq(CheckpointRef(str(folders.vq)), "float32", CPU), images.GRID, CPU)
    rows = list(rows_of(drafted, "data").values())
    expected, _ = painter.paint(np.array([row["codes"] for row in rows]))
    for row, pixels in zip(rows, expected, strict=True):
        image = Image.open(io.BytesIO(row["image"]["bytes"]))
        assert (image.format, image.mode, row["image"]["path"]) == ("PNG", "RGB", f"{row['sample_id']}.png")
        # Another number of images at once may round otherwise.
        assert np.abs(np.asarray(image).astype(int) - pixels.astype(int)).max() <= 1
    assert np.ptp(expected) > 50, "pictures so flat that any would do"


def test_the_output_opens_with_images_in_datasets_and_as_it_is_elsewhere(drafted: Path, tmp_path: Path) -> None:
    data = drafted / "data"
    dataset = datasets.load_dataset("parquet", data_dir=str(data), split="train", cache_dir=str(tmp_path))
    assert isinstance(dataset.features["image"], datasets.Image)
    expected = rows_of(drafted, "data")
    assert dataset.num_rows == len(expected) == 3 * len(GOOD)
    for row in dataset:
        assert row["image"].size == (IMAGE_PX, IMAGE_PX)
        assert row["codes"] == expected[row["sample_id"]]["codes"]
    frame = pd.read_parquet(data)
    assert sorted(frame["sample_id"]) == sorted(expected)
    assert frame["codes"][0].tolist() == expected[frame["sample_id"][0]]["codes"]
    [(by_duckdb, codes)] = duckdb.sql(f"select count(image.bytes), sum(len(codes)) from '{data}/*.parquet'").fetchall()
    assert (by_duckdb, codes) == (len(expected), len(expected) * images.GRID**2)
    schema = pq.read_schema(next(data.glob("*.parquet")))
    assert schema.field("image").type == IMAGE
    assert schema.field("codes").type == pa.list_(pa.int32())


def test_a_job_leaves_its_config_versions_and_a_summary_in_images(drafted: Path) -> None:
    job = drafted / "_job"
    versions = json.loads((job / "versions.json").read_text())
    record = json.loads((job / "attempts/000001.json").read_text())
    done = json.loads((job / "summary.json").read_text())
    assert set(versions["model_revisions"]) == {"target", "drafter", "vq", "condition"}
    again = load_job(SynthesizeJobConfig, job / "config.yaml")
    assert f"synthesize-{again.fingerprint(versions['model_revisions'])}" == record["job_id"]
    good = rows_of(drafted, "data").values()
    forwards = sum(row["telemetry"]["target_forwards"] for row in good)
    assert (done["num_samples"], done["num_errors"], done["num_target_forwards"]) == (27, 15, forwards)
    assert done["tokens_per_forward"] == pytest.approx(len(good) * images.GRID**2 / forwards)
    assert done["images_per_s"] == pytest.approx(12 / done["wall_s"])


# --- the same images another way -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(folders: ImageFolders, tmp_path_factory: pytest.TempPathFactory, local_ray: None) -> Path:
    """The same prompts as ready features, in another order, plainly, in other batches, as codes alone; bad ones too."""
    folder = tmp_path_factory.mktemp("plain")
    t5 = load_t5(CheckpointRef(str(folders.t5)), images.SHAPES["text"], "float32", CPU)
    rows: dict[str, list[list[float]] | None] = {
        name: t5.encode(str(PROMPTS[name])).tolist() for name in reversed(GOOD)
    }
    width = images.CONDITION_DIM
    rows |= {
        "overflows": [[3e38] * width] * 2,
        "not-a-number": [[float("nan")] * width],
        "too-wide": [[0.5] * (width + 1)],
        "too-long": [[0.5] * width] * (images.NUM_COLUMNS + 1),
        "nothing": None,
    }
    columns = {
        "id": list(rows),
        "t5": pa.array(list(rows.values()), pa.list_(pa.list_(pa.float32()))),
        "heat": [TEMPERATURES.get(name) for name in rows],
        "seed": pa.array([SEEDS.get(name) for name in rows], pa.int64()),
    }
    (folder / "in").mkdir()
    pq.write_table(pa.table(columns), folder / "in/features.parquet")
    job = {
        "source": {"kind": "parquet", "path": str(folder / "in"), "id_column": "id"},
        "columns": {"features": "t5", "temperature": "heat", "seed": "seed"},
        "model": {"target": {"path": str(folders.text)}},
        "sampling": {"num_images_per_prompt": 2, "top_k": 20, "guidance_scale": 3.0},
        "pool": {"slots": 3, "batch_rows": 5},
        "sink": {"images": False},
        "job": {"progress": False},
    }
    return run(job, folder)


@pytest.mark.slow
def test_codes_do_not_depend_on_drafter_condition_path_batches_order_or_number_of_images(
    drafted: Path, plain: Path
) -> None:
    before = {name: row["codes"] for name, row in rows_of(drafted, "data").items() if row["replica"] < 2}
    after = {name: row["codes"] for name, row in rows_of(plain, "data").items()}
    assert after == before
    assert {row["telemetry"]["num_draft_tokens"] for row in rows_of(plain, "data").values()} == {0}


@pytest.mark.slow
def test_features_that_cannot_be_drawn_are_error_rows_each_with_its_code(plain: Path) -> None:
    bad = {row["prompt_id"]: row["error_type"] for row in rows_of(plain, "errors").values()}
    assert bad == {
        "overflows": "non_finite_logits",
        "not-a-number": "invalid_condition",
        "too-wide": "invalid_condition",
        "too-long": "invalid_condition",
        "nothing": "invalid_condition",
    }
    assert len(rows_of(plain, "errors")) == 2 * len(bad)


@pytest.mark.slow
def test_an_output_without_images_has_no_column_for_them(plain: Path) -> None:
    names = pq.read_schema(next((plain / "data").glob("*.parquet"))).names
    assert "codes" in names
    assert not {"image", "width_px", "height_px", "t5"} & set(names)


# --- classes, relaxed acceptance, a report -------------------------------------------------------------------------


@pytest.mark.slow
def test_classes_are_drawn_with_a_smaller_model_and_lanterns_rule_and_shown_on_a_page(
    folders: ImageFolders, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labels: list[Any] = [0, "3", 5, None, 4.0, 1, 2]
    lines = [json.dumps({"key": f"<k{number}>", "class": label}) for number, label in enumerate(labels)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    job = {
        "source": {"kind": "jsonl", "path": str(tmp_path / "in.jsonl"), "id_column": "key"},
        "prompt": "a picture of {class}",
        "columns": {"label": "class"},
        "model": {
            "target": {"path": str(folders.label)},
            "drafter": {"path": str(folders.drafters["class_drafter"])},
            "vq": {"path": str(folders.vq)},
        },
        "method": {"drafter": {"kind": "model"}, "acceptance": {"kind": "lantern", "k": 20, "delta": 0.4}},
        "sampling": {"top_k": 0, "guidance_scale": 2.0},
        "image": {"format": "webp", "quality": 80},
        "sink": {"keep_codes": False, "keep_columns": ["class"]},
        "job": {"progress": False},
    }
    output = run(job, tmp_path, "--limit", "5")
    rows = rows_of(output)
    assert {name: row["error_type"] for name, row in rows.items()} == {
        "<k0>#0": "", "<k1>#0": "", "<k2>#0": "invalid_condition", "<k3>#0": "invalid_condition", "<k4>#0": ""
    }  # fmt: skip
    assert [row["label"] for row in rows.values() if not row["error_type"]] == [0, 3, 4]
    assert {row["verify_mode"] for row in rows.values()} == {"lossy"}
    assert sum(row["telemetry"]["num_relaxed_accepts"] for row in rows.values()) > 0
    assert {row["prompt"] for row in rows.values() if not row["error_type"]} == {
        "a picture of 0", "a picture of 3", "a picture of 4.0"
    }  # fmt: skip
    assert "codes" not in next(iter(rows.values()))
    image = Image.open(io.BytesIO(rows["<k0>#0"]["image"]["bytes"]))
    assert (image.format, image.size) == ("WEBP", (IMAGE_PX, IMAGE_PX))
    page = (output / "_job/report.html").read_text()
    assert page.count("<article ") == 5
    assert page.count("data:image/jpeg") == 3
    assert "a picture of 3" in page
    assert "<k0>" not in page
    gallery = page[page.index('id="gallery"') :]
    assert gallery.index("&lt;k0&gt;") < gallery.index("&lt;k3&gt;") < gallery.index("&lt;k4&gt;")
    printed = capsys.readouterr().out
    for words in ("images/s", "tokens/forward", "acceptance length", "report", "python -m jobs.synthesize --config"):
        assert words in printed


def test_images_are_replayed_from_their_seeds(
    drafted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """EAGLE-2 decoded them, plain decoding replays them; one changed code is found."""
    copy = Path(shutil.copytree(drafted, tmp_path / "copy"))
    assert verify.main([str(copy), "--share", "1"]) == verify.EQUAL
    assert f"rows         {3 * len(GOOD)} equal, 0 different" in capsys.readouterr().out
    path = sorted((copy / "data").glob("*.parquet"))[0]
    table = pq.read_table(path)
    codes = table["codes"].to_pylist()
    codes[2][5] = (codes[2][5] + 1) % 7
    index = table.schema.get_field_index("codes")
    changed = table.set_column(index, table.schema.field(index), pa.array(codes, table.schema.field(index).type))
    pq.write_table(changed.replace_schema_metadata(table.schema.metadata), path)
    assert verify.main([str(copy), "--share", "1", "--metric", "edit"]) == verify.DIFFERENT
    counts = f"rows         {3 * len(GOOD) - 1} equal, 0 different within the tie tolerance, 1 different"
    assert counts in capsys.readouterr().out
    found = [row for name in copy.glob("_job/verify/*/*.parquet") for row in pq.read_table(name).to_pylist()]
    [difference] = [row for row in found if row["position"] == 5]
    assert difference["sample_id"] == table["sample_id"][2].as_py()


def test_a_lossy_image_job_has_a_retention_beside_plain_decoding(
    drafted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = yaml.safe_load((drafted.parent / "job.yaml").read_text())
    job["method"]["acceptance"] = {"kind": "lantern", "k": 4, "delta": 0.5}
    out = run(job, tmp_path)
    capsys.readouterr()
    assert verify.main([str(out), "--share", "1", "--metric", "edit"]) == verify.EQUAL
    shown = capsys.readouterr().out
    assert "is lossy: its rows may differ" in shown
    assert 0 < float(shown.split("retention    ")[1].split("%")[0]) < 100


def test_images_without_codes_cannot_be_replayed(
    drafted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = yaml.safe_load((drafted.parent / "job.yaml").read_text())
    job["sink"] = {"keep_codes": False, "exports": [{"kind": "tars", "path": str(tmp_path / "tars")}]}
    job["job"]["max_error_share"] = None
    out = run(job, tmp_path)
    assert "export        tars-" in capsys.readouterr().out
    assert len(list((tmp_path / "tars").glob("*.tar"))) == 1
    assert verify.main([str(out)]) == verify.REFUSED
    assert "sink.keep_codes: false, and images are compared by their codes" in capsys.readouterr().err
