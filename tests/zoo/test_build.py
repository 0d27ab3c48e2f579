"""Tests the zoo's rebuild: a few steps of each recipe give a checkpoint that loads, and learn the right tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from models.loading.checkpoints import CheckpointRef
from models.target import Target
from tests.toys.training import teach_states
from zoo import build, samples, video
from zoo.heads import PARTS, build_head, training_samples
from zoo.pair import CHECKPOINTS, load_tokenizer
from zoo.samples import FILLER_WEIGHT, FILLER_WORDS
from zoo.tower import draw_crowded, label_patches
from zoo.training import Recipe
from zoo.world.scene import COLOURS, SHAPES, SIZES, Scene, Thing, scene_rng, split_of

TINY = {
    "caption_drafter": Recipe(2, 4, 1e-3, tower_steps=2, tuned_tower_lr=1e-3, sharpen_steps=2, polish_steps=1),
    "text_drafter": Recipe(2, 2, 1e-3),
    "video_drafter": Recipe(2, 2, 1e-3, tower_steps=1, rounds=2),
    "image_t5": Recipe(2, 4, 1e-3),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_a_few_steps_give_a_checkpoint_that_loads_and_that_a_seed_repeats(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "RECIPES", TINY)
    weights = []
    for folder, seed in (("one", "0"), ("again", "0"), ("other", "1")):
        assert build.main([name, "--seed", seed, "--out", str(tmp_path / folder)]) == 0
        assert [path.name for path in (tmp_path / folder).iterdir()] == [name]
        weights.append(load_file(tmp_path / folder / name / "model.safetensors"))
    assert {value.dtype for value in weights[0].values()} == {torch.bfloat16}
    shipped = load_file(CHECKPOINTS / name / "model.safetensors")
    assert {key: value.shape for key, value in weights[0].items()} == {k: v.shape for k, v in shipped.items()}
    assert all(torch.equal(value, weights[1][key]) for key, value in weights[0].items())
    assert not all(torch.equal(value, weights[2][key]) for key, value in weights[0].items())
    others = [path for path in (CHECKPOINTS / name).iterdir() if path.suffix != ".safetensors"]
    assert all((tmp_path / "one" / name / path.name).read_bytes() == path.read_bytes() for path in others)


def test_every_shipped_model_that_a_builder_trains_has_a_recipe() -> None:
    # The drafters of the image models are trained by `jobs.train_drafter`. Two heads of videos do not ship.
    by_the_job = {"image_eagle", "image_class_eagle", "image_medusa"}
    shipped = {path.name for path in CHECKPOINTS.iterdir()}
    assert {*build.RECIPES} - {"video_eagle", "video_eagle3"} == shipped - by_the_job


def test_only_answers_are_learned_and_fillers_weigh_less() -> None:
    tokenizer = load_tokenizer("caption_target")
    batch = next(samples.draw_batches(3, 6))
    for ids, weights, mask in zip(batch.ids, batch.weights, batch.mask):
        text = tokenizer.decode(ids[weights > 0])
        assert "USER" not in text
        assert "ASSISTANT" not in text
        assert text.endswith(tokenizer.eos_token)
        assert not (weights[mask == 0] > 0).any()
        light = tokenizer.convert_ids_to_tokens(ids[weights == FILLER_WEIGHT].tolist())
        assert {word.removeprefix("Ġ") for word in light} <= FILLER_WORDS


def test_the_four_patches_of_a_cell_name_its_object_and_its_rank() -> None:
    scene = Scene((Thing(1, "small", "red", "ring"), Thing(8, "large", "pink", "star")), "dark", "dotted", 0)
    labels = label_patches(scene).reshape(6, 6, 6)
    assert labels[0].tolist() == [[0, 0, 1, 1, 0, 0]] * 2 + [[0] * 6] * 2 + [[0, 0, 0, 0, 2, 2]] * 2
    assert labels[1:4, 5, 5].tolist() == [SIZES.index("large"), COLOURS.index("pink"), SHAPES.index("star")]
    assert labels[1:4, 0, 0].tolist() == [-100] * 3
    assert labels[4].unique().tolist() == [2]


def test_crowded_scenes_stay_in_their_split_and_are_mostly_small() -> None:
    scenes = [draw_crowded(scene_rng("train", 9, index), "train") for index in range(200)]
    assert {split_of(scene) for scene in scenes} == {"train"}
    assert {len(scene.things) for scene in scenes} == {3, 4}
    sizes = [thing.size for scene in scenes for thing in scene.things]
    assert sizes.count("small") / len(sizes) == pytest.approx(0.6, abs=0.06)


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_training_samples_of_heads_are_the_conversations_of_a_batch_without_their_pads(part: str) -> None:
    target = Target.load(CheckpointRef(str(CHECKPOINTS / f"{part}_target")), "float32", "cpu")
    batch = next((samples if part == "caption" else video).draw_batches(3, 6))
    conversations = training_samples(batch, target)
    with torch.no_grad():
        whole = target.model.base_model(
            input_ids=batch.ids, attention_mask=batch.mask, **batch.inputs, use_cache=False
        ).last_hidden_state
    states = teach_states(target, conversations)
    for row, conversation in enumerate(conversations):
        size = int(batch.mask[row].sum())
        assert conversation.prefix.token_ids.tolist() == batch.ids[row, :size].tolist()
        assert conversation.wanted.tolist() == (batch.weights[row, :size] > 0).tolist()
        torch.testing.assert_close(states.hidden[row, :size], whole[row, :size], rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["caption_eagle", "caption_medusa", "video_eagle3"])
def test_a_head_is_built_beside_its_target_by_a_few_steps(name: str, tmp_path: Path) -> None:
    build_head(name, Recipe(2, 32, 1e-3), 0, tmp_path)
    (file,) = (tmp_path / name).glob("*.safetensors")
    assert {value.dtype for value in load_file(file).values() if value.is_floating_point()} == {torch.bfloat16}
