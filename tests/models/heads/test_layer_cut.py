"""Layer-cut drafters: what they copy, the distillation loss, and the checkpoint that transformers reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from configs.training import LayerCutHeadConfig
from models.heads.training.layer_cut import LayerCutTask, cut_layers, save_model
from models.heads.training.teacher import TrainingSample, make_training_sample
from models.heads.training.trainer import Pace, Trainer, count_right
from models.loading.checkpoints import CheckpointRef, read_config, read_processor
from models.target import Target
from tests import toys
from tests.toys.training import teach_states

FAMILIES = ("llama", "llava", "llava_onevision", "qwen2_5_vl")


def samples(family: str = "llama", count: int = 5) -> tuple[Target, list[TrainingSample]]:
    """Texts of different lengths, some with a prompt of one token or, for families that read them, 1 or 2 images."""
    target = toys.target(family)
    generator = torch.Generator().manual_seed(1)
    made = []
    for seed in range(count):
        prefix = target.encode(*toys.prompt(family, seed))
        if (family, seed) == ("llama", 2):
            prefix = prefix.head(1)
        result = torch.randint(4, toys.VOCAB_SIZE, (6 + 3 * (seed % 3),), generator=generator).tolist()
        made.append(make_training_sample(target, prefix, result))
    return target, made


def whole_logits(model: Any, family: str, seed: int, sample: TrainingSample) -> Tensor:
    """Return logits (L, V) of a transformers model that encodes the sample's prompt with its images itself."""
    ids = sample.prefix.token_ids[None]
    if not toys.FAMILIES[family].takes_images:
        return model(input_ids=ids).logits[0].float()  # type: ignore[no-any-return]
    inputs = toys.target(family).process(*toys.prompt(family, seed))
    more = ids.shape[1] - inputs["input_ids"].shape[1]
    inputs |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if (types := inputs.get("mm_token_type_ids")) is not None:
        inputs["mm_token_type_ids"] = torch.nn.functional.pad(types, (0, more))
    return model(**inputs).logits[0].float()  # type: ignore[no-any-return]


def cut(target: Target, layers: tuple[int, ...] = (0,), frozen: bool = True) -> LayerCutTask:
    return cut_layers(target, layers, frozen)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_a_drafter_of_all_layers_is_the_target_and_one_of_fewer_is_not(family: str) -> None:
    target, made = samples(family)
    num_layers: int = target.decoder.config.num_hidden_layers  # type: ignore[union-attr, assignment]
    whole = cut(target, tuple(range(num_layers)))
    first, _, total = count_right(whole, target, made)
    assert first == total
    fewer, _, _ = count_right(cut(target), target, made)
    assert fewer < total


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_equals_a_loop_over_single_texts_and_positions(family: str) -> None:
    """Both models encode the images themselves in the loop, each at its own rotary positions."""
    target, made = samples(family)
    task = cut(target)
    expected, count = 0.0, 0
    for seed, sample in enumerate(made):
        wanted = whole_logits(toys.oracle(family), family, seed, sample)
        mine = whole_logits(task.module, family, seed, sample)
        for position in range(1, sample.length):
            if sample.wanted[position]:
                expected -= float((wanted[position - 1].softmax(-1) * mine[position - 1].log_softmax(-1)).sum())
                count += 1
    states = teach_states(target, made)
    assert sum(task.counts(sample.wanted)[0] for sample in made) == count
    assert float(task.sums(states, torch.zeros(()))[0]) == pytest.approx(expected, rel=1e-4)


def test_visual_parts_are_those_of_the_target_and_are_not_trained() -> None:
    target, _ = samples("llava")
    task = cut(target, frozen=False)
    learned = {name for name, value in task.module.named_parameters() if value.requires_grad}
    given, weights = target.model.state_dict(), task.module.state_dict()
    visual = {name for name in weights if "vision_tower" in name or "projector" in name}
    assert visual
    assert not learned & visual
    assert all(torch.equal(weights[name], given[name]) for name in visual)
    assert {name for name in learned if "embed_tokens" in name}


@pytest.mark.parametrize("frozen", [True, False])
def test_distillation_learns_and_frozen_embeddings_and_the_target_stay(frozen: bool) -> None:
    target, made = samples()
    before = {name: value.clone() for name, value in target.model.state_dict().items()}
    task = cut(target, frozen=frozen)
    embedding = task.decoder.get_input_embeddings().weight.clone()  # type: ignore[operator]
    right, *_ = count_right(task, target, made)
    trainer = Trainer(target, task, Pace(40, 5e-3, clip="norm", clip_limit=1.0))
    losses = [trainer.learn(list(enumerate(made))) or 0.0 for _ in range(40)]
    assert losses[-1] < losses[0]
    assert count_right(task, target, made)[0] > right
    assert torch.equal(task.decoder.get_input_embeddings().weight, embedding) == frozen  # type: ignore[operator]
    assert all(torch.equal(before[name], value) for name, value in target.model.state_dict().items())


@torch.no_grad()
def test_transformers_reads_the_checkpoint(tmp_path: Path) -> None:
    target, made = samples(count=1)
    task = cut(target, (1, 0))
    save_model(task.module, target.front_end.processor, tmp_path, torch.float32)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = made[0].prefix.token_ids[None]
    torch.testing.assert_close(model(input_ids=ids).logits, task.module(input_ids=ids).logits)
    assert AutoTokenizer.from_pretrained(tmp_path).get_vocab() == target.front_end.tokenizer.get_vocab()


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES[1:])
def test_transformers_reads_the_checkpoint_of_a_vision_model(family: str, tmp_path: Path) -> None:
    target, made = samples(family, 1)
    task = cut(target, (1, 0))
    save_model(task.module, target.front_end.processor, tmp_path, torch.float32)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path).eval()
    expected = whole_logits(task.module, family, 0, made[0])
    torch.testing.assert_close(whole_logits(model, family, 0, made[0]), expected)
    ref = CheckpointRef(str(tmp_path))
    assert type(read_processor(ref, read_config(ref))) is type(target.front_end.processor)


@pytest.mark.parametrize(
    ("given", "num_layers", "layers"),
    [
        (LayerCutHeadConfig(), 30, (0, 10, 19, 29)),
        (LayerCutHeadConfig(num_layers=1), 30, (0,)),
        (LayerCutHeadConfig(num_layers=2), 2, (0, 1)),
        (LayerCutHeadConfig(layers=(3, 1)), 4, (3, 1)),
    ],
)
def test_layers_are_spaced_or_named(given: LayerCutHeadConfig, num_layers: int, layers: tuple[int, ...]) -> None:
    assert given.indices(num_layers) == layers


@pytest.mark.parametrize(
    "given", [LayerCutHeadConfig(num_layers=5), LayerCutHeadConfig(layers=(4,)), LayerCutHeadConfig(layers=())]
)
def test_layers_that_the_target_lacks_are_refused(given: LayerCutHeadConfig) -> None:
    with pytest.raises(ValueError, match=r"head\.(num_)?layers"):
        given.indices(4)
