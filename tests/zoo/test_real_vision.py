"""Tests the parts of the vision pair's training on tiny models: low-rank differences and packed captions."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path

import pytest
import torch
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

from zoo import tower
from zoo.pair import build_tokenizer
from zoo.real import drafters, eagle, low_rank
from zoo.real.low_rank import LAYERS, attach, merge
from zoo.real.model import WEIGHTS_SHA256
from zoo.real_vision import differences
from zoo.real_vision.labels import NUM_VISUAL_TOKENS, WORDS
from zoo.real_vision.language import Learner, train
from zoo.real_vision.model import vision_config
from zoo.real_vision.projector import word_embeddings
from zoo.real_vision.samples import Packed, draw_packed
from zoo.world.dense import PROMPTS

TOKENIZER = build_tokenizer()
DECODER = "model.language_model"
PREFIX = f"{DECODER}.layers."


def tiny_text() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(TOKENIZER),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1024,
        initializer_range=0.15,  # large enough that attention matters
        tie_word_embeddings=True,
    )


def tiny_model(seed: int = 0) -> LlavaForConditionalGeneration:
    torch.manual_seed(seed)
    vision = vision_config()
    vision.num_hidden_layers = 1
    config = LlavaConfig(
        vision_config=vision,
        text_config=tiny_text(),
        image_token_index=TOKENIZER.convert_tokens_to_ids("<image>"),
        image_seq_length=NUM_VISUAL_TOKENS,
        vision_feature_layer=-1,
        tie_word_embeddings=True,
    )
    return LlavaForConditionalGeneration(config).eval()


def one_caption(packed: Packed, number: int) -> Packed:
    """Return the shared beginning and one caption of a packed sample."""
    chosen = (packed.captions == 0) | (packed.captions == number)
    parts = {name: getattr(packed, name)[chosen] for name in ("ids", "weights", "positions", "captions")}
    return dataclasses.replace(packed, **parts)


def test_merged_differences_give_the_outputs_of_attached_ones() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_text()).eval()
    weights = {name: one.clone() for name, one in model.state_dict().items()}
    ids = torch.randint(0, 200, (1, 12))
    before = model(ids).logits
    added = attach(model)
    assert len(added) == 2 * len(LAYERS) * 2
    assert torch.equal(model(ids).logits, before)
    for one in added.values():
        torch.nn.init.normal_(one, std=0.1)
    attached = model(ids).logits
    assert (attached - before).abs().max() > 0.01
    merged = LlamaForCausalLM(tiny_text()).eval()
    merged.load_state_dict(merge(weights, {name: one.detach() for name, one in added.items()}))
    torch.testing.assert_close(merged(ids).logits, attached, atol=1e-5, rtol=1e-4)


def test_packed_captions_have_the_losses_of_separate_ones() -> None:
    learner = Learner(tiny_model(), TOKENIZER, "tower")
    packed = draw_packed("train", 0, 0, TOKENIZER)
    assert packed.captions.max() == len(PROMPTS)
    with torch.no_grad():
        together, _, weights = learner.losses(packed)
        alone = [learner.losses(one_caption(packed, number)) for number in range(1, len(PROMPTS) + 1)]
    torch.testing.assert_close(together, torch.cat([losses for losses, _, _ in alone]), atol=0.1, rtol=0)
    assert torch.equal(weights, torch.cat([one for _, _, one in alone]))


def test_only_captions_are_learned() -> None:
    packed = draw_packed("train", 0, 1, TOKENIZER)
    for number in range(1, len(PROMPTS) + 1):
        text = TOKENIZER.decode(one_caption(packed, number).ids[one_caption(packed, number).weights > 0])
        assert "Describe" not in text
        assert text.endswith(TOKENIZER.eos_token)
    assert packed.positions.max() < len(packed.ids)
    starts = [packed.positions[packed.captions == number][0].item() for number in range(1, len(PROMPTS) + 1)]
    assert starts == [int((packed.captions == 0).sum())] * len(PROMPTS)


@pytest.mark.slow
@pytest.mark.parametrize("columns", ["words", "tower"])
def test_training_resumes_bit_for_bit(columns: str, tmp_path: Path) -> None:
    learners = {name: Learner(tiny_model(), TOKENIZER, columns) for name in ("whole", "first", "second")}
    train(learners["whole"], tmp_path / "whole", 4, 2, 0, 600.0)
    train(learners["first"], tmp_path / "parts", 2, 0, 0, 600.0)
    learners["second"].load(tmp_path / "parts" / "checkpoint.safetensors")
    assert learners["second"].step == 2
    train(learners["second"], tmp_path / "parts", 4, 2, 0, 600.0)
    whole, resumed = (learners[name].parameters for name in ("whole", "second"))
    assert all(torch.equal(one, resumed[name]) for name, one in whole.items())
    untouched = Learner(tiny_model(), TOKENIZER, columns).parameters
    changed = {name.rsplit(".", 3)[-3] for name, one in whole.items() if not torch.equal(one, untouched[name])}
    assert {*LAYERS} <= changed
    assert any("projector" in name and not torch.equal(one, untouched[name]) for name, one in whole.items()) == (
        columns == "tower"
    )


def test_an_interrupted_tower_resumes_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tower, "SAVE_S", 0.0)
    heads = {"filled": 2, "word": 3}
    shape = CLIPVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1, image_size=32, patch_size=16
    )

    def train_until(stop: int, checkpoint: Path) -> dict[str, torch.Tensor]:
        def draw(step: int) -> tuple[torch.Tensor, torch.Tensor]:
            if step > stop:
                raise InterruptedError
            rng = torch.Generator().manual_seed(step)
            labels = torch.stack([torch.randint(0, size, (2, 4), generator=rng) for size in heads.values()])
            return torch.randn(2, 3, 32, 32, generator=rng), labels

        torch.manual_seed(0)
        model = CLIPVisionModel(shape)
        with contextlib.suppress(InterruptedError):
            tower.pretrain_tower(model, 32, 6, 0, heads, draw, 2, checkpoint=checkpoint)
        return {name: one.clone() for name, one in model.state_dict().items()}

    whole = train_until(6, tmp_path / "whole")
    interrupted = train_until(3, tmp_path / "parts")
    resumed = train_until(6, tmp_path / "parts")
    assert not all(torch.equal(one, interrupted[name]) for name, one in whole.items())
    assert all(torch.equal(one, resumed[name]) for name, one in whole.items())


def test_a_checkpoint_of_word_columns_keeps_the_fitted_projector(tmp_path: Path) -> None:
    learner = Learner(tiny_model(0), TOKENIZER, "words")
    train(learner, tmp_path, 1, 0, 0, 600.0)
    other = Learner(tiny_model(1), TOKENIZER, "tower")
    fitted = {name: one.detach().clone() for name, one in other.parameters.items()}
    other.load(tmp_path / "checkpoint.safetensors")
    for name, one in other.parameters.items():
        wanted = fitted[name] if "projector" in name else learner.parameters[name]
        assert torch.equal(one, wanted)


def test_words_have_the_embeddings_of_their_tokens() -> None:
    table = torch.arange(len(TOKENIZER))[:, None].float()
    found = [TOKENIZER.decode([int(row)]).strip() for row in word_embeddings(table, TOKENIZER)[:, 0]]
    whole = [(word, text) for word, text in zip(WORDS, found, strict=True) if word.startswith(text)]
    assert len(whole) == len(WORDS)


def test_applied_differences_are_those_that_were_packed(tmp_path: Path) -> None:
    model = tiny_model()
    before = {name: one.clone() for name, one in model.state_dict().items()}
    learner = Learner(tiny_model(), TOKENIZER, "tower")
    for one in learner.parameters.values():
        torch.nn.init.normal_(one, std=0.1)
    seen = {name: one + 1 for name, one in before.items() if ".vision_tower." in name}
    path = tmp_path / "differences.safetensors"
    low_rank.pack({**seen, **{name: one.detach() for name, one in learner.parameters.items()}}, path, {})
    differences.apply(model, differences.load_file(path))
    after = model.state_dict()
    for name, one in after.items():
        is_layer = any(f".{layer}.weight" in name and "language_model" in name for layer in LAYERS)
        assert torch.equal(one, before[name]) != (is_layer or ".vision_tower." in name or "projector" in name), name
    name = "model.language_model.layers.1.mlp.up_proj.weight"
    down, up = (learner.parameters[f"{name}.{part}"].detach().to(torch.bfloat16).float() for part in ("down", "up"))
    torch.testing.assert_close(after[name], before[name] + 2.0 * up @ down)


def test_differences_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="more than"):
        low_rank.pack({"big": torch.zeros(16_000_000)}, tmp_path / "big.safetensors", {})
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RuntimeError, match="missing"):
        differences.apply(tiny_model(), {})
    with pytest.raises(differences.NotBuilt, match="does not exist"):
        differences.ensure(tmp_path / "target", path=tmp_path / "none.safetensors")
    small = tmp_path / "small.safetensors"
    low_rank.pack({"a": torch.zeros(1)}, small, {"weights_sha256": WEIGHTS_SHA256})
    with pytest.raises(differences.NotBuilt, match="is not the converted SmolLM2"):
        differences.ensure(tmp_path / "target", tmp_path / "no_model", small)


def tiny_drafter(layers: tuple[int, ...], rank: int) -> tuple[LlavaForConditionalGeneration, dict[str, torch.Tensor]]:
    """Return a target, and the weights of a drafter with some of its layers, each changed by a matrix of a rank."""
    target = tiny_model()
    weights = target.state_dict()
    found = {name: one.clone() for name, one in weights.items() if not name.startswith(PREFIX)}
    for own, layer in enumerate(layers):
        prefix = f"{PREFIX}{layer}."
        for name, one in weights.items():
            if name.startswith(prefix):
                change = torch.randn(one.shape) * 0.1
                if one.dim() == 2:
                    change = torch.randn(one.shape[0], rank) @ torch.randn(rank, one.shape[1]) * 0.1
                found[f"{PREFIX}{own}.{name.removeprefix(prefix)}"] = one + change
    found["model.language_model.norm.weight"] += 0.5
    return target, found


@pytest.mark.parametrize(("rank", "is_exact"), [(4, True), (3, False)])
def test_a_packed_drafter_has_the_trained_weights_if_their_differences_have_its_rank(rank: int, is_exact: bool) -> None:
    target, trained = tiny_drafter((1, 0), 4)
    packed = drafters.subtract(target.state_dict(), trained, (1, 0), DECODER, rank)
    assert not any("vision_tower" in name or "embed" in name or "lm_head" in name for name in packed)
    built = tiny_model()
    weights = target.state_dict()
    moved = {f"{PREFIX}{own}.": f"{PREFIX}{layer}." for own, layer in enumerate((1, 0))}
    for own, layer in moved.items():
        source = {own + name.removeprefix(layer): one for name, one in weights.items() if name.startswith(layer)}
        built.load_state_dict(source, strict=False)
    low_rank.add(built, packed)
    gaps = [(one - trained[name]).abs().max() for name, one in built.state_dict().items()]
    assert (max(gaps) < 1e-4) == is_exact


def test_a_drafter_of_which_more_than_layers_was_trained_is_refused() -> None:
    target, trained = tiny_drafter((0,), 2)
    trained["model.language_model.embed_tokens.weight"] += 0.1
    with pytest.raises(ValueError, match="only layers can be packed"):
        drafters.subtract(target.state_dict(), trained, (0,), DECODER)


@pytest.mark.parametrize(
    "path", [*differences.DRAFTERS.values(), drafters.FILE, eagle.FILE], ids=lambda path: path.stem
)
def test_shipped_drafters_belong_to_their_targets(path: Path) -> None:
    notes = drafters.read_notes(path)
    is_text = path in (drafters.FILE, eagle.FILE)
    assert notes["target_sha256"] == (WEIGHTS_SHA256 if is_text else drafters.digest(differences.FILE))
    if path != eagle.FILE:
        assert (notes["layers"][0], notes["layers"][-1]) == (0, 29)
    assert path.stat().st_size < 10_000_000
    assert path.stat().st_mode & 0o044, "others cannot read it"


def test_a_drafter_of_another_target_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "drafter.safetensors"
    notes = {"layers": "[0]", "measured": "{}", "target_sha256": "one"}
    low_rank.pack({"a": torch.zeros(1)}, path, notes)
    with pytest.raises(drafters.OtherTarget, match="another target: train and pack"):
        drafters.ensure(tmp_path / "drafter", tmp_path / "no_target", path, "another")
    (tmp_path / "drafter").mkdir()
    record = {"differences_sha256": drafters.digest(path), "target_sha256": "one"}
    (tmp_path / "drafter" / "source.json").write_text(json.dumps(record))
    assert drafters.ensure(tmp_path / "drafter", tmp_path / "no_target", path, "one") is False
