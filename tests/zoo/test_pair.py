"""The pairs that ship: their files, and that they are asked as they were trained."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlavaProcessor

from models.inputs.clip import Clip
from models.inputs.processing import FrontEnd
from models.loading.checkpoints import CheckpointRef, load_weights, read_config
from zoo import quality, text, video
from zoo.pair import CHECKPOINTS, NUM_VISUAL_TOKENS, load_processor, load_tokenizer
from zoo.samples import Conversation, encode, grammar_texts, pixels_of
from zoo.world import dialogue, grammar, listing, motion, sample_scenes
from zoo.world.scene import Scene, Thing, draw_scene, scene_rng

CLASSES = {
    "caption": "LlavaForConditionalGeneration",
    "video": "Qwen2_5_VLForConditionalGeneration",
    "text": "LlamaForCausalLM",
}
HIDDEN = {"target": 256, "drafter": 64}
LISTED = Scene((Thing(0, "small", "red", "ring"), Thing(4, "large", "blue", "star")), "pale", "dotted", 0)


@pytest.fixture(scope="module")
def processor() -> LlavaProcessor:
    loaded: LlavaProcessor = load_processor("caption_target")
    return loaded


@pytest.mark.parametrize(("part", "most_mib"), [("caption", 16), ("image", 16), ("video", 8), ("text", 6)])
def test_the_checkpoints_of_each_part_stay_within_its_share(part: str, most_mib: int) -> None:
    files = [path for folder in CHECKPOINTS.glob(f"{part}_*") for path in folder.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= most_mib * 2**20
    known = ("caption_", "image_", "video_", "text_")
    assert all(folder.name.startswith(known) for folder in CHECKPOINTS.iterdir() if folder.is_dir())


@pytest.mark.parametrize("part", CLASSES)
def test_both_models_of_a_pair_share_tokenizer_and_processor(part: str) -> None:
    names = {path.name for path in (CHECKPOINTS / f"{part}_target").iterdir()}
    assert "chat_template.jinja" in names
    for name in names - {"config.json", "model.safetensors"}:
        first, other = (CHECKPOINTS / f"{part}_{role}" / name for role in HIDDEN)
        assert first.read_bytes() == other.read_bytes(), name


@pytest.mark.parametrize("role", HIDDEN)
@pytest.mark.parametrize("part", CLASSES)
def test_a_checkpoint_loads_with_heads_64_wide_and_is_stored_in_bfloat16(part: str, role: str) -> None:
    ref = CheckpointRef(str(CHECKPOINTS / f"{part}_{role}"))
    model: Any = load_weights(ref, read_config(ref), "auto", torch.device("cpu"))
    assert type(model).__name__ == CLASSES[part]
    config, tokenizer = model.config.get_text_config(), load_tokenizer(f"{part}_{role}")
    assert config.hidden_size == HIDDEN[role]
    assert config.hidden_size // config.num_attention_heads == 64
    assert len(tokenizer) == config.vocab_size
    ids = model.generation_config
    assert (ids.eos_token_id, ids.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    weights = load_file(CHECKPOINTS / f"{part}_{role}" / "model.safetensors")
    assert {value.dtype for value in weights.values()} == {torch.bfloat16}


def test_texts_of_the_grammar_have_no_unknown_token_and_decode_unchanged(processor: LlavaProcessor) -> None:
    tokenizer = processor.tokenizer
    for sentence in grammar_texts(40, seed=123):
        ids = tokenizer(sentence, add_special_tokens=False)["input_ids"]
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids) == sentence


def test_words_of_an_answer_are_single_tokens_and_any_other_text_survives(processor: LlavaProcessor) -> None:
    tokenizer = processor.tokenizer
    for word in (*quality.ATTRIBUTE_WORDS, *(word for words in grammar.FILLERS.values() for word in words)):
        assert len(tokenizer(f" {word}", add_special_tokens=False)["input_ids"]) == 1
    odd = "Größe 12 px, naïve 猫?"
    assert tokenizer.decode(tokenizer(odd, add_special_tokens=False)["input_ids"]) == odd
    of_videos = load_tokenizer("video_target")
    assert all(len(of_videos(f" {word}")["input_ids"]) == 1 for words in motion.FILLERS.values() for word in words)


def test_captions_are_30_to_150_tokens_long(processor: LlavaProcessor) -> None:
    lengths = []
    for index in range(150):
        rng = scene_rng("test", 7, index)
        scene = draw_scene(rng, "test")
        captions = [grammar.write_caption(scene, phrasing, rng) for phrasing in grammar.PROMPTS]
        lengths += [
            len(processor.tokenizer(f" {caption}", add_special_tokens=False)["input_ids"]) for caption in captions
        ]
    assert min(lengths) >= 30
    assert max(lengths) <= 150


def test_training_lays_out_a_conversation_exactly_as_the_processor_does(processor: LlavaProcessor) -> None:
    scene, image, _, _ = sample_scenes("test", 1, 0, size_px=96)[0]
    turns = tuple(dialogue.draw_second_turn(scene, random.Random(0)))
    question = quality.ask(turns[0][0], [image], "")
    later = [{"role": "assistant", "content": turns[0][1]}, {"role": "user", "content": turns[1][0]}]
    rendered = processor.apply_chat_template([*question.messages, *later], add_generation_prompt=True)
    inputs = processor(text=[rendered], images=[image], return_tensors="pt")
    ids, weights = encode(Conversation((scene,), turns), processor.tokenizer)
    asked = inputs["input_ids"][0].tolist()
    assert ids[: len(asked)] == asked
    assert asked.count(processor.image_token_id) == NUM_VISUAL_TOKENS
    results = [token for token, weight in zip(ids, weights) if weight > 0]
    eos = processor.tokenizer.eos_token
    assert processor.tokenizer.decode(results) == f" {turns[0][1]}{eos} {turns[1][1]}{eos}"
    assert torch.allclose(inputs["pixel_values"], pixels_of([np.asarray(image)]), atol=1e-5)


def test_training_lays_out_a_listed_scene_as_the_chat_template_does() -> None:
    tokenizer = load_tokenizer("text_target")
    prompt = listing.write_prompt(LISTED, "story")
    ids, weights = text.encode(prompt, listing.write_answer(LISTED, "story", scene_rng("test", 0, 0)), tokenizer)
    front_end = FrontEnd(tokenizer)
    assert front_end.render([{"role": "user", "content": prompt}]) == text.render(prompt)
    asked = front_end.encode(text.render(prompt), ())["input_ids"][0].tolist()
    assert ids[: len(asked)] == asked
    assert asked.count(tokenizer.bos_token_id) == 1
    assert ids[-1] == tokenizer.eos_token_id
    assert weights[: len(asked)] == [0.0] * len(asked)
    assert set(weights[len(asked) :]) == {0.3, 1.0}


def test_training_lays_out_a_clip_as_the_processor_does() -> None:
    processor = load_processor("video_target")
    drawn = motion.draw_motion(scene_rng("train", 3, 7), "train")
    frames = np.stack([np.asarray(frame) for frame in motion.render_motion(drawn, video.NUM_FRAMES)])
    front = FrontEnd(processor)
    content = [{"type": "video"}, {"type": "text", "text": motion.PROMPTS["moved"]}]
    prompt = front.render([{"role": "user", "content": content}])
    sent = front.encode(prompt, (), (Clip(frames, tuple(i / 4 for i in range(video.NUM_FRAMES)), 4.0),))
    ids, weights = video.encode(motion.PROMPTS["moved"], "The end.", processor.tokenizer, 36)
    assert ids[: sent["input_ids"].shape[1]] == sent["input_ids"][0].tolist()
    assert not any(weights[: sent["input_ids"].shape[1]])
    assert ids[-1] == processor.tokenizer.eos_token_id
    alone = processor.video_processor([frames], [None])
    assert torch.equal(sent["pixel_values_videos"], alone["pixel_values_videos"])
    assert sent["video_grid_thw"].tolist() == [[4, 6, 6]]


def test_held_out_prompts_are_distinct_and_repeatable() -> None:
    prompts = text.held_out_prompts(400, 7)
    assert len(set(prompts)) == 400
    assert prompts[:50] == text.held_out_prompts(50, 7)
    assert not set(prompts) & set(text.held_out_prompts(50, 8))
    questions = text.held_out_questions(60, 7)
    assert [phrasing for _, phrasing in questions[:3]] == list(listing.ASKED)
    assert text.render(listing.write_prompt(*questions[0])) == prompts[0]
