"""Tests losslessness for every model family: outputs of `Target` equal those of transformers' `generate`.

Prompts have zero to two images of different sizes, and every third a video, so that every batch mixes them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import models.kv.lanes as lanes
import models.kv.prefill as reading
from decoding import Engine, Method, Request, Sampling
from decoding.acceptance import Exact
from decoding.drafters import NoDrafter
from models.inputs.prefix import Prefix
from models.inputs.processing import PromptError
from models.loading.checkpoints import CheckpointRef
from models.target import Target
from tests import toys
from tests.conformance import checks
from tests.covering import tiers

pytestmark = pytest.mark.slow

FAMILIES = tuple(family for family in toys.FAMILIES if family not in ("llama", "llava"))
COVERING = (("chain", "perturbed", 4), ("ragged", "perturbed", 9), ("chain", "right", 1), ("ragged", "right", 4))
SAMPLED = Sampling(temperature=0.9, top_k=20, top_p=0.9, repetition_penalty=1.3)


@tiers("family, tree, drafter, slots", FAMILIES, COVERING, strength=1)
def test_greedy_output_equals_generate(family: str, tree: str, drafter: str, slots: int) -> None:
    checks.check_greedy(family, tree, drafter, slots)


@tiers("family, tree, slots", FAMILIES, [("chain", 9), ("ragged", 4)], strength=1)
def test_sampled_output_equals_plain_sampling_under_shared_noise(family: str, tree: str, slots: int) -> None:
    acceptance_length = checks.check_sampled(family, tree, "perturbed", slots, SAMPLED)
    assert acceptance_length > 1.1


@pytest.mark.parametrize(("family", "tree"), [*((family, "ragged") for family in FAMILIES), ("qwen2_5_vl", "chain")])
def test_the_kv_cache_of_every_row_equals_a_fresh_prefill(family: str, tree: str) -> None:
    checks.check_cache(family, tree, "perturbed")


@pytest.mark.parametrize("family", list(toys.FAMILIES))
def test_a_saved_checkpoint_loads_and_gives_the_same_tokens(family: str, tmp_path: Path) -> None:
    toys.save(family, tmp_path)
    loaded = Target.load(CheckpointRef(str(tmp_path)), "float32", "cpu")
    engine = Engine(loaded, Method(NoDrafter(), checks.TREES["chain"](), Exact()), 4, 128)
    wanted = checks.requests(family, 5)
    done = checks.run(engine, wanted)
    for request in wanted:
        assert done[request.sample_id].token_ids == checks.generated(family, request, loaded.eos_ids)


@pytest.mark.parametrize("saved_as", ["Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast"])
def test_a_checkpoint_with_a_video_part_describes_pictures_alone(saved_as: str, tmp_path: Path) -> None:
    toys.save("qwen2_5_vl", tmp_path)
    settings = tmp_path / "preprocessor_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"image_processor_type": saved_as}))
    (tmp_path / "video_preprocessor_config.json").write_text('{"video_processor_type": "Qwen2VLVideoProcessor"}')
    loaded = Target.load(CheckpointRef(str(tmp_path)), "float32", "cpu")
    made = toys.target("qwen2_5_vl")
    prompt, images = toys.prompt("qwen2_5_vl", 1)
    assert torch.equal(loaded.encode(prompt, images).embeds, made.encode(prompt, images).embeds)
    with pytest.raises(PromptError, match="no videos were passed"):
        loaded.encode("<s> w4 <video>", ())


@pytest.mark.parametrize("family", ["llava_onevision", "qwen3_vl"])
def test_a_loaded_checkpoint_renders_its_own_chat_template(family: str, tmp_path: Path) -> None:
    toys.save(family, tmp_path)
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{% for c in m.content %}{{ '<image> ' if c.type == 'image' else c.text }}{% endfor %}"
        "{% endfor %}{{ ' w7' if add_generation_prompt }}"
    )
    front_end = Target.load(CheckpointRef(str(tmp_path)), "float32", "cpu").front_end
    content = [{"type": "image"}, {"type": "text", "text": "w4 w5"}]
    assert front_end.render([{"role": "user", "content": content}]) == "<image> w4 w5 w7"


def test_indistinguishable_images_fail_only_their_row() -> None:
    pictures = (toys.picture(0, "qwen2_5_vl"), toys.picture(1, "qwen2_5_vl"))
    method = Method(NoDrafter(), checks.TREES["chain"](), Exact())
    engine = Engine(toys.target("qwen2_5_vl"), method, 4, 128)
    good = checks.requests("qwen2_5_vl", 3)
    done = {c.sample_id: c for c in engine.run([Request("bad", "<s> w4 <image> <image>", pictures), *good])}
    assert done["bad"].error is not None
    assert done["bad"].error.message.startswith("the model refuses the prompt: ")
    for request in good:
        expected = checks.generated("qwen2_5_vl", request, engine.target.eos_ids)
        assert done[request.sample_id].token_ids == expected


def position_offset_is_dropped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Prefix, "position_offset", torch.tensor(0))


def tokens_follow_the_latest_frame(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Prefix, "next_position", property(lambda prefix: prefix.positions.max() + 1))


def position_axes_are_made_equal(patch: pytest.MonkeyPatch) -> None:
    def first_axis_only(prefixes: Any, length: int) -> torch.Tensor:
        positions = stack(prefixes, length)
        return positions[:1].expand_as(positions) if positions.dim() == 3 else positions

    stack = reading.stack_positions
    patch.setattr(reading, "stack_positions", first_axis_only)


def deepstack_features_are_dropped(patch: pytest.MonkeyPatch) -> None:
    stack = reading.stack_deepstack
    patch.setattr(reading, "stack_deepstack", lambda prefixes: [torch.zeros_like(prefix) for prefix in stack(prefixes)])


def deepstack_features_go_to_another_row(patch: pytest.MonkeyPatch) -> None:
    stack = reading.stack_deepstack
    patch.setattr(reading, "stack_deepstack", lambda prefixes: stack(prefixes[::-1]))


def deepstack_layers_are_swapped(patch: pytest.MonkeyPatch) -> None:
    stack = reading.stack_deepstack
    patch.setattr(reading, "stack_deepstack", lambda prefixes: stack(prefixes)[::-1])


def every_row_takes_the_first_rows_offset(patch: pytest.MonkeyPatch) -> None:
    admit = lanes.LaneModel.admit

    def admit_with_one_offset(self: Any, slots: Any, prefixes: Any, *rest: Any, **more: Any) -> Any:
        out = admit(self, slots, prefixes, *rest, **more)
        rows = self.rows.of(slots)
        self.rows.delta[rows] = self.rows.delta[rows[0]].clone()
        return out

    patch.setattr(lanes.LaneModel, "admit", admit_with_one_offset)


FAULTS = [
    (position_offset_is_dropped, "qwen2_5_vl"),
    (position_axes_are_made_equal, "qwen3_vl"),
    (tokens_follow_the_latest_frame, "qwen2_5_vl"),
    (every_row_takes_the_first_rows_offset, "qwen2_5_vl"),
    (deepstack_features_are_dropped, "qwen3_vl"),
    (deepstack_features_go_to_another_row, "qwen3_vl_moe"),
    (deepstack_layers_are_swapped, "qwen3_vl"),
]


@pytest.mark.parametrize(("fault", "family"), FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
def test_a_planted_fault_is_caught(
    fault: Callable[[pytest.MonkeyPatch], None], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without the fault this is a case of the first test of this file, which passes.
    # Some faults are also found when a model is loaded; here the check must find them.
    monkeypatch.setattr("models.target.prove", lambda *_: None)
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        checks.check_greedy(family, "ragged", "perturbed", 9)
