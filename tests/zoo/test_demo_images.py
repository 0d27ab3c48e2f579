"""The demo's prompts are from the image world, two are broken as documented, and its check finds the errors."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from configs.load import load_preset
from configs.presets import JOBS
from configs.synthesis import SynthesizeJob
from models.llamagen.checkpoints import read_gpt_shape
from models.llamagen.condition import EmptyPrompt, PromptTooLong, load_t5
from models.loading.checkpoints import CheckpointRef
from zoo import demo_images
from zoo.demo_images import BROKEN, EMPTY, NUM_PROMPTS, SEED, TOO_LONG, draw_prompts, write_prompts
from zoo.image.gpt import NUM_CLASSES
from zoo.pair import CHECKPOINTS
from zoo.world.grain import parse_prompt


def test_prompts_ask_for_scenes_of_the_world_and_half_of_them_for_a_class() -> None:
    prompts = draw_prompts(NUM_PROMPTS, SEED)
    good = [row for row in prompts if row["id"] not in BROKEN]
    assert len(good) == len({row["prompt"] for row in good}) == NUM_PROMPTS
    for row in good:
        seen = parse_prompt(row["prompt"])
        assert seen is not None
        assert (row["label"] is not None) == (len(seen[0]) == 1)
        assert row["label"] is None or 0 <= row["label"] < NUM_CLASSES
    assert draw_prompts(NUM_PROMPTS, SEED) == prompts


def test_the_shipped_text_encoder_refuses_the_broken_ones_and_no_other() -> None:
    shape = read_gpt_shape(CheckpointRef(str(CHECKPOINTS / "image_target")))
    t5 = load_t5(CheckpointRef(str(CHECKPOINTS / "image_t5")), shape, "float32", torch.device("cpu"))
    for row in draw_prompts(NUM_PROMPTS, SEED):
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
    names_of_presets = {path.stem for path in JOBS.glob("zoo_images*.yaml")} | set(demo_images.CONFIGS.values())
    for name in names_of_presets:
        job = load_preset(SynthesizeJob, name)
        assert job.source.path == "out/demo/source/prompts", name
        assert {job.source.id_column, job.columns.label or "id", "prompt"} <= names
        for weights in (job.model.target, job.model.drafter, job.model.vq, job.model.condition):
            assert weights is None or Path(weights.path).parent == Path("zoo/checkpoints")
