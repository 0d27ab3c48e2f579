"""The shipped job files validate, and the README names every section they may have."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.acceptance import LanternAcceptance
from configs.load import load_job, load_preset
from configs.presets import JOBS, PRESETS, preset
from configs.schema import CaptionJob
from configs.synthesis import SynthesizeJob
from configs.training import TrainDrafterJob
from configs.trees import SageTree

ROOT = Path(__file__).resolve().parents[2]
TRAINING = sorted(JOBS.glob("train_*.yaml"))
SYNTHESIS = sorted(path for pattern in ("synthesize_*", "zoo_images*") for path in JOBS.glob(f"{pattern}.yaml"))
FILES = sorted(set(JOBS.glob("*.yaml")) - {*TRAINING, *SYNTHESIS})


def kind_of(name: str) -> type[CaptionJob] | type[SynthesizeJob]:
    """The kind of job of a preset."""
    return SynthesizeJob if preset(name)[0] in SYNTHESIS else CaptionJob


def test_there_is_a_file_for_the_demo_for_a_folder_and_for_each_kind_of_source() -> None:
    kinds = {path.stem: load_job(CaptionJob, path).source.kind for path in FILES}
    assert {"demo_caption", "caption_folder"} <= set(kinds)
    assert set(kinds.values()) == {"parquet", "images", "webdataset", "videos"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_job_file_is_valid_and_has_a_description(path: Path) -> None:
    load_job(CaptionJob, path)
    assert path.read_text().startswith("# ")


@pytest.mark.parametrize("path", TRAINING, ids=lambda path: path.stem)
def test_every_training_file_is_valid_and_has_a_description(path: Path) -> None:
    load_job(TrainDrafterJob, path)
    assert path.read_text().startswith("# ")


@pytest.mark.parametrize("path", SYNTHESIS, ids=lambda path: path.stem)
def test_every_synthesis_file_is_valid_and_has_a_description(path: Path) -> None:
    load_job(SynthesizeJob, path)
    assert path.read_text().startswith("# ")


def test_there_are_files_for_the_papers_image_methods_on_every_kind_of_prompts() -> None:
    names = [path.stem for path in SYNTHESIS] + [name for name in PRESETS if kind_of(name) is SynthesizeJob]
    jobs = {name: load_preset(SynthesizeJob, name) for name in names}
    papers = {name: job for name, job in jobs.items() if name.startswith("synthesize_")}
    assert {job.source.kind for job in papers.values()} == {"text", "jsonl", "parquet", "webdataset"}
    assert {
        (job.sampling.guidance_scale, job.sampling.top_k) for name, job in papers.items() if "class" not in name
    } == {(7.5, 1000)}
    for name in ("plain", "eagle2", "lantern", "lantern_coupled", "lantern_pp"):
        paper, twin = jobs[f"synthesize_llamagen_{name}"].method, jobs[f"zoo_images_{name}"].method
        assert (paper.drafter, paper.tree, paper.name) == (twin.drafter, twin.tree, twin.name)


def lantern_of(name: str) -> dict[str, object]:
    rule = load_preset(SynthesizeJob, name).method.acceptance
    assert isinstance(rule, LanternAcceptance)
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


def test_lantern_pp_is_run_as_its_code_runs_it() -> None:
    published = {"k": 10, "k_counts_draft": False, "delta": 5.0, "divergence": "multiplicative", "draw": "code"}
    assert lantern_of("synthesize_llamagen_lantern_pp") == lantern_of("zoo_images_lantern_pp") == published


def test_sage_verifies_no_more_columns_than_its_plans_need() -> None:
    for name in ("caption_llava_ov_sage", "caption_qwen25vl_sage", "zoo_sage", "zoo_video_sage"):
        tree = load_preset(CaptionJob, name).method.tree
        assert isinstance(tree, SageTree)
        assert (tree.max_nodes, tree.threshold, tree.threshold_gates) == (25, "cumulative", "inclusion")


WEIGHTS_GB = {"72b": 146, "32b": 67, "8b": 17, "7b": 16.6}
"""Of the published checkpoints with two bytes a parameter."""
GPU_GB = 80


def test_presets_have_the_gpus_that_their_weights_need() -> None:
    for name in [path.stem for path in FILES] + [name for name in PRESETS if kind_of(name) is CaptionJob]:
        job = load_preset(CaptionJob, name)
        named = [weights.path.lower() for weights in (job.model.target, job.model.drafter) if weights is not None]
        need_gb = sum(gb for name in named for size, gb in WEIGHTS_GB.items() if f"-{size}" in name)
        assert need_gb <= max(1, job.pool.gpus) * GPU_GB, name  # `auto` is one GPU, or a share of it


def test_some_captions_are_drafted_as_deep_as_measured_here_and_on_the_shipped_pair() -> None:
    names = ["caption_folder", *(name for name in PRESETS if kind_of(name) is CaptionJob)]
    jobs = {name: load_preset(CaptionJob, name) for name in names}
    measured = {name for name, job in jobs.items() if job.method.controller.kind == "measured"}
    assert measured == {"caption_folder", "demo_controller"}
    assert jobs["demo_controller"].model == jobs["zoo_sd_chain"].model
