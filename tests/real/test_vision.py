"""The target of the vision pair: its layout of conversations, and plain and speculative decoding equal to `generate`.

The oracle is transformers' `generate` of the target alone in float32, one scene at a time. Run by `make test-real`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from decoding import Engine, Method
from decoding.acceptance import Exact
from decoding.contexts import Full
from decoding.drafters import ModelDrafter, NoDrafter
from decoding.trees import Chain
from models.loading.checkpoints import CheckpointRef
from models.target import Target
from zoo.quality import REPORT, decode, dense_requests, measure
from zoo.real import __main__ as make_real
from zoo.real import drafters
from zoo.real_vision import __main__ as make
from zoo.real_vision.model import IMAGE_PX, NUM_VISUAL_TOKENS, build_processor, ensure, load_tokenizer
from zoo.real_vision.recipe import draw_packed
from zoo.world.dense import PROMPTS, draw_asked
from zoo.world.render import render_scene

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]
FOLDER = Path("out/real_vision/target")
NUM_SCENES, NUM_TOKENS = 8, 48


@pytest.fixture(scope="module", autouse=True)
def language() -> None:
    assert make_real.main([]) == 0


@pytest.fixture(scope="module")
def folder(language: None) -> Path:
    assert make.main([]) == 0
    return FOLDER


def test_training_samples_are_laid_out_as_the_chat_template_does() -> None:
    tokenizer = load_tokenizer()
    processor: Any = build_processor(tokenizer)
    packed = draw_packed(0, 0, tokenizer)
    for number, prompt in enumerate(PROMPTS.values(), start=1):
        content = [{"type": "image"}, {"type": "text", "text": prompt}]
        text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        wanted = processor(text=text, images=render_scene(packed.scene, IMAGE_PX))["input_ids"][0]
        asked = ((packed.captions == 0) | (packed.captions == number)) & (packed.weights == 0)
        assert packed.ids[asked].tolist() == list(wanted)
        assert list(wanted).count(tokenizer.convert_tokens_to_ids("<image>")) == NUM_VISUAL_TOKENS


def test_a_second_call_builds_nothing(folder: Path) -> None:
    assert ensure(folder) is False


@pytest.mark.parametrize("drafted", [False, True])
def test_greedy_captions_equal_generate(drafted: bool, folder: Path) -> None:
    oracle: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    processor: Any = AutoProcessor.from_pretrained(folder)
    model = Target.load(CheckpointRef(str(folder)), "float32")
    asked = draw_asked("held_out", NUM_SCENES, 0)
    requests = dense_requests(model, asked, NUM_TOKENS)
    # The target drafts for itself: chains of it are accepted wherever both paths compute the same logits.
    drafter = ModelDrafter(Target.load(CheckpointRef(str(folder)), "float32"), [Full()], model.vocab_size)
    method = Method(drafter, Chain(4), Exact()) if drafted else Method(NoDrafter(), Chain(1), Exact())
    done = {completion.sample_id: completion for completion in Engine(model, method, 3, 512).run(requests)}
    for request in requests:
        inputs = processor(text=request.prompt, images=list(request.images), return_tensors="pt")
        output = oracle.generate(**inputs, do_sample=False, max_new_tokens=NUM_TOKENS)
        expected = output[0, inputs["input_ids"].shape[1] :].tolist()
        assert list(done[request.sample_id].token_ids) == expected
    if drafted:
        assert all(completion.telemetry.num_accepted_draft_tokens for completion in done.values())


@pytest.mark.parametrize(("name", "least"), [("strong", 3.5), ("weak", 3.0)])
def test_shipped_drafters_draft_without_changing_captions(name: str, least: float, folder: Path) -> None:
    model = Target.load(CheckpointRef(str(folder)), "float32")
    requests = dense_requests(model, draw_asked("held_out", NUM_SCENES, 0), NUM_TOKENS)
    plain = decode(model, requests)
    path = folder.parent / f"{name}_drafter"
    drafted = decode(model, requests, Target.load(CheckpointRef(str(path)), "float32"))
    assert [completion.token_ids for completion in drafted] == [completion.token_ids for completion in plain]
    steps = sum(completion.telemetry.num_spec_steps for completion in drafted)
    accepted = sum(completion.telemetry.num_accepted_draft_tokens for completion in drafted)
    assert 1 + accepted / steps > least
    assert drafters.ensure(path, folder, make.DRAFTERS[name], drafters.digest(drafters.VISION_TARGET)) is False


def test_captions_state_the_scene_as_often_as_the_committed_report_says(folder: Path) -> None:
    measured = measure("real_vision", folder.parent, 12, 7)
    shipped = json.loads(REPORT.read_text())["real_vision"]
    assert measured["target_attributes_right"] > 0.98
    assert shipped["target_attributes_right"] > 0.98
    assert abs(measured["mean_caption_tokens"] - shipped["mean_caption_tokens"]) < 40
