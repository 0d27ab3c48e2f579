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
from zoo.demo_images import BROKEN, EMPTY, NUM_PROMPTS, SEED, TOO_LONG, check, draw_prompts, write_prompts
from zoo.image.gpt import NUM_CLASSES
from zoo.pair import CHECKPOINTS
from zoo.world.grain import parse_prompt


def test_prompts_ask_for_scenes_of_the_world_and_half_of_them_for_a_class() -> None:
    prompts = draw_prompts(NUM_PROMPTS, SEED)
    good = [prompt for prompt in prompts if prompt.sample_id not in BROKEN]
    assert len(good) == len({prompt.text for prompt in good}) == NUM_PROMPTS
    for prompt in good:
        seen = parse_prompt(prompt.text)
        assert seen is not None
        assert (prompt.label is not None) == (len(seen[0]) == 1)
        assert prompt.label is None or 0 <= prompt.label < NUM_CLASSES
    assert draw_prompts(NUM_PROMPTS, SEED) == prompts


def test_the_shipped_text_encoder_refuses_the_broken_ones_and_no_other() -> None:
    shape = read_gpt_shape(CheckpointRef(str(CHECKPOINTS / "image_target")))
    t5 = load_t5(CheckpointRef(str(CHECKPOINTS / "image_t5")), shape, "float32", torch.device("cpu"))
    for prompt in draw_prompts(NUM_PROMPTS, SEED):
        if prompt.sample_id == EMPTY:
            with pytest.raises(EmptyPrompt):
                t5.encode(prompt.text)
        elif prompt.sample_id == TOO_LONG:
            with pytest.raises(PromptTooLong):
                t5.encode(prompt.text)
        else:
            assert t5.encode(prompt.text).shape[1] == shape.condition_dim


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


def test_the_check_sees_a_lost_row_and_another_code() -> None:
    prompts = draw_prompts(3, 0)
    good = {f"{prompt.sample_id}#0": {"error_type": BROKEN.get(prompt.sample_id, "")} for prompt in prompts}
    assert check(prompts, {"plain": good}) == []
    lost = {name: row for name, row in good.items() if name != "prompt-01#0"}
    assert "prompt-01#0" in check(prompts, {"plain": lost})[0]
    other = {**good, f"{EMPTY}#0": {"error_type": "prompt_refused"}}
    assert "images, plain: rows are not as planned" in check(prompts, {"plain": other})[0]
