"""The shipped job files validate, and the README names every section they may have."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.acceptance import LanternAcceptanceConfig
from configs.load import load_job, load_preset
from configs.presets import JOBS
from configs.schema import CaptionJobConfig
from configs.synthesis import SynthesizeJobConfig
from configs.training import TrainDrafterJobConfig

ROOT = Path(__file__).resolve().parents[2]
TRAINING = sorted(JOBS.glob("train_*.yaml"))
SYNTHESIS = sorted(path for pattern in ("synthesize_*", "zoo_images*") for path in JOBS.glob(f"{pattern}.yaml"))
FILES = sorted(set(JOBS.glob("*.yaml")) - {*TRAINING, *SYNTHESIS})


def test_there_is_a_file_for_the_demo_for_a_folder_and_for_each_kind_of_source() -> None:
    kinds = {path.stem: load_job(CaptionJobConfig, path).source.kind for path in FILES}
    assert {"demo_caption", "caption_folder"} <= set(kinds)
    assert set(kinds.values()) == {"parquet", "images", "webdataset", "videos"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_job_file_is_valid_and_has_a_description(path: Path) -> None:
    load_job(CaptionJobConfig, path)
    assert path.read_text().startswith("# ")


@pytest.mark.parametrize("path", TRAINING, ids=lambda path: path.stem)
def test_every_training_file_is_valid_and_has_a_description(path: Path) -> None:
    load_job(TrainDrafterJobConfig, path)
    assert path.read_text().startswith("# ")


@pytest.mark.parametrize("path", SYNTHESIS, ids=lambda path: path.stem)
def test_every_synthesis_file_is_valid_and_has_a_description(path: Path) -> None:
    load_job(SynthesizeJobConfig, path)
    assert path.read_text().startswith("# ")


def lantern_of(name: str) -> dict[str, object]:
    rule = load_preset(SynthesizeJobConfig, name).method.acceptance
    assert isinstance(rule, LanternAcceptanceConfig)
    return {name: getattr(rule, name) for name in ("k", "k_counts_draft", "delta", "divergence", "draw")}


def test_lantern_is_run_as_published_and_the_coupled_draw_is_a_preset_of_its_own() -> None:
    published = {"k": 1000, "k_counts_draft": True, "delta": 0.1, "divergence": "tvd", "draw": "paper"}
    assert lantern_of("synthesize_llamagen_lantern") == published
    assert lantern_of("synthesize_llamagen_lantern_coupled") == {**published, "draw": "coupled"}
    for kind in ("images", "images_class"):
        # 1,000 of 16,384 codes are 250 of 4,096.
        assert lantern_of(f"zoo_{kind}_lantern") == {**published, "k": 250}
        assert lantern_of(f"zoo_{kind}_lantern_coupled") == {**published, "k": 250, "draw": "coupled"}
    text = (ROOT / "configs/jobs/synthesize_llamagen_lantern.yaml").read_text()
    assert "Table 3" in text
    assert "Table 1" not in text
