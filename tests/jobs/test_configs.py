"""The shipped job files validate, and the README names every section they may have."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.load import load_job
from configs.schema import CaptionJob
from configs.training import TrainDrafterJob

ROOT = Path(__file__).resolve().parents[2]
TRAINING = sorted((ROOT / "configs").glob("train_*.yaml"))
FILES = sorted(set((ROOT / "configs").glob("*.yaml")) - set(TRAINING))


def test_there_is_a_file_for_the_demo_for_a_folder_and_for_each_kind_of_source() -> None:
    kinds = {path.stem: load_job(CaptionJob, path).source.kind for path in FILES}
    assert {"demo_caption", "caption_folder"} <= set(kinds)
    assert set(kinds.values()) == {"parquet", "images", "webdataset"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_job_file_is_valid_and_says_what_it_is_for(path: Path) -> None:
    load_job(CaptionJob, path)
    assert path.read_text().startswith("# ")


@pytest.mark.parametrize("path", TRAINING, ids=lambda path: path.stem)
def test_every_training_file_is_valid_and_says_what_it_is_for(path: Path) -> None:
    load_job(TrainDrafterJob, path)
    assert path.read_text().startswith("# ")


@pytest.mark.parametrize("section", list(CaptionJob.model_fields))
def test_the_readme_names_every_section(section: str) -> None:
    assert f"`{section}`" in (ROOT / "README.md").read_text()
