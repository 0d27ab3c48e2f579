"""Tests refused synthesis jobs: one clear message that names the dotted path, exit status 2, and no Ray."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml

from configs.load import ConfigError
from jobs import synthesize
from models.llamagen.checkpoints import save_gpt
from models.llamagen.gpt import Gpt
from models.llamagen.shape import GptShape
from models.llamagen.vq_files import save_vq
from tests.toys import images
from tests.toys.image_checkpoints import ImageFolders, vq_model, write_checkpoints, write_t5

pytestmark = pytest.mark.usefixtures("no_ray")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> ImageFolders:
    return write_checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture
def job_file(folders: ImageFolders, tmp_path: Path) -> Path:
    """A valid job on two rows, which every case then spoils."""
    (tmp_path / "in").mkdir()
    columns = {"caption": ["a red cat", "old house"], "class": [1, 2], "t5": [[0.5] * images.CONDITION_DIM] * 2}
    pq.write_table(pa.table(columns), tmp_path / "in/rows.parquet")
    path = tmp_path / "job.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "source": {"kind": "parquet", "path": str(tmp_path / "in")},
                "prompt": "{caption}",
                "model": {
                    "target": {"path": str(folders.text)},
                    "drafter": {"path": str(folders.drafters["eagle"])},
                    "vq": {"path": str(folders.vq)},
                    "condition": {"path": str(folders.t5)},
                },
                "method": {"drafter": {"kind": "eagle"}, "tree": {"kind": "chain", "length": 3}},
                "sampling": {"num_images_per_prompt": 2, "top_k": 20},
                "sink": {"path": str(tmp_path / "out"), "keep_columns": ["class"]},
                "job": {"progress": False},
            }
        )
    )
    return path


Spoil = Callable[[Path, ImageFolders], list[str]]


def overrides(*values: str) -> Spoil:
    return lambda folder, folders: list(values)


def other_gpt(**changes: Any) -> Spoil:
    """Another target as drafter."""

    def spoil(folder: Path, folders: ImageFolders) -> list[str]:
        sizes = {**vars(images.SHAPES["text"]), **changes}
        torch.manual_seed(0)
        save_gpt(Gpt(GptShape(**sizes)), folder / "other")
        return [f"model.drafter.path={folder}/other", "method.drafter.kind=model"]

    return spoil


def other_vq(folder: Path, folders: ImageFolders) -> list[str]:
    save_vq(vq_model(images.CODES + 1), folder / "vq")
    return [f"model.vq.path={folder}/vq"]


def other_t5(folder: Path, folders: ImageFolders) -> list[str]:
    write_t5(folder / "t5", width=images.CONDITION_DIM + 6)
    return [f"model.condition.path={folder}/t5"]


def torn_target(folder: Path, folders: ImageFolders) -> list[str]:
    (folder / "t2i.pt").write_bytes(folders.text.read_bytes()[:2000])
    (folder / "config.json").write_bytes((folders.text.parent / "config.json").read_bytes())
    return [f"model.target.path={folder}/t2i.pt"]


def incomplete_target(folder: Path, folders: ImageFolders) -> list[str]:
    weights = dict(images.weights("text"))
    del weights["layers.1.attention.wo.weight"]
    torch.save({"model": weights}, folder / "t2i.pt")
    (folder / "config.json").write_bytes((folders.text.parent / "config.json").read_bytes())
    return [f"model.target.path={folder}/t2i.pt"]


def vq_as_target(folder: Path, folders: ImageFolders) -> list[str]:
    return [f"model.target.path={folders.vq}"]


def class_target(*more: str) -> Spoil:
    return lambda folder, folders: [f"model.target.path={folders.label}", *more]


def eagle_of_another_grid(folder: Path, folders: ImageFolders) -> list[str]:
    source = folders.drafters["eagle"]
    (folder / "eagle").mkdir()
    for file in source.iterdir():
        (folder / "eagle" / file.name).write_bytes(file.read_bytes())
    text = (folder / "eagle/config.json").read_text().replace('"grid": 4', '"grid": 16')
    assert '"grid": 16' in text
    (folder / "eagle/config.json").write_text(text)
    return [f"model.drafter.path={folder}/eagle"]


def shallow_medusa(folder: Path, folders: ImageFolders) -> list[str]:
    return [f"model.drafter.path={folders.drafters['medusa']}", "method.drafter.kind=medusa", "method.tree.length=4"]


PLAIN = ("method.drafter.kind=none",)
READY = ("model.condition=null", "columns.features=t5")
LANTERN = ("method.acceptance.kind=lantern",)

CASES: dict[str, tuple[Spoil, list[str]]] = {
    # the schema
    "a length of one's own": (overrides("sampling.max_new_tokens=64"), ["sampling.max_new_tokens", "not a known key"]),
    "a string that ends an image": (overrides("sampling.stop=[x]"), ["sampling.stop", "not a known key"]),
    "images as prompts": (overrides("source.kind=images"), ["source.kind", "hold no prompts"]),
    "videos as prompts": (overrides("source.kind=videos"), ["source.kind", "video files hold no prompts"]),
    "a video column": (overrides("source.columns.video=caption"), ["source.columns.video", "no video is read"]),
    "half of a character": (
        overrides('prompt="\\ud800 {caption}"'),
        ["job.yaml: prompt: contains half of a surrogate pair"],
    ),
    "an image column": (overrides("source.columns.image=caption"), ["source.columns.image", "no image is read"]),
    "no prompt": (overrides("prompt=null"), ["prompt is required unless columns.features or columns.label"]),
    "no text encoder": (overrides("model.condition=null"), ["model.condition must name the T5"]),
    "features and a text encoder": (overrides("columns.features=t5"), ["model.condition", "would encode nothing"]),
    "features and labels": (overrides(*READY, "columns.label=class"), ["columns: give features or label"]),
    "no VQ model": (overrides("model.vq=null"), ["model.vq must name", "sink.images: false"]),
    "neither images nor codes": (
        overrides("sink.images=false", "sink.keep_codes=false"),
        ["images and keep_codes are both false"],
    ),
    "no drafter's checkpoint": (overrides("model.drafter=null"), ["model.drafter must name a checkpoint"]),
    "a context": (
        overrides("method.drafter.kind=model", "method.contexts=[{kind: text_only}]"),
        ["method.contexts", "no visual part"],
    ),
    "a rule about pictures in prompts": (
        overrides("method.acceptance.kind=lvspec"),
        ["method.acceptance 'lvspec'", "there are none"],
    ),
    "lossless JPEG": (overrides("image={format: jpeg, lossless: true}"), ["image", "JPEG always loses"]),
    "a seed out of range": (overrides("job.seed=-1"), ["job.seed"]),
    "a thousand images too many": (
        overrides("sampling.num_images_per_prompt=2000"),
        ["sampling.num_images_per_prompt", "less than or equal to 1024"],
    ),
    "the same image twice": (
        overrides("sampling.temperature=0.0"),
        ["sampling.num_images_per_prompt is 2", "the same image"],
    ),
    # checkpoints
    "a target that is not there": (overrides("model.target.path=/nowhere/t"), ["model.target", "/nowhere/t"]),
    "a target whose name is longer than names can be": (
        overrides(f"model.target.path={'t' * 300}.pt"),
        ["model.target", "ttt.pt: no such file"],
    ),
    "a VQ model behind a name that is too long": (
        overrides(f"model.vq.path=/tmp/{'v' * 5000}/x"),
        ["model.vq", "no such folder"],
    ),
    "a torn target": (torn_target, ["model.target", "t2i.pt"]),
    "a target that lacks a tensor": (incomplete_target, ["model.target", "layers.1.attention.wo.weight"]),
    "a VQ model as target": (vq_as_target, ["model.target", "VQ model"]),
    "a VQ model that is not there": (overrides("model.vq.path=/nowhere/v"), ["model.vq", "/nowhere/v"]),
    "a VQ model of another codebook": (
        other_vq,
        ["model.vq", "a codebook of 61 codes, and the target draws from 60"],
    ),
    "a T5 that is not there": (overrides("model.condition.path=/nowhere/c"), ["model.condition", "/nowhere/c"]),
    "a T5 of another width": (other_t5, ["model.condition", "18 wide", "12"]),
    "a drafter that is not there": (overrides("model.drafter.path=/nowhere/d"), ["model.drafter", "/nowhere/d"]),
    "a drafter of another grid": (other_gpt(grid=5), ["model.drafter", "(grid)", "other images"]),
    "a drafter of another vocabulary": (other_gpt(vocab_size=61), ["model.drafter", "61 codes (vocab_size)"]),
    "a drafter that reads other features": (other_gpt(condition_dim=13), ["model.drafter", "13", "condition_dim"]),
    "a drafter with other columns": (other_gpt(num_condition_tokens=8), ["model.drafter", "num_condition_tokens"]),
    "an EAGLE head of another grid": (eagle_of_another_grid, ["model.drafter", "grid is 16"]),
    "too few Medusa heads": (shallow_medusa, ["method.tree", "4 levels deep", "3 Medusa heads"]),
    "more neighbours than codes": (
        overrides(*LANTERN, "method.acceptance.k=61"),
        ["method.acceptance.k", "61 asks for 60 neighbours", "60 codes has 59"],
    ),
    "guidance beyond the last code": (
        overrides("sampling.guidance_interval=15"),
        ["sampling.guidance_interval: 15 guides the codes 0 … 16, and an image of the target has 16; take -1"],
    ),
    "labels for a target that reads text": (
        overrides("model.condition=null", "columns.label=class"),
        ["columns.label", "has no classes"],
    ),
    "prompts for a target of classes": (class_target(*PLAIN), ["columns.label", "one of 5 classes"]),
    # the source
    "a prompt column that is not there": (overrides("prompt='{subject}'"), ["prompt.text", "subject"]),
    "a lone brace": (overrides("prompt='{caption'"), ["prompt.text", "single '{'"]),
    "a seed column that is not there": (overrides("columns.seed=s"), ["columns.seed", "'s'"]),
    "a features column that is not there": (
        overrides("model.condition=null", "columns.features=emb"),
        ["columns.features", "'emb'"],
    ),
    "a features column of words": (
        overrides("model.condition=null", "columns.features=class"),
        ["columns.features: 'class' is int64"],
    ),
    "a kept column with a name of ours": (
        overrides("sink.keep_columns=[caption, Codes]"),
        ["sink.keep_columns", "'Codes'"],
    ),
    "a features column with a name of ours": (
        overrides("model.condition=null", "columns.features=images"),
        ["columns.features", "a name of our own"],
    ),
    "a relative output on a cluster": (
        overrides("job.ray_address=auto", "sink.path=out"),
        ["sink.path: out is relative", "on a cluster"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_an_invalid_job_is_refused_by_name_with_exit_status_2_and_without_ray(
    case: str, job_file: Path, folders: ImageFolders, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil, expected = CASES[case]
    assert synthesize.main(["--config", str(job_file), *spoil(tmp_path, folders)]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    [refusal] = [line for line in output.err.splitlines() if line.startswith("refused: ")]
    for words in expected:
        assert words in refusal
    assert not (tmp_path / "out/_job/attempts").exists()


def test_a_dry_run_prints_the_plan_and_the_first_prompt_and_writes_nothing(
    job_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert synthesize.main(["--config", str(job_file), "--dry-run"]) == 0
    output = capsys.readouterr().out
    for words in (
        "2 rows, 1 span",
        "images   2 per prompt, 4 × 4 codes, 16 × 16 px as PNG",
        "temperature 1, top_k 20, top_p 1, guidance 7.5",
        "eagle+chain+exact (lossless): drafter eagle, tree chain length=3, acceptance exact",
        "first prompt (rows.parquet#0):\na red cat\n(temperature 1, top_k 20, top_p 1, guidance_scale 7.5, seed 0)",
    ):
        assert words in output
    assert not (tmp_path / "out").exists()


def test_a_dry_run_shows_ready_features_and_unusable_rows(
    job_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ready = ["model.condition=null", "columns.features=t5", "sink.images=false"]
    assert synthesize.main(["--config", str(job_file), *ready, "--dry-run"]) == 0
    assert "a red cat, features of 1 tokens" in capsys.readouterr().out
    pq.write_table(pa.table({"t5": [[0.5]], "caption": ["?"], "class": [1]}), tmp_path / "in/rows.parquet")
    assert synthesize.main(["--config", str(job_file), *ready, "--dry-run"]) == 2
    output = capsys.readouterr().err
    assert "source.path: the only row cannot be used: rows.parquet#0: invalid_condition" in output


def test_the_fingerprint_changes_with_fields_that_determine_the_images_and_with_no_other(job_file: Path) -> None:
    from configs.load import load_job
    from configs.synthesis import SynthesizeJobConfig

    def fingerprint(*changes: str) -> str:
        return load_job(SynthesizeJobConfig, job_file, changes).fingerprint({"target": "t0"})

    same = fingerprint()
    for change in ("pool.slots=3", "vq.batch_rows=2", "sink.rows_per_file=7", "image.encode_cpus=2.0", "job.name=x"):
        assert fingerprint(change) == same, change
    for change in (
        "job.seed=1", "sampling.guidance_scale=2.0", "sampling.num_images_per_prompt=3", "image.format=webp",
        "sink.keep_codes=false", "columns.seed=class", "prompt='A {caption}'", "method.tree.length=2",
    ):  # fmt: skip
        assert fingerprint(change) != same, change
    with pytest.raises(ConfigError):
        fingerprint("sampling.guidance_scale=-1")
