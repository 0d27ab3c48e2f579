"""Tests the zoo's rebuild: a few steps of the recipe run end to end, are deterministic, and train the right tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from models.loading.checkpoints import CheckpointRef
from models.target import Target
from tests.toys.training import teach_states
from zoo.build import BUILDERS, RECIPES, build_caption, main
from zoo.heads import build_head, draw_samples, image_inputs, training_samples_of, video_inputs
from zoo.pair import CHECKPOINTS, build_tokenizer
from zoo.samples import FILLER_WEIGHT, FILLER_WORDS, draw_batches
from zoo.tower import draw_crowded, label_patches
from zoo.training import Recipe
from zoo.video import pair as video_pair
from zoo.video import samples as video_samples
from zoo.world.scene import COLOURS, SHAPES, SIZES, Scene, Thing, scene_rng, split_of

pytestmark = pytest.mark.slow

TINY = Recipe(2, 4, 1e-3, tower_steps=2, tuned_tower_lr=1e-3, sharpen_steps=2, polish_steps=1)


def test_a_few_steps_of_the_recipe_give_a_checkpoint_that_loads_and_that_a_seed_repeats(tmp_path: Path) -> None:
    weights = []
    for name, seed in (("one", 0), ("again", 0), ("other", 1)):
        (tmp_path / name).mkdir()
        build_caption("drafter", TINY, seed, tmp_path / name)
        weights.append(load_file(tmp_path / name / "caption_drafter" / "model.safetensors"))
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    assert not all(torch.equal(value, weights[2][name]) for name, value in weights[0].items())
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "one" / "caption_drafter")
    assert model.dtype == torch.bfloat16
    assert torch.equal(model.lm_head.weight, next(v for k, v in weights[0].items() if k.endswith("lm_head.weight")))


def test_every_shipped_model_that_a_builder_trains_has_a_recipe() -> None:
    # The drafters of the image models are trained by `jobs.train_drafter`. Two heads of videos do not ship.
    by_the_job = {"image_eagle", "image_class_eagle", "image_medusa"}
    assert {*RECIPES} - {"video_eagle", "video_eagle3"} == {path.name for path in CHECKPOINTS.iterdir()} - by_the_job


@pytest.mark.parametrize("part", BUILDERS)
def test_a_quick_run_never_overwrites_the_shipped_models(part: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([part, "--quick"])
    assert stopped.value.code == 2
    assert "--out" in capsys.readouterr().err


def test_only_answers_are_learned_and_fillers_weigh_less() -> None:
    tokenizer = build_tokenizer(0)
    batch = next(draw_batches("train", 3, 6, tokenizer))
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
    named = [SIZES.index("large"), COLOURS.index("pink"), SHAPES.index("star")]
    assert labels[1:4, 5, 5].tolist() == named
    assert labels[1:4, 0, 0].tolist() == [-100] * 3
    assert labels[4].unique().tolist() == [2]


def test_crowded_scenes_stay_in_their_split_and_are_mostly_small() -> None:
    scenes = [draw_crowded(scene_rng("train", 9, index), "train") for index in range(200)]
    assert {split_of(scene) for scene in scenes} == {"train"}
    assert {len(scene.things) for scene in scenes} == {3, 4}
    sizes = [thing.size for scene in scenes for thing in scene.things]
    assert sizes.count("small") / len(sizes) == pytest.approx(0.6, abs=0.06)


@pytest.mark.parametrize("part", ["caption", "video"])
def test_training_samples_are_the_conversations_of_a_batch_without_their_pads(part: str) -> None:
    target = Target.load(CheckpointRef(str(CHECKPOINTS / f"{part}_target")), "float32", "cpu")
    if part == "caption":
        batch = next(draw_batches("train", 3, 6, build_tokenizer(0)))
        media = image_inputs(batch, target)
    else:
        videos = video_pair.build_processor(video_pair.build_tokenizer()).video_processor
        batch = next(video_samples.draw_batches("train", 3, 6, video_pair.build_tokenizer(), videos))
        media = video_inputs(batch)
    training_samples = training_samples_of(batch, target, media)
    with torch.no_grad():
        whole = target.model.base_model(
            input_ids=batch.ids, attention_mask=batch.mask, **batch.inputs, use_cache=False
        ).last_hidden_state
    states = teach_states(target, training_samples)
    for row, training_sample in enumerate(training_samples):
        size = int(batch.mask[row].sum())
        assert training_sample.prefix.token_ids.tolist() == batch.ids[row, :size].tolist()
        assert training_sample.wanted.tolist() == (batch.weights[row, :size] > 0).tolist()
        torch.testing.assert_close(states.hidden[row, :size], whole[row, :size], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("part", ["caption", "video"])
def test_samples_of_heads_repeat_with_their_seed(part: str) -> None:
    target = Target.load(CheckpointRef(str(CHECKPOINTS / f"{part}_target")), "float32", "cpu")
    drawn = [next(draw_samples(part, seed, 3, target)) for seed in (1, 1, 2)]
    ids = [[one.prefix.token_ids.tolist() for one in samples] for samples in drawn]
    assert ids[0] == ids[1] != ids[2]


@pytest.mark.parametrize(("part", "kind"), [("caption", "eagle"), ("caption", "medusa"), ("video", "eagle3")])
def test_a_head_is_built_beside_its_target_by_a_few_steps(part: str, kind: str, tmp_path: Path) -> None:
    build_head(part, kind, Recipe(2, 32, 1e-3), 0, tmp_path)
    (file,) = (tmp_path / f"{part}_{kind}").glob("*.safetensors")
    dtypes = {value.dtype for value in load_file(file).values() if value.is_floating_point()}
    assert dtypes == {torch.bfloat16}
