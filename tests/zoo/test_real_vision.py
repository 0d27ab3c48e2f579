"""Tests the parts of the vision pair's training on tiny models: low-rank differences and packed captions."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, LlavaConfig, LlavaForConditionalGeneration

from zoo.pair import load_tokenizer
from zoo.real import drafters
from zoo.real.drafters import LAYERS
from zoo.real.model import WEIGHTS_SHA256, Refused
from zoo.real_vision import model as vision
from zoo.real_vision.model import NUM_VISUAL_TOKENS, vision_config
from zoo.real_vision.recipe import WORDS, Learner, Packed, attach, draw_packed, word_embeddings
from zoo.world.dense import PROMPTS

TOKENIZER = load_tokenizer("caption_target")
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
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ids = torch.randint(0, 200, (1, 12))
    before = model(ids).logits
    added = attach(model)
    assert len(added) == 2 * len(LAYERS) * 2
    assert torch.equal(model(ids).logits, before)
    for tensor in added.values():
        torch.nn.init.normal_(tensor, std=0.1)
    attached = model(ids).logits
    assert (attached - before).abs().max() > 0.01
    merged = LlamaForCausalLM(tiny_text()).eval()
    merged.load_state_dict(weights)
    drafters.add(merged, {name: tensor.detach() for name, tensor in added.items()})
    torch.testing.assert_close(merged(ids).logits, attached, atol=1e-5, rtol=1e-4)


def test_packed_captions_have_the_losses_of_separate_ones() -> None:
    learner = Learner(tiny_model(), TOKENIZER)
    packed = draw_packed(0, 0, TOKENIZER)
    assert packed.captions.max() == len(PROMPTS)
    with torch.no_grad():
        together, _, weights = learner.losses(packed, False)
        alone = [learner.losses(one_caption(packed, number), False) for number in range(1, len(PROMPTS) + 1)]
    torch.testing.assert_close(together, torch.cat([losses for losses, _, _ in alone]), atol=0.1, rtol=0)
    assert torch.equal(weights, torch.cat([loss for _, _, loss in alone]))


def test_only_captions_are_learned() -> None:
    packed = draw_packed(0, 1, TOKENIZER)
    for number in range(1, len(PROMPTS) + 1):
        text = TOKENIZER.decode(one_caption(packed, number).ids[one_caption(packed, number).weights > 0])
        assert "Describe" not in text
        assert text.endswith(TOKENIZER.eos_token)
    assert packed.positions.max() < len(packed.ids)
    starts = [packed.positions[packed.captions == number][0].item() for number in range(1, len(PROMPTS) + 1)]
    assert starts == [int((packed.captions == 0).sum())] * len(PROMPTS)


@pytest.mark.slow
def test_training_starts_with_words_continues_with_images_and_is_repeatable() -> None:
    learners = [Learner(tiny_model(), TOKENIZER) for _ in range(3)]
    for learner, word_steps in zip(learners, (1, 1, 2), strict=True):
        learner.train(word_steps, 2, 2, 0)
    first, again, words = ({**x.parameters, **dict(x.projector.named_parameters())} for x in learners)
    assert all(torch.equal(value, again[name]) for name, value in first.items())
    untouched = Learner(tiny_model(), TOKENIZER)
    trained = untouched.parameters.items()
    changed = {name.rsplit(".", 3)[-3] for name, value in trained if not torch.equal(value, words[name])}
    assert changed == {*LAYERS}
    before = dict(untouched.projector.named_parameters())
    assert all(torch.equal(value, words[name]) for name, value in before.items())
    assert not all(torch.equal(value, first[name]) for name, value in before.items())


def test_words_have_the_embeddings_of_their_tokens() -> None:
    table = torch.arange(len(TOKENIZER))[:, None].float()
    words = [TOKENIZER.decode([int(row)]).strip() for row in word_embeddings(table, TOKENIZER)[:, 0]]
    whole = [(word, text) for word, text in zip(WORDS, words, strict=True) if word.startswith(text)]
    assert len(whole) == len(WORDS)


def test_applied_differences_are_those_that_were_packed(tmp_path: Path) -> None:
    model = tiny_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    learner = Learner(tiny_model(), TOKENIZER)
    projector = {
        f"model.multi_modal_projector.{name}": parameter for name, parameter in learner.projector.named_parameters()
    }
    trained = {**learner.parameters, **projector}
    for tensor in trained.values():
        torch.nn.init.normal_(tensor, std=0.1)
    seen = {name: tensor + 1 for name, tensor in before.items() if ".vision_tower." in name}
    path = tmp_path / "differences.safetensors"
    drafters.pack({**seen, **{name: tensor.detach() for name, tensor in trained.items()}}, path, {})
    vision.apply(model, load_file(path))
    after = model.state_dict()
    for name, tensor in after.items():
        is_layer = any(f".{layer}.weight" in name and "language_model" in name for layer in LAYERS)
        assert torch.equal(tensor, before[name]) != (is_layer or ".vision_tower." in name or "projector" in name), name
    name = "model.language_model.layers.1.mlp.up_proj.weight"
    down, up = (trained[f"{name}.{part}"].detach().to(torch.bfloat16).float() for part in ("down", "up"))
    torch.testing.assert_close(after[name], before[name] + 2.0 * up @ down)


def test_differences_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="more than"):
        drafters.pack({"big": torch.zeros(16_000_000)}, tmp_path / "big.safetensors", {})
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RuntimeError, match="missing"):
        vision.apply(tiny_model(), {})
    small = tmp_path / "small.safetensors"
    drafters.pack({"a": torch.zeros(1)}, small, {"weights_sha256": WEIGHTS_SHA256})
    with pytest.raises(Refused, match="is not the converted SmolLM2"):
        vision.ensure(tmp_path / "target", tmp_path / "no_model", small)


def tiny_drafter(layers: tuple[int, ...], rank: int) -> tuple[LlavaForConditionalGeneration, dict[str, torch.Tensor]]:
    """Return a target, and the weights of a drafter with some of its layers, each changed by a matrix of a rank."""
    target = tiny_model()
    weights = target.state_dict()
    tensors = {name: tensor.clone() for name, tensor in weights.items() if not name.startswith(PREFIX)}
    for own, layer in enumerate(layers):
        prefix = f"{PREFIX}{layer}."
        for name, weight in weights.items():
            if name.startswith(prefix):
                change = torch.randn(weight.shape) * 0.1
                if weight.dim() == 2:
                    change = torch.randn(weight.shape[0], rank) @ torch.randn(rank, weight.shape[1]) * 0.1
                tensors[f"{PREFIX}{own}.{name.removeprefix(prefix)}"] = weight + change
    tensors["model.language_model.norm.weight"] += 0.5
    return target, tensors


@pytest.mark.parametrize(("rank", "is_exact"), [(4, True), (3, False)])
def test_a_packed_drafter_has_the_trained_weights_if_their_differences_have_its_rank(rank: int, is_exact: bool) -> None:
    target, trained = tiny_drafter((1, 0), 4)
    packed = drafters.subtract(target.state_dict(), trained, (1, 0), DECODER, rank)
    assert not any("vision_tower" in name or "embed" in name or "lm_head" in name for name in packed)
    built = tiny_model()
    weights = target.state_dict()
    moved = {f"{PREFIX}{own}.": f"{PREFIX}{layer}." for own, layer in enumerate((1, 0))}
    for own, layer in moved.items():
        source = {own + name.removeprefix(layer): tensor for name, tensor in weights.items() if name.startswith(layer)}
        built.load_state_dict(source, strict=False)
    drafters.add(built, packed)
    gaps = [(tensor - trained[name]).abs().max() for name, tensor in built.state_dict().items()]
    assert (max(gaps) < 1e-4) == is_exact


def test_a_drafter_of_which_more_than_layers_was_trained_is_refused() -> None:
    target, trained = tiny_drafter((0,), 2)
    trained["model.language_model.embed_tokens.weight"] += 0.1
    with pytest.raises(ValueError, match="only layers can be packed"):
        drafters.subtract(target.state_dict(), trained, (0,), DECODER)


@pytest.mark.parametrize(
    "path", [drafters.STRONG, drafters.WEAK, drafters.TEXT_DRAFTER, drafters.EAGLE], ids=lambda path: path.stem
)
def test_shipped_drafters_belong_to_their_targets(path: Path) -> None:
    notes = drafters.read_notes(path)
    is_text = path in (drafters.TEXT_DRAFTER, drafters.EAGLE)
    assert notes["target_sha256"] == (WEIGHTS_SHA256 if is_text else drafters.digest(drafters.VISION_TARGET))
    if path != drafters.EAGLE:
        assert (notes["layers"][0], notes["layers"][-1]) == (0, 29)
    assert path.stat().st_size < 10_000_000
    assert path.stat().st_mode & 0o044, "others cannot read it"


def test_a_drafter_of_another_target_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "drafter.safetensors"
    notes = {"layers": "[0]", "measured": "{}", "target_sha256": "one"}
    drafters.pack({"a": torch.zeros(1)}, path, notes)
    with pytest.raises(Refused, match="another target: train and pack"):
        drafters.ensure(tmp_path / "drafter", tmp_path / "no_target", path, "another")
    (tmp_path / "drafter").mkdir()
    record = {"differences_sha256": drafters.digest(path), "target_sha256": "one"}
    (tmp_path / "drafter" / "source.json").write_text(json.dumps(record))
    assert drafters.ensure(tmp_path / "drafter", tmp_path / "no_target", path, "one") is False
