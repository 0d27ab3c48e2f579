"""Tests the demo's inputs: files show their motions, prompts are broken as documented, and its check finds errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from configs.load import load_preset
from configs.presets import JOBS
from configs.schema import CaptionJobConfig
from configs.synthesis import SynthesizeJobConfig
from models.llamagen.checkpoints import read_gpt_shape
from models.llamagen.condition import EmptyPrompt, PromptTooLong, load_t5
from models.loading.checkpoints import CheckpointRef
from zoo import demo
from zoo.demo import BROKEN_PROMPTS, EMPTY, NUM_PROMPTS, PROMPT_SEED, TOO_LONG, draw_prompts, write_prompts
from zoo.image.gpt import NUM_CLASSES
from zoo.pair import CHECKPOINTS
from zoo.world.grain import parse_prompt
from zoo.world.motion import PROMPTS, render_motion
from zoo.world.scene import split_of


def test_prompts_ask_for_scenes_of_the_world_and_half_of_them_for_a_class() -> None:
    prompts = draw_prompts(NUM_PROMPTS, PROMPT_SEED)
    good = [row for row in prompts if row["id"] not in BROKEN_PROMPTS]
    assert len(good) == len({row["prompt"] for row in good}) == NUM_PROMPTS
    for row in good:
        seen = parse_prompt(row["prompt"])
        assert seen is not None
        assert (row["label"] is not None) == (len(seen[0]) == 1)
        assert row["label"] is None or 0 <= row["label"] < NUM_CLASSES
    assert draw_prompts(NUM_PROMPTS, PROMPT_SEED) == prompts


def test_the_shipped_text_encoder_refuses_the_broken_ones_and_no_other() -> None:
    shape = read_gpt_shape(CheckpointRef(str(CHECKPOINTS / "image_target")))
    t5 = load_t5(CheckpointRef(str(CHECKPOINTS / "image_t5")), shape, "float32", torch.device("cpu"))
    for row in draw_prompts(NUM_PROMPTS, PROMPT_SEED):
        if row["id"] == EMPTY:
            with pytest.raises(EmptyPrompt):
                t5.encode(row["prompt"])
        elif row["id"] == TOO_LONG:
            with pytest.raises(PromptTooLong):
                t5.encode(row["prompt"])
        else:
            assert t5.encode(row["prompt"]).shape[1] == shape.condition_dim


def test_the_file_holds_what_the_zoos_presets_read(tmp_path: Path) -> None:
    write_prompts(draw_prompts(4, 0), tmp_path / "prompts")
    names = set(pq.read_schema(tmp_path / "prompts/prompts.parquet").names)
    names_of_presets = {path.stem for path in JOBS.glob("zoo_images*.yaml")} | set(demo.IMAGE_PRESETS.values())
    for name in names_of_presets:
        job = load_preset(SynthesizeJobConfig, name)
        assert job.source.path == "out/demo/source/prompts", name
        assert {job.source.id_column, job.columns.label or "id", "prompt"} <= names
        for weights in (job.model.target, job.model.drafter, job.model.vq, job.model.condition):
            assert weights is None or Path(weights.path).parent == Path("zoo/checkpoints")


def test_files_are_lossy_mp4_of_motions_outside_the_training_set(tmp_path: Path) -> None:
    motions = demo.write_videos(tmp_path / "videos", 2, 3)
    assert sorted(path.name for path in (tmp_path / "videos").iterdir()) == list(motions)
    codecs = []
    for name, motion in motions.items():
        assert split_of(motion.scene) == "demo"
        with av.open(str(tmp_path / "videos" / name)) as file:
            codecs.append(file.streams.video[0].codec_context.name)
            frames = [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]
            assert float(file.streams.video[0].average_rate) == demo.FPS
        drawn = render_motion(motion, demo.DURATION_S * demo.FPS, demo.VIDEO_PX)
        assert len(frames) == len(drawn) == 36
        for shown, true in ((frames[0], drawn[0]), (frames[-1], drawn[-1])):
            error = np.abs(shown.astype(int) - np.asarray(true).astype(int)).mean()
            assert 0 < error < 12
    assert codecs == ["mpeg4", "h264"]


def test_the_video_presets_have_the_prompt_that_the_demo_checks() -> None:
    for name in demo.VIDEO_PRESETS.values():
        assert load_preset(CaptionJobConfig, name).prompt.text == PROMPTS[demo.PHRASING]


def test_missing_ids_errors_and_differing_texts_are_reported() -> None:
    def row(text: str, error: str = "") -> dict[str, Any]:
        return {"error_type": error, "generated_text": text}

    good, wanted = {"a": row("x"), "b": row("y")}, {"a": "", "b": ""}
    assert demo.check("videos", {"speculative": good, "plain": good}, wanted) == []
    other = good | {"b": row("z")}
    differ = demo.check("videos", {"speculative": good, "plain": other}, wanted)
    assert differ == ["videos: results differ between the runs"]
    failed = good | {"b": row("", "broken_video")}
    assert "('b', 'broken_video')" in demo.check("videos", {"plain": failed}, wanted)[0]
    assert demo.check("videos", {"plain": failed}, wanted | {"b": "broken_video"}) == []
    assert demo.check("videos", {"plain": good}, wanted | {"c": ""}) == [
        "videos, plain: rows are not as planned: [('c', '')]"
    ]
