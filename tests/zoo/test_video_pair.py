"""The video pair that ships: its files, and that it captions motions it was never trained on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from models.inputs.clip import Clip
from models.loading.checkpoints import CheckpointRef
from models.target import Target
from zoo.build import build_video
from zoo.pair import CHECKPOINTS
from zoo.quality import decode
from zoo.training import Recipe
from zoo.video import quality as video_quality
from zoo.video.pair import ARCHITECTURES, build_tokenizer
from zoo.world.motion import states

ROLES = ("target", "drafter")


@pytest.fixture(scope="module")
def pair() -> dict[str, Target]:
    return {role: Target.load(CheckpointRef(str(CHECKPOINTS / f"video_{role}")), "float32", "cpu") for role in ROLES}


def test_both_models_share_one_tokenizer_and_one_processor_which_the_recipe_builds() -> None:
    names = {path.name for path in (CHECKPOINTS / "video_target").iterdir()}
    assert {"video_preprocessor_config.json", "chat_template.jinja"} <= names
    for name in names - {"config.json", "model.safetensors"}:
        one, other = (CHECKPOINTS / f"video_{role}" / name for role in ROLES)
        assert one.read_bytes() == other.read_bytes(), name
    built = json.loads(build_tokenizer().backend_tokenizer.to_str())
    shipped = json.loads((CHECKPOINTS / "video_target" / "tokenizer.json").read_text())
    assert built["model"] == shipped["model"]


@pytest.mark.parametrize("role", ROLES)
def test_a_checkpoint_is_a_qwen2_5_vl_in_bfloat16_that_takes_videos(role: str, pair: dict[str, Target]) -> None:
    config = pair[role].model.config
    assert config.model_type == "qwen2_5_vl"
    assert config.text_config.hidden_size == ARCHITECTURES[role]["hidden"]
    assert pair[role].front_end.takes_videos
    weights = load_file(CHECKPOINTS / f"video_{role}" / "model.safetensors")
    assert {value.dtype for value in weights.values()} == {torch.bfloat16}


@pytest.mark.slow
def test_the_target_captions_held_out_clips_and_the_drafter_is_visibly_weaker() -> None:
    found = video_quality.measure(num=18, seed=99)
    shipped = json.loads((CHECKPOINTS.parent / "video_quality.json").read_text())
    assert found["target_captions_right"] >= shipped["target_captions_right"] - 0.3
    assert found["target_attributes_right"] >= shipped["target_attributes_right"] - 0.05
    assert found["drafter_attributes_right"] <= found["target_attributes_right"] - 0.1
    assert found["mean_acceptance_length"] == pytest.approx(shipped["mean_acceptance_length"], abs=0.6)


def test_a_few_steps_of_the_recipe_give_a_checkpoint_that_loads_and_that_a_seed_repeats(tmp_path: Path) -> None:
    recipe = Recipe(2, 2, 1e-3, tower_steps=1)
    weights = []
    for name, seed in (("one", 0), ("again", 0), ("other", 1)):
        (tmp_path / name).mkdir()
        build_video("drafter", recipe, seed, tmp_path / name)
        weights.append(load_file(tmp_path / name / "video_drafter" / "model.safetensors"))
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    assert not all(torch.equal(value, weights[2][name]) for name, value in weights[0].items())
    loaded = Target.load(CheckpointRef(str(tmp_path / "one" / "video_drafter")), "float32", "cpu")
    assert loaded.front_end.takes_videos
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["video_drafter"]


def test_frames_in_reverse_are_another_caption(pair: dict[str, Target]) -> None:
    """It reads the order of the frames, not only what they show."""
    clips = video_quality.held_out_clips(9, 99)
    turned = [
        (motion, phrasing, Clip(clip.frames[::-1].copy(), clip.timestamps_s, clip.fps))
        for motion, phrasing, clip in clips
    ]
    result = decode(pair["target"], video_quality.requests(pair["target"], turned))
    assert not any(
        states(motion, phrasing, one.text) for (motion, phrasing, _), one in zip(turned, result, strict=True)
    )
