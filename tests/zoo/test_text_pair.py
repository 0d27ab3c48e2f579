"""The text pair that ships: its world, its files, and its descriptions of scenes outside the training set."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from models.inputs.processing import FrontEnd
from models.loading.checkpoints import CheckpointRef, read_config, read_processor
from zoo.build import build_text
from zoo.pair import CHECKPOINTS
from zoo.text import quality as text_quality
from zoo.text.pair import ARCHITECTURES, build_tokenizer, render
from zoo.text.samples import draw_batches, encode, held_out_prompts, held_out_questions
from zoo.training import Recipe
from zoo.world import listing
from zoo.world.grammar import stated
from zoo.world.scene import Scene, Thing, scene_rng, split_of

ROLES = ("target", "drafter")
SCENE = Scene(
    (Thing(0, "small", "red", "ring"), Thing(4, "large", "blue", "star"), Thing(8, "medium", "pink", "cross")),
    "pale",
    "dotted",
    0,
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(CHECKPOINTS / "text_target")


# --- the world -----------------------------------------------------------------------------------------------------


def test_a_prompt_lists_everything_in_the_answer() -> None:
    assert listing.write_prompt(SCENE, "tour") == (
        "Ground: pale, dotted. Objects: one, small red ring, top left; two, large blue star, middle centre; three, "
        "medium pink cross, bottom right. Tell me about the objects one by one."
    )
    results = listing.write_answer(SCENE, "survey", scene_rng("test", 0, 0))
    assert stated(results) == [
        "top left", "ring", "small", "red", "middle centre", "star", "large", "blue",
        "bottom right", "cross", "medium", "pink", "dotted", "pale",
    ]  # fmt: skip


@given(index=st.integers(0, 10_000), phrasing=st.sampled_from(list(listing.ASKED)))
@settings(max_examples=60, deadline=None)
def test_an_answer_tells_its_scene_and_no_other_and_is_of_the_promised_length(
    index: int, phrasing: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    rng = scene_rng("held_out", 4, index)
    one, other = listing.draw_listed_scene(rng, "held_out"), listing.draw_listed_scene(rng, "held_out")
    assert split_of(one) == "held_out"
    text = listing.write_answer(one, phrasing, rng)
    assert listing.states(one, phrasing, text)
    assert not listing.states(other, phrasing, text) or one == other
    assert not listing.states(one, phrasing, text.replace(".", "", 1))
    assert text_quality.attributes_right(one, phrasing, text)[0] == 2 + 4 * len(one.things)
    assert 93 <= len(tokenizer(f" {text}", add_special_tokens=False)["input_ids"]) <= 167


def test_a_split_that_does_not_exist_is_refused() -> None:
    with pytest.raises(KeyError, match="heldout"):
        listing.draw_listed_scene(scene_rng("held_out", 0, 0), "heldout")


def test_held_out_prompts_are_distinct_repeatable_and_of_scenes_outside_training() -> None:
    prompts = held_out_prompts(400, 7)
    assert len(set(prompts)) == 400
    assert prompts[:50] == held_out_prompts(50, 7)
    assert not set(prompts) & set(held_out_prompts(50, 8))
    questions = held_out_questions(60, 7)
    assert {split_of(scene) for scene, _ in questions} == {"held_out"}
    assert [phrasing for _, phrasing in questions[:3]] == list(listing.ASKED)
    assert render(listing.write_prompt(*questions[0])) == prompts[0]


def test_a_sample_is_laid_out_as_the_chat_template_does_and_only_answers_are_learned(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    prompt, result = listing.write_prompt(SCENE, "story"), listing.write_answer(SCENE, "story", scene_rng("test", 0, 0))
    ids, weights = encode(prompt, result, tokenizer)
    front_end = FrontEnd(tokenizer)
    assert front_end.render([{"role": "user", "content": prompt}]) == render(prompt)
    asked = front_end.encode(render(prompt), ())["input_ids"][0].tolist()
    assert ids[: len(asked)] == asked
    assert asked.count(tokenizer.bos_token_id) == 1
    assert ids[-1] == tokenizer.eos_token_id
    assert weights[: len(asked)] == [0.0] * len(asked)
    assert set(weights[len(asked) :]) == {0.3, 1.0}
    batch = next(draw_batches(0, 4, tokenizer))
    assert torch.equal(batch.mask.sum(1), (batch.ids != tokenizer.pad_token_id).sum(1))
    assert not batch.weights[batch.mask == 0].any()


# --- the pair ------------------------------------------------------------------------------------------------------


def test_both_models_share_one_tokenizer_which_the_recipe_builds() -> None:
    names = {path.name for path in (CHECKPOINTS / "text_target").iterdir()}
    assert names == {
        "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    }  # fmt: skip
    for name in names - {"config.json", "model.safetensors"}:
        one, other = (CHECKPOINTS / f"text_{role}" / name for role in ROLES)
        assert one.read_bytes() == other.read_bytes(), name
    built = json.loads(build_tokenizer().backend_tokenizer.to_str())
    shipped = json.loads((CHECKPOINTS / "text_target" / "tokenizer.json").read_text())
    assert built["model"] == shipped["model"]
    settings = json.loads((CHECKPOINTS / "text_target" / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"


@pytest.mark.parametrize("role", ROLES)
def test_a_checkpoint_is_a_plain_llama_in_bfloat16(role: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINTS / f"text_{role}", dtype="auto")
    assert isinstance(model, LlamaForCausalLM)
    assert model.config.hidden_size == ARCHITECTURES[role]["hidden"]
    assert model.config.head_dim == 64
    weights = load_file(CHECKPOINTS / f"text_{role}" / "model.safetensors")
    assert {value.dtype for value in weights.values()} == {torch.bfloat16}
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (2, 3)


def test_the_two_checkpoints_are_small() -> None:
    sizes = [path.stat().st_size for role in ROLES for path in (CHECKPOINTS / f"text_{role}").iterdir()]
    assert sum(sizes) <= 6 << 20


@pytest.mark.slow
def test_the_target_describes_held_out_scenes_and_the_drafter_is_weaker() -> None:
    found = text_quality.measure(num=9, seed=99)
    shipped = json.loads((CHECKPOINTS.parent / "text_quality.json").read_text())
    assert found["target_answers_right"] >= shipped["target_answers_right"] - 0.2
    assert found["drafter_attributes_right"] <= found["target_attributes_right"] - 0.05
    assert found["mean_acceptance_length"] == pytest.approx(shipped["mean_acceptance_length"], abs=0.4)
    assert 3.5 <= shipped["mean_acceptance_length"] <= 5.0
    assert 64 <= shipped["mean_answer_tokens"] <= 160


def test_a_few_steps_of_the_recipe_give_a_checkpoint_that_loads_and_that_a_seed_repeats(tmp_path: Path) -> None:
    recipe = Recipe(2, 2, 1e-3)
    weights = []
    for name, seed in (("one", 0), ("again", 0), ("other", 1)):
        (tmp_path / name).mkdir()
        build_text("drafter", recipe, seed, tmp_path / name)
        weights.append(load_file(tmp_path / name / "text_drafter" / "model.safetensors"))
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    assert not all(torch.equal(value, weights[2][name]) for name, value in weights[0].items())
    ref = CheckpointRef(str(tmp_path / "one" / "text_drafter"))
    assert not FrontEnd(read_processor(ref, read_config(ref))).takes_images
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["text_drafter"]
