"""The shipped image models: they load, and make what prompts ask for; tiny trainings run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from decoding import Request, Sampling
from models.llamagen.checkpoints import load_gpt
from models.llamagen.gpt import Gpt
from models.llamagen.shape import GptShape
from models.llamagen.target import LlamaGenTarget
from models.llamagen.vq import Vq
from models.llamagen.vq_files import load_vq
from models.loading.checkpoints import CheckpointRef
from zoo import build
from zoo.image.gpt import (
    Codes,
    asked_places,
    code_states,
    draw_scenes,
    encode_scenes,
    train_gpt,
)
from zoo.image.quality import GUIDANCE, load_reader, measure_described
from zoo.image.text import NUM_CONDITION_TOKENS, encode_prompts, load_t5
from zoo.image.vq import VQ_SHAPE, images_of, pixels_of
from zoo.pair import CHECKPOINTS
from zoo.quality import decode
from zoo.training import Recipe
from zoo.world.grain import sample_grainy, write_prompt
from zoo.world.scene import Scene, Thing

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


def draw_codes(gpt: Gpt, batch: Codes, sampling: Sampling) -> torch.Tensor:
    """Codes (n, grid²) for the conditions of a batch, by the engine without a drafter."""
    requests = []
    for row in range(len(batch.codes)):
        if batch.features is None:
            condition: np.ndarray | int = int(batch.labels[row])
        else:
            condition = batch.features[row, batch.mask[row]].numpy()
        requests.append(Request(f"image-{row}", "", (), sampling, condition=condition))
    return torch.tensor([done.token_ids for done in decode(LlamaGenTarget(gpt), requests)])


def code_logits(gpt: Gpt, batch: Codes, dropped: torch.Tensor) -> torch.Tensor:
    return gpt.output(code_states(gpt, batch, dropped))


@pytest.fixture(scope="module")
def vq() -> Vq:
    return load_vq(CheckpointRef(str(CHECKPOINTS / "image_vq")), "float32", CPU, VQ_SHAPE.codebook_size)


def test_reconstructed_images_show_the_attributes_of_their_prompts(vq: Vq) -> None:
    samples = sample_grainy("test", 20, 2)
    images, prompts = [pixels for _, pixels, _ in samples], [prompt for _, _, prompt in samples]
    codes = vq.encode(pixels_of(images))
    seen = measure_described(load_reader(), images_of(vq.decode(codes)), prompts)
    assert seen.whole >= 0.6
    assert seen.attributes >= 0.9
    assert len(codes.unique()) > 800, "many codes, few of them twice"


def test_guided_images_of_the_shipped_target_show_most_attributes_of_their_prompts(vq: Vq) -> None:
    gpt = load_gpt(CheckpointRef(str(CHECKPOINTS / "image_target")), "float32", CPU)
    scenes = draw_scenes("text", "test", 10, 4)
    batch = encode_scenes("text", scenes, vq, *load_t5(CHECKPOINTS))
    codes = draw_codes(gpt, batch, Sampling(144, 1.0, guidance_scale=GUIDANCE["text"]))
    images, prompts = (
        images_of(vq.decode(codes.view(-1, gpt.shape.grid, gpt.shape.grid))),
        [write_prompt(scene) for scene in scenes],
    )
    seen = measure_described(load_reader(), images, prompts)
    unasked = measure_described(load_reader(), images, [*prompts[1:], prompts[0]])
    assert seen.attributes >= 0.45
    assert seen.attributes > unasked.attributes + 0.15


def test_the_text_encoder_rolls_pads_to_the_left() -> None:
    t5, tokenizer = load_t5(CHECKPOINTS)
    prompts = [write_prompt(scene) for scene in draw_scenes("text", "test", 6, 0)]
    features, mask = encode_prompts(t5, tokenizer, prompts)
    assert features.shape[1:] == (NUM_CONDITION_TOKENS, 96)
    for row, prompt in enumerate(prompts):
        length = len(tokenizer(prompt)["input_ids"])
        assert mask[row].tolist() == [False] * (NUM_CONDITION_TOKENS - length) + [True] * length
        alone = t5(**tokenizer([prompt], return_tensors="pt")).last_hidden_state[0]
        torch.testing.assert_close(features[row, -length:], alone, rtol=1e-4, atol=1e-4)
        assert not features[row, :-length].any()


# The recipe's parts, on nothing that was trained.
TINY = {"dim": 16, "num_layers": 1, "num_heads": 2, "ffn_dim": 24, "vocab_size": 12, "grid": 3}


def tiny_gpt(kind: str) -> tuple[Gpt, Codes]:
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    codes = torch.randint(12, (4, 9), generator=generator)
    result = torch.randint(3, (4, 9, 4), generator=generator)
    if kind == "class":
        shape = GptShape(**TINY, condition="class", num_condition_tokens=1, num_classes=5)
        return Gpt(shape), Codes(codes, None, None, torch.tensor([0, 1, 2, 4]), result)
    shape = GptShape(**TINY, condition="text", num_condition_tokens=4, condition_dim=6)
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1], [0, 0, 0, 1]]).bool()
    return Gpt(shape), Codes(codes, torch.randn(4, 4, 6, generator=generator) * mask[:, :, None], mask, None, result)


@torch.no_grad()
def test_padding_content_changes_no_logits_and_a_dropped_row_has_no_prompt() -> None:
    gpt, batch = tiny_gpt("text")
    assert batch.features is not None
    assert batch.mask is not None
    kept, dropped = torch.zeros(4, dtype=torch.bool), torch.ones(4, dtype=torch.bool)
    loud = Codes(batch.codes, torch.where(batch.mask[:, :, None], batch.features, 9.0), batch.mask, None)
    other = Codes(batch.codes, batch.features + 1, batch.mask, None)
    torch.testing.assert_close(code_logits(gpt, loud, kept), code_logits(gpt, batch, kept))
    torch.testing.assert_close(code_logits(gpt, other, dropped), code_logits(gpt, batch, dropped))
    assert float((code_logits(gpt, other, kept) - code_logits(gpt, batch, kept)).abs().max()) > 1e-3


@pytest.mark.parametrize("kind", ["text", "class"])
@torch.no_grad()
def test_the_engine_draws_what_teacher_forcing_predicts(kind: str) -> None:
    (gpt, batch), (twin, _) = tiny_gpt(kind), tiny_gpt(kind)
    for parameter in (*gpt.parameters(), *twin.parameters()):
        parameter.mul_(3)
    codes = draw_codes(twin, batch, Sampling(9, guidance_scale=2.5))
    forced = Codes(codes, batch.features, batch.mask, batch.labels)
    result = code_logits(gpt, forced, torch.zeros(4, dtype=torch.bool))
    unsaid = code_logits(gpt, forced, torch.ones(4, dtype=torch.bool))
    assert codes.tolist() == (unsaid + 2.5 * (result - unsaid)).argmax(-1).tolist()


@torch.no_grad()
def loss_of(gpt: Gpt, batch: Codes) -> float:
    logits = code_logits(gpt, batch, torch.zeros(len(batch.codes), dtype=torch.bool))
    return float(nn.functional.cross_entropy(logits.flatten(0, 1), batch.codes.flatten()))


@pytest.mark.parametrize("kind", ["text", "class"])
def test_training_learns_four_images_by_heart_and_is_the_seed_s(kind: str) -> None:
    states = []
    for _ in range(2):
        gpt, batch = tiny_gpt(kind)
        before = loss_of(gpt, batch)
        train_gpt(gpt, batch, Recipe(40, 4, 2e-2), seed=0)
        assert loss_of(gpt, batch) < 0.5 * before
        states.append(gpt.output.weight.detach().clone())
    assert torch.equal(*states)


def test_positions_are_labelled_with_their_cells_object() -> None:
    scene = Scene((Thing(1, "medium", "red", "star"), Thing(8, "large", "pink", "ring")), "dark", "plain", 0)
    result = asked_places("text", [scene])[0].reshape(12, 12, 4)
    assert result[0, 4].tolist() == result[3, 7].tolist() == [1, 1, 4, 2]
    assert result[11, 11].tolist() == result[8, 8].tolist() == [2, 8, 6, 2]
    assert result[0, 3].tolist() == result[4, 4].tolist() == [0, 0, 0, 2]
    assert int((result[..., 0] > 0).sum()) == 32
    thing = Scene(scene.things[:1], "dark", "plain", 0)
    assert asked_places("class", [thing])[0].unique(dim=0).tolist() == [[0, 1, 4, 0]]


def test_pixels_are_equal_after_encoding_and_decoding() -> None:
    image = np.arange(96 * 96 * 3, dtype=np.uint32).reshape(96, 96, 3).astype(np.uint8)
    pixels = pixels_of([image])
    assert float(pixels.min()) == -1.0
    assert float(pixels.max()) == 1.0
    assert np.array_equal(images_of(pixels)[0], image)


def test_the_recipe_runs_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Recipe(4, 2, 1e-3, polish_steps=4, num_images=4)
    monkeypatch.setattr(build, "RECIPES", dict.fromkeys(build.RECIPES, recipe))
    assert build.main(["image", "--out", str(tmp_path)]) == 0
    names = ["image_class_target", "image_drafter", "image_t5", "image_target", "image_vq"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    for name in names:
        built, shipped = (folder / name / "config.json" for folder in (tmp_path, CHECKPOINTS))
        assert json.loads(built.read_text()) == json.loads(shipped.read_text())
    again = load_vq(CheckpointRef(str(tmp_path / "image_vq")), "float32", CPU)
    gpt = load_gpt(CheckpointRef(str(tmp_path / "image_drafter")), "float32", CPU)
    batch = encode_scenes("text", draw_scenes("text", "test", 2, 0), again, *load_t5(tmp_path))
    assert draw_codes(gpt, batch, Sampling(144, 1.0, guidance_scale=2.0)).shape == (2, 144)
