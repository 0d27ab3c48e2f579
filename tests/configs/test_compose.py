"""Named methods, presets, and refusals of job files that moved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from configs.load import ConfigError, load_job, load_preset
from configs.presets import JOBS, METHODS, PRESETS, method_names, named_method, preset, replacement_of
from configs.schema import CaptionJobConfig

DEMO = JOBS / "demo_caption.yaml"


@pytest.mark.parametrize("name", method_names())
def test_a_method_file_has_a_comment_and_the_method_section_only(name: str) -> None:
    text = (METHODS / f"{name}.yaml").read_text()
    assert text.startswith("# ")
    assert list(yaml.safe_load(text)) == ["method"]


def test_every_method_file_is_used_by_a_job_file_or_a_preset() -> None:
    used = {yaml.safe_load(path.read_text()).get("method") for path in JOBS.glob("zoo_*.yaml")}
    for path in set(JOBS.glob("*.yaml")) - set(JOBS.glob("zoo_*.yaml")):
        method = yaml.safe_load(path.read_text()).get("method")
        used |= {method} if isinstance(method, str) else set()
    named = {override.removeprefix("method=") for overrides in PRESETS.values() for override in overrides}
    assert set(method_names()) - named - used == set()


def test_a_named_method_equals_its_section_and_takes_overrides(tmp_path: Path) -> None:
    written = tmp_path / "job.yaml"
    data = yaml.safe_load(DEMO.read_text())
    written.write_text(yaml.safe_dump({**data, "method": named_method("sage", "test")}))
    named = load_job(CaptionJobConfig, DEMO, ("method=sage",))
    assert named.model_dump() == load_job(CaptionJobConfig, written).model_dump()
    assert named.fingerprint({}) == load_job(CaptionJobConfig, written).fingerprint({})
    smaller = load_job(CaptionJobConfig, DEMO, ("method=sage", "method.tree.max_nodes=30"))
    assert smaller.method.name == "sage"
    assert smaller.method.tree.max_nodes == 30  # type: ignore[union-attr]
    assert load_job(CaptionJobConfig, DEMO, ("method.tree.length=9", "method=sage")).method == named.method


def test_candidates_of_a_trial_may_be_names() -> None:
    job = load_job(CaptionJobConfig, DEMO, ("method={auto: {candidates: [sd_chain, tabed_mt]}}",))
    assert job.method.auto is not None
    assert [candidate.name for candidate in job.method.auto.candidates] == ["sd-chain", "tabed-mt"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("method=sagee", "method: no method is named 'sagee'; did you mean sage"),
        ("method=../jobs/demo_caption", "method: no method is named '../jobs/demo_caption'; choose one of"),
        ("method=zzz", "choose one of auto, block, block_8, eagle2"),
        ("method={auto: {candidates: [sage, lvspek]}}", "method.auto.candidates.1: no method is named 'lvspek'"),
        ("method=3", "method: Input should be an object"),
        ("method.auto.candidates=sage", "method.auto.candidates: Input should be a valid"),
    ],
)
def test_other_names_are_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_job(CaptionJobConfig, DEMO, (override,))
    assert message in str(refused.value)


@pytest.mark.parametrize("name", [*sorted(PRESETS), "demo_caption", "caption_folder"])
def test_a_removed_job_file_names_its_successor(name: str) -> None:
    with pytest.raises(ConfigError, match=r"^configs/\w+\.yaml: was replaced; use --config ") as refused:
        load_job(CaptionJobConfig, f"configs/{name}.yaml")
    path, *overrides = str(refused.value).partition("--config ")[2].split()
    assert (JOBS.parent.parent / path, tuple(overrides)) == preset(name)


def test_other_missing_files_have_no_successor() -> None:
    assert replacement_of("configs/other.yaml") is None
    assert replacement_of("elsewhere/zoo_sage.yaml") is None
    with pytest.raises(ConfigError, match=r"other\.yaml: cannot be read"):
        load_job(CaptionJobConfig, "configs/other.yaml")
    with pytest.raises(KeyError):
        load_preset(CaptionJobConfig, "other")


def test_an_existing_file_of_a_replaced_name_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "configs"
    folder.mkdir()
    data: dict[str, Any] = yaml.safe_load(DEMO.read_text())
    (folder / "zoo_sage.yaml").write_text(yaml.safe_dump(data))
    assert load_job(CaptionJobConfig, folder / "zoo_sage.yaml") == load_job(CaptionJobConfig, DEMO)
