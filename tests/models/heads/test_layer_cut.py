"""Layer-cut drafters: what they copy, the distillation loss, and the checkpoint that transformers reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from configs.training import LayerCutHead
from models.heads.training.layer_cut import LayerCutTask, cut_layers, save_model
from models.heads.training.teacher import TrainingSample, make_training_sample, teach_states
from models.heads.training.trainer import Pace, Trainer, count_right
from models.target import Target
from tests import toys


def samples(count: int = 5) -> tuple[Target, list[TrainingSample]]:
    """Texts of different lengths, some with a prompt of one token."""
    target = toys.target("llama")
    generator = torch.Generator().manual_seed(1)
    made = []
    for seed in range(count):
        prefix = target.encode(*toys.prompt("llama", seed))
        prefix = prefix.head(1) if seed == 2 else prefix
        result = torch.randint(4, toys.VOCAB_SIZE, (6 + 3 * (seed % 3),), generator=generator).tolist()
        made.append(make_training_sample(target, prefix, result))
    return target, made


def cut(target: Target, layers: tuple[int, ...] = (0,), frozen: bool = True) -> LayerCutTask:
    return cut_layers(target, layers, frozen)


@torch.no_grad()
def test_a_drafter_of_all_layers_is_the_target_and_one_of_fewer_is_not() -> None:
    target, made = samples()
    num_layers: int = target.decoder.config.num_hidden_layers  # type: ignore[union-attr, assignment]
    whole = cut(target, tuple(range(num_layers)))
    first, _, total = count_right(whole, target, made)
    assert first == total
    fewer, _, _ = count_right(cut(target), target, made)
    assert fewer < total


@torch.no_grad()
def test_the_loss_equals_a_loop_over_single_texts_and_positions() -> None:
    target, made = samples()
    task = cut(target)
    expected, count = 0.0, 0
    for sample in made:
        ids = sample.prefix.token_ids
        wanted = toys.oracle("llama")(input_ids=ids[None]).logits[0].float()
        mine = task.module(input_ids=ids[None]).logits[0].float()
        for place in range(1, len(ids)):
            if sample.wanted[place]:
                expected -= float((wanted[place - 1].softmax(-1) * mine[place - 1].log_softmax(-1)).sum())
                count += 1
    states = teach_states(target, made)
    assert sum(task.counts(sample.wanted)[0] for sample in made) == count
    assert float(task.sums(states, torch.zeros(()))[0]) == pytest.approx(expected, rel=1e-4)


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
    target, made = samples(1)
    task = cut(target, (1, 0))
    save_model(task.module, target.front_end.tokenizer, tmp_path, torch.float32)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = made[0].prefix.token_ids[None]
    torch.testing.assert_close(model(input_ids=ids).logits, task.module(input_ids=ids).logits)
    assert AutoTokenizer.from_pretrained(tmp_path).get_vocab() == target.front_end.tokenizer.get_vocab()


@pytest.mark.parametrize(
    ("given", "num_layers", "layers"),
    [
        (LayerCutHead(), 30, (0, 10, 19, 29)),
        (LayerCutHead(num_layers=1), 30, (0,)),
        (LayerCutHead(num_layers=2), 2, (0, 1)),
        (LayerCutHead(layers=(3, 1)), 4, (3, 1)),
    ],
)
def test_layers_are_spaced_or_named(given: LayerCutHead, num_layers: int, layers: tuple[int, ...]) -> None:
    assert given.indices(num_layers) == layers


@pytest.mark.parametrize("given", [LayerCutHead(num_layers=5), LayerCutHead(layers=(4,)), LayerCutHead(layers=())])
def test_layers_that_the_target_lacks_are_refused(given: LayerCutHead) -> None:
    with pytest.raises(ValueError, match=r"head\.(num_)?layers"):
        given.indices(4)
