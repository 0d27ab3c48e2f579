"""Tests that prompts and images are preprocessed once for target and drafter if both need the same inputs."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from decoding import Engine, Method
from decoding.acceptance import Exact
from decoding.contexts import Full, Pooled, Pruned, TextOnly
from decoding.contracts import Context
from decoding.drafters import ModelDrafter
from decoding.drafters.ensemble import Ensemble, EnsembleOptions
from decoding.trees import Chain
from models.inputs.content import Content, Recent
from models.inputs.processing import FrontEnd
from models.loading.checkpoints import CheckpointRef, read_config, read_processor
from models.target import Target
from tests import toys
from tests.conformance import checks
from tests.conformance.methods import VISUAL

pytestmark = pytest.mark.slow

ROOM = 1 << 24


class Counted:
    """A processor that counts how often it is asked."""

    def __init__(self, processor: Any) -> None:
        self.inner = processor
        self.num_calls = 0

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.num_calls += 1
        return self.inner(*arguments, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def pair(family: str, max_bytes: int = ROOM) -> tuple[Target, Target, Counted]:
    target, drafter = toys.target(family), toys.perturbed(family, 0.02)
    drafter.front_end = FrontEnd(toys.processor(family))
    drafter.share_front_end(target, max_bytes)
    counted = Counted(target.front_end.processor)
    target.front_end.processor = counted
    return target, drafter, counted


def run(target: Target, drafter: Target, contexts: Sequence[Context], family: str) -> dict[str, Any]:
    merge = {"merge": Ensemble(EnsembleOptions())} if len(contexts) > 1 else {}
    method = Method(ModelDrafter(drafter, contexts, target.vocab_size, **merge), Chain(3), Exact())
    return checks.run(Engine(target, method, 3, 160), checks.requests(family, 6))


@pytest.mark.parametrize("family", VISUAL)
def test_images_are_prepared_once_for_a_pair_and_outputs_stay_the_same(family: str) -> None:
    target, drafter, counted = pair(family)
    done = run(target, drafter, [Full()], family)
    wanted = checks.requests(family, 6)
    assert counted.num_calls == len(
        {Content.shown(request.images, request.videos, request.prompt) for request in wanted}
    )
    alone = run(toys.target(family), toys.perturbed(family, 0.02), [Full()], family)
    for name, completion in done.items():
        assert completion.token_ids == alone[name].token_ids
        assert completion.telemetry.acceptance_histogram == alone[name].telemetry.acceptance_histogram


def test_every_context_of_a_drafter_reads_shared_inputs_without_changing_them() -> None:
    contexts = [Pooled(), Full(), Pruned(0.5), TextOnly()]
    target, drafter, counted = pair("llava")
    done = run(target, drafter, contexts, "llava")
    assert counted.num_calls == len(done)
    alone = run(toys.target("llava"), toys.perturbed("llava", 0.02), contexts, "llava")
    for name, completion in done.items():
        assert completion.telemetry.acceptance_histogram == alone[name].telemetry.acceptance_histogram


def test_without_cache_capacity_every_input_is_prepared_again() -> None:
    target, drafter, counted = pair("llava", 1)
    done = run(target, drafter, [Full()], "llava")
    assert counted.num_calls == 2 * len(done)


def test_another_prompt_over_the_same_image_is_another_input() -> None:
    target, drafter, _ = pair("llava")
    text, images = toys.prompt("llava", 0)
    first, second = (target.front_end.encode(each, images) for each in (text, f"{text} w30"))
    assert first["input_ids"].shape != second["input_ids"].shape
    again = drafter.front_end.encode(text, images)
    assert torch.equal(again["input_ids"], first["input_ids"])
    assert again["pixel_values"] is first["pixel_values"]


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "llama"])
def test_equal_front_ends_are_recognised(family: str) -> None:
    assert FrontEnd(toys.processor(family)).reads_like(FrontEnd(toys.processor(family)))


@pytest.mark.parametrize("family", ["llava_onevision", "qwen2_5_vl"])
def test_front_ends_of_equal_checkpoints_are_recognised(family: str, tmp_path: Path) -> None:
    toys.save(family, tmp_path)
    ref = CheckpointRef(str(tmp_path))
    first, other = (FrontEnd(read_processor(ref, read_config(ref))) for _ in range(2))
    assert first.takes_videos
    assert first.reads_like(other)


def other_size(processor: Any) -> None:
    processor.image_processor.size = {"height": 8, "width": 8}


def other_mean(processor: Any) -> None:
    processor.image_processor.image_mean = [0.1, 0.2, 0.3]


def other_patch(processor: Any) -> None:
    processor.patch_size = 7


def other_token(processor: Any) -> None:
    processor.tokenizer.add_tokens(["<more>"])


@pytest.mark.parametrize("change", [other_size, other_mean, other_patch, other_token])
def test_front_ends_that_differ_share_nothing(change: Any) -> None:
    target, drafter = toys.target("llava"), toys.target("llava")
    processor = copy.deepcopy(toys.processor("llava"))
    change(processor)
    drafter.front_end = FrontEnd(processor)
    drafter.share_front_end(target, ROOM)
    assert drafter.front_end is not target.front_end


def test_families_share_nothing() -> None:
    assert not FrontEnd(toys.processor("llava")).reads_like(FrontEnd(toys.processor("llama")))


def test_the_least_recently_used_entry_is_evicted() -> None:
    arrays = [np.full((10,), number, dtype=np.uint8) for number in range(4)]
    keys = [Content([array]) for array in arrays]
    recent: Recent[int] = Recent(60)
    for number in range(3):
        recent.keep(keys[number], number, 10)
    assert (recent.num_bytes, recent.get(keys[0])) == (60, 0)
    recent.keep(keys[3], 3, 10)
    assert [recent.get(key) for key in keys] == [0, None, 2, 3]
    recent.keep(keys[1], 1, 51)
    assert (recent.num_bytes, recent.get(keys[1])) == (60, None)
    arrays[0][:] = 9
    assert recent.get(Content([np.zeros(10, dtype=np.uint8)])) == 0, "keys are copies and do not change with the input"
