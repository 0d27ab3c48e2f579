"""The pair that ships: its tokenizer, its files, and that it captions scenes it was never trained on."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor, LlavaForConditionalGeneration, LlavaProcessor

from models.target import Target
from zoo import quality
from zoo.measure import PARTS, quality_table
from zoo.pair import CHECKPOINTS, MAX_POSITIONS, NUM_VISUAL_TOKENS, build_tokenizer, grammar_texts
from zoo.samples import Conversation, encode, pixels_of
from zoo.world import dialogue, grammar, sample_scenes
from zoo.world.scene import Scene, Thing, draw_scene, scene_rng


@pytest.fixture(scope="module")
def pair() -> dict[str, Target]:
    return quality.load_targets(CHECKPOINTS, "caption")


@pytest.fixture(scope="module")
def processor() -> LlavaProcessor:
    return AutoProcessor.from_pretrained(CHECKPOINTS / "caption_target")


@pytest.mark.parametrize(("part", "most_mib"), [("caption", 16), ("image", 16), ("video", 8), ("text", 6)])
def test_the_checkpoints_of_each_part_stay_within_its_share(part: str, most_mib: int) -> None:
    files = [path for folder in CHECKPOINTS.glob(f"{part}_*") for path in folder.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= most_mib * 2**20
    known = ("caption_", "image_", "video_", "text_")
    assert all(folder.name.startswith(known) for folder in CHECKPOINTS.iterdir() if folder.is_dir())


def test_both_models_share_one_tokenizer_and_one_processor() -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "processor_config.json", "chat_template.jinja"):
        one, other = (CHECKPOINTS / f"caption_{role}" / name for role in ("target", "drafter"))
        assert one.read_bytes() == other.read_bytes()


def test_the_shipped_tokenizer_is_the_one_that_the_recipe_builds() -> None:
    built = json.loads(build_tokenizer(0).backend_tokenizer.to_str())
    shipped = json.loads((CHECKPOINTS / "caption_target" / "tokenizer.json").read_text())
    assert built["model"]["vocab"] == shipped["model"]["vocab"]
    assert built["model"]["merges"] == shipped["model"]["merges"]


@pytest.mark.parametrize(("role", "hidden", "heads"), [("target", 256, 4), ("drafter", 64, 1)])
def test_a_checkpoint_loads_through_the_auto_classes_with_heads_64_wide(role: str, hidden: int, heads: int) -> None:
    model = AutoModelForImageTextToText.from_pretrained(CHECKPOINTS / f"caption_{role}")
    text = model.config.text_config
    assert type(model) is LlavaForConditionalGeneration
    assert model.dtype == torch.bfloat16
    assert (text.hidden_size, text.num_attention_heads, text.head_dim) == (hidden, heads, 64)
    assert text.max_position_embeddings == MAX_POSITIONS
    processor = AutoProcessor.from_pretrained(CHECKPOINTS / f"caption_{role}")
    tokenizer = processor.tokenizer
    ids = model.generation_config
    assert (ids.bos_token_id, ids.eos_token_id, ids.pad_token_id) == (
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
        tokenizer.pad_token_id,
    )
    assert len(tokenizer) == text.vocab_size
    assert model.config.image_token_id == tokenizer.convert_tokens_to_ids("<image>")


def test_no_text_of_the_grammar_has_an_unknown_token_and_all_come_back_unchanged(processor: LlavaProcessor) -> None:
    tokenizer = processor.tokenizer
    for text in grammar_texts(40, seed=123):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids) == text


def test_words_of_an_answer_are_single_tokens_and_any_other_text_survives(processor: LlavaProcessor) -> None:
    tokenizer = processor.tokenizer
    for word in (*quality.ATTRIBUTE_WORDS, *(word for words in grammar.FILLERS.values() for word in words)):
        assert len(tokenizer(f" {word}", add_special_tokens=False)["input_ids"]) == 1
    odd = "Größe 12 px, naïve 猫?"
    assert tokenizer.decode(tokenizer(odd, add_special_tokens=False)["input_ids"]) == odd


def test_captions_are_30_to_150_tokens_long(processor: LlavaProcessor) -> None:
    tokenizer = processor.tokenizer
    lengths = []
    for index in range(150):
        rng = scene_rng("test", 7, index)
        scene = draw_scene(rng, "test")
        for phrasing in grammar.PROMPTS:
            caption = grammar.write_caption(scene, phrasing, rng)
            lengths.append(len(tokenizer(f" {caption}", add_special_tokens=False)["input_ids"]))
    assert min(lengths) >= 30
    assert max(lengths) <= 150


def test_training_lays_out_a_conversation_exactly_as_the_processor_does(processor: LlavaProcessor) -> None:
    scene, image, _, _ = sample_scenes("test", 1, 0, size_px=96)[0]
    turns = tuple(dialogue.draw_second_turn(scene, random.Random(0)))
    question = quality.ask(turns[0][0], [image], "")
    messages = [
        *question.messages,
        {"role": "assistant", "content": turns[0][1]},
        {"role": "user", "content": turns[1][0]},
    ]
    text = processor.apply_chat_template(messages, add_generation_prompt=True)
    inputs = processor(text=[text], images=[image], return_tensors="pt")
    ids, weights = encode(Conversation((scene,), turns), processor.tokenizer)
    asked = inputs["input_ids"][0].tolist()
    assert ids[: len(asked)] == asked
    assert asked.count(processor.image_token_id) == NUM_VISUAL_TOKENS
    results = [token for token, weight in zip(ids, weights) if weight > 0]
    eos = processor.tokenizer.eos_token
    assert processor.tokenizer.decode(results) == f" {turns[0][1]}{eos} {turns[1][1]}{eos}"
    assert torch.allclose(inputs["pixel_values"], pixels_of([np.asarray(image)]), atol=1e-5)


def test_the_target_captions_held_out_scenes_and_the_drafter_is_visibly_weaker(pair: dict[str, Target]) -> None:
    found = quality.measure_captions(pair, num=24, seed=99)
    assert found["target_captions_right"] >= 0.8
    assert found["target_attributes_right"] >= 0.97
    assert found["drafter_attributes_right"] <= found["target_attributes_right"] - 0.1
    assert 2.0 <= found["mean_acceptance_length"] <= 4.5
    assert found["attribute_top1_mean"] >= 0.95
    assert found["filler_top1_mean"] <= 0.6


def test_the_target_follows_the_prompt_and_not_only_the_image(pair: dict[str, Target]) -> None:
    _, image, _, _ = sample_scenes("test", 1, 4)[0]
    questions = [quality.ask(prompt, [image], "") for prompt in grammar.PROMPTS.values()]
    parsed = [grammar.parse_caption(text) for text in quality.answer_all(pair["target"], questions)]
    assert [one and one[0] for one in parsed] == list(grammar.PROMPTS)


def test_attributes_are_counted_against_the_object_in_the_stated_cell() -> None:
    scene = Scene((Thing(0, "small", "red", "ring"), Thing(8, "large", "blue", "star")), "pale", "plain", 0)
    wrong = Scene((Thing(0, "small", "red", "star"), Thing(7, "large", "blue", "star")), "pale", "plain", 0)
    result = grammar.write_caption(wrong, "rows", random.Random(0))
    assert quality.count_attributes(scene, "rows", result) == (2 + 3 + 0, 10)
    assert quality.count_attributes(scene, "plain", result) == (0, 10)
    assert quality.count_attributes(scene, "rows", "nonsense") == (0, 10)


def test_two_answers_compare_by_what_they_state() -> None:
    one = "Overall the second image looks alike, but a ring was removed."
    other = "Generally the second scene feels alike, but a ring was removed."
    assert quality.mask_fillers(one) == quality.mask_fillers(other)
    assert quality.mask_fillers(one) != quality.mask_fillers(other.replace("ring", "star"))


@pytest.mark.parametrize("part", PARTS)
def test_the_readme_shows_the_committed_quality_tables(part: str) -> None:
    _, path = PARTS[part]
    assert quality_table(json.loads(path.read_text())) in (CHECKPOINTS.parent / "README.md").read_text()
