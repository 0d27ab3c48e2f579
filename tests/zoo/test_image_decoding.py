"""Tests losslessness on the shipped image models: guided images with every drafter equal those of plain decoding."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from actors.loading.image_pair import ImagePair, load
from configs.load import load_preset
from configs.synthesis import SynthesizeJobConfig
from decoding import Completion, Request, Sampling
from models.contract import Condition
from tests.conformance.checks import check_telemetry, run
from zoo.image.gpt import NUM_CLASSES
from zoo.world.grain import draw_grainy_scene, write_prompt
from zoo.world.scene import scene_rng

pytestmark = pytest.mark.slow

CODES = 144
HOT = Sampling(CODES, temperature=1.0, top_k=250, guidance_scale=3.0)
SAMPLINGS = (HOT, Sampling(CODES, temperature=0.0, guidance_scale=2.0), Sampling(CODES, temperature=0.9, top_p=0.95))
"""Guided and hot, guided and greedy, and not guided at all, side by side in one batch."""
SMALL_TREE = ("method.tree.total_tokens=16", "method.tree.top_k=5")
LOSSLESS = {
    "eagle2": ("zoo_images_eagle2", SMALL_TREE),
    "sd-chain": ("zoo_images_sd_chain", ()),
    "lantern without a share": ("zoo_images_lantern_coupled", (*SMALL_TREE, "method.acceptance.delta=0.0")),
    "class, lantern without a share": (
        "zoo_images_class_lantern_coupled",
        (*SMALL_TREE, "method.acceptance.delta=0.0"),
    ),
}


def pair(preset: str, *changes: str) -> ImagePair:
    return load(load_preset(SynthesizeJobConfig, preset, changes))


def requests(of: ImagePair) -> list[Request]:
    """As many images as there are samplings, of prompts of different lengths or of classes."""
    results = []
    for index, sampling in enumerate(SAMPLINGS):
        prompt = write_prompt(draw_grainy_scene(scene_rng("grain/decoding", 3, index), "held_out", 1 + index % 2))
        condition: Condition = 7 * index % NUM_CLASSES
        if of.text_encoder is not None:
            condition = of.encode(prompt)
        results.append(Request(f"image-{index}", prompt, (), sampling, seed=5, condition=condition))
    return results


def draw(preset: str, *changes: str, slots: int = 3) -> dict[str, Completion]:
    of = pair(preset, *changes)
    return run(of.engine(slots), requests(of))


@cache
def plain(preset: str) -> dict[str, Tensor]:
    """Return the codes of plain decoding, one image at a time."""
    return {name: torch.tensor(done.token_ids) for name, done in draw(preset, slots=1).items()}


@pytest.mark.parametrize("case", LOSSLESS)
def test_whole_images_equal_plain_ones_code_for_code(case: str) -> None:
    preset, changes = LOSSLESS[case]
    expected = plain("zoo_images_class_plain" if case.startswith("class") else "zoo_images_plain")
    drawn = draw(preset, *changes)
    for name, completion in drawn.items():
        assert len(completion.token_ids) == CODES
        assert torch.equal(torch.tensor(completion.token_ids), expected[name]), (case, name)
        check_telemetry(completion)
        assert completion.telemetry.num_relaxed_accepts == 0
    num_forwards = sum(completion.telemetry.target_forwards for completion in drawn.values())
    assert num_forwards < 0.85 * len(drawn) * CODES, "a drafter that saves nothing proves nothing"


def test_medusa_heads_draw_plain_images_in_fewer_forwards() -> None:
    drawn = draw("zoo_images_medusa")
    for name, completion in drawn.items():
        assert torch.equal(torch.tensor(completion.token_ids), plain("zoo_images_plain")[name]), name
        assert completion.telemetry.target_forwards < CODES


@pytest.mark.parametrize("preset", ["zoo_images_lantern", "zoo_images_lantern_coupled"])
def test_with_a_relaxed_share_lantern_draws_other_codes_and_counts_them(preset: str) -> None:
    drawn = draw(preset, *SMALL_TREE)
    relaxed = {name: completion.telemetry.num_relaxed_accepts for name, completion in drawn.items()}
    assert min(relaxed.values()) > 0
    for name, completion in drawn.items():
        assert not torch.equal(torch.tensor(completion.token_ids), plain("zoo_images_plain")[name])
