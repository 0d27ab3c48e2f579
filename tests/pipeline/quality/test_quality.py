"""Quality of images: features of a CLIP model as transformers computes them, distances, pairs and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from jobs import quality as command
from models.loading.checkpoints import CheckpointError, CheckpointRef
from models.scorer import Scorer, cosines
from pipeline.quality.frechet import frechet_distance, jackknife, leave_out
from pipeline.quality.measure import ImageFeatures, compare, measure, quantile
from tests.pipeline.image_jobs import image_synthesis, picture, run_images
from zoo.pair import CHECKPOINTS

PROMPTS = [f"a picture of {thing}" for thing in ("a cat", "a dog", "snow", "a tree", "the sea")]


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CLIP model with random weights, and the tokenizer of the shipped pair."""
    folder = tmp_path_factory.mktemp("clip")
    tokenizer = transformers.AutoTokenizer.from_pretrained(CHECKPOINTS / "caption_target")
    torch.manual_seed(5)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 37, "num_attention_heads": 4}
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    text = {**sizes, **special, "vocab_size": len(tokenizer), "max_position_embeddings": 32, "num_hidden_layers": 2}
    vision = {**sizes, "image_size": 30, "patch_size": 15, "num_hidden_layers": 2}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    transformers.CLIPModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    crop = {"size": {"shortest_edge": 30}, "crop_size": {"height": 30, "width": 30}}
    settings = {"image_processor_type": "CLIPImageProcessor", "do_resize": True, **crop}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two outputs of the same prompts, two images each, and a folder of references."""
    folder = tmp_path_factory.mktemp("outputs")
    for name, guidance in (("first", 3.0), ("second", 4.0)):
        sampling = {"num_images_per_prompt": 2, "guidance_scale": guidance}
        run_images(image_synthesis(folder, PROMPTS, name, sampling=sampling))
    (folder / "real").mkdir()
    rng = np.random.default_rng(0)
    for number in range(12):
        Image.fromarray(rng.integers(0, 256, (24, 24, 3), np.uint8)).save(folder / "real" / f"{number}.png")
    return folder


def test_features_are_those_of_transformers(clip: Path) -> None:
    scorer = Scorer.load(CheckpointRef(str(clip)), "float32", "cpu")
    images = [picture(number) for number in range(5)]
    model = transformers.CLIPModel.from_pretrained(clip).eval()
    texts = [prompt + scorer.tokenizer.eos_token for prompt in PROMPTS]  # CLIP pools there
    pixels = scorer.image_processor([Image.fromarray(image) for image in images], return_tensors="pt")["pixel_values"]
    expected = []
    with torch.inference_mode():
        for text, image in zip(texts, pixels, strict=True):  # one at a time, without padding
            ids = scorer.tokenizer(text, return_tensors="pt")["input_ids"]
            out = model(input_ids=ids, pixel_values=image[None])
            expected.append(float((out.image_embeds * out.text_embeds).sum()))
    found = cosines(scorer.image_features(images), scorer.text_features(texts))
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert np.std(expected) > 1e-3


def test_a_checkpoint_without_features_is_refused() -> None:
    with pytest.raises(CheckpointError, match="no image and text features"):
        Scorer.load(CheckpointRef(str(CHECKPOINTS / "text_target")), "float32", "cpu")


def test_the_jackknife_of_a_mean_is_its_standard_error() -> None:
    values = np.random.default_rng(1).normal(size=(16, 1))
    folds = leave_out(values, lambda some: float(some.mean()))
    parts = values.reshape(2, 8).mean(0)
    assert jackknife(folds) == pytest.approx(float(parts.std(ddof=1)) / np.sqrt(8))
    assert leave_out(values[:3], lambda some: 0.0) == []
    assert jackknife([]) == 0.0


def test_pairs_decide_what_unpaired_outputs_leave_open() -> None:
    rng = np.random.default_rng(2)
    base, names = rng.normal(size=(400, 3)), tuple(map(str, range(400)))
    references = rng.normal(size=(500, 3))
    agreement = rng.normal(size=400)
    own = ImageFeatures(names, base, agreement + 0.05)
    moved = base + np.array([0.3, 0, 0])
    other = ImageFeatures(names[::-1], moved[::-1], agreement[::-1])
    difference = compare(own, other, references)
    assert difference.num_images == 400
    assert difference.agreement.value == pytest.approx(0.05)
    assert difference.agreement.margin < 1e-9
    assert difference.distance is not None
    unpaired = [measure(side, references) for side in (own, other)]
    gaps = frechet_distance(base, references) - frechet_distance(moved, references)
    assert difference.distance.value == pytest.approx(gaps)
    assert difference.distance.decides()
    margin = quantile(400) * agreement.std(ddof=1) / 20
    assert [side.agreement.margin for side in unpaired] == pytest.approx([margin, margin])


def test_the_command_measures_two_outputs_and_prints_json(
    clip: Path, outputs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*(str(outputs / name) for name in ("first", "second")), "--scorer", str(clip), "--device", "cpu"]
    assert command.main([*words, "--references", str(outputs / "real"), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [entry["num_images"] for entry in record["outputs"]] == [10, 10]
    assert record["difference"]["num_images"] == 10
    # The images are the same: no difference, and none is claimed.
    assert record["difference"]["distance"]["value"] == pytest.approx(0.0, abs=1e-9)
    assert record["outputs"][0]["distance"]["value"] > 0
    assert command.main(words) == 0
    text = capsys.readouterr().out
    assert "agreement with prompts" in text
    assert "not decided" in text
    assert "distance" not in text


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["{outputs}/first", "--scorer", "{outputs}/nothing"], "--scorer: "),
        (["{outputs}/gone", "--scorer", "{clip}"], "OUT: "),
        (["{outputs}/first", "--scorer", "{clip}", "--references", "{outputs}/gone"], "--references: "),
        (["{outputs}/first", "--scorer", "{clip}", "--limit", "3"], "--limit: must be from 8"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    words: list[str], reason: str, clip: Path, outputs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    filled = [word.format(clip=clip, outputs=outputs) for word in words]
    assert command.main([*filled, "--device", "cpu"]) == 2
    assert f"refused: {reason}" in capsys.readouterr().err


def test_a_reference_that_is_no_image_is_named(clip: Path, outputs: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "broken.png").write_bytes(b"not an image")
    words = [str(outputs / "first"), "--scorer", str(clip), "--device", "cpu", "--references", str(tmp_path)]
    assert command.main(words) == 2
    assert "broken.png is not an image" in capsys.readouterr().err
