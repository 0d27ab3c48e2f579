"""Training of heads: which token is learned from which state, and that training leaves the target alone."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from models.head_training import eagle_loss, medusa_loss, teacher_states, train_eagle, train_medusa
from tests import toys
from zoo.samples import Batch


def batches(length: int = 12) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(0)
    while True:
        ids = torch.randint(4, toys.VOCAB_SIZE, (8, length), generator=generator)
        weights = (torch.arange(length) >= 4).float().expand(ids.shape)
        yield Batch(ids, weights, torch.ones_like(ids), None)


class Passing:
    """A head that says: the feature of a token is its embedding."""

    def fuse(self, embeds: Tensor, features: Tensor) -> Tensor:
        return embeds

    def __call__(self, inputs: Tensor, positions: Tensor) -> Any:
        return SimpleNamespace(last_hidden_state=inputs)


def test_a_pair_learns_the_feature_of_its_token_and_not_of_the_one_before() -> None:
    hidden = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))
    head = torch.nn.Linear(8, 5, bias=False)
    wanted = torch.ones(2, 6, dtype=torch.bool)

    def loss(embeds: Tensor) -> float:
        return eagle_loss(Passing(), head, embeds, hidden, wanted).item()  # type: ignore[arg-type]

    said = head(hidden[:, 1:-1]).softmax(-1)
    entropy = float(-(said * said.log()).sum(-1).mean().detach())
    assert loss(hidden) == pytest.approx(0.1 * entropy, abs=1e-6)
    assert loss(hidden.roll(1, 1)) > 0.1 * entropy + 0.1


def test_head_i_learns_the_token_two_and_i_places_on() -> None:
    ids = torch.arange(9)[None]
    hidden = torch.arange(9.0)[None, :, None]

    def logits(head: int, states: Tensor) -> Tensor:
        place = states[..., 0].long() + 2 + head
        return 50.0 * torch.nn.functional.one_hot(place, 20).float()

    right: Any = SimpleNamespace(shape=SimpleNamespace(num_heads=3), logits=logits)
    wanted = torch.ones_like(ids, dtype=torch.bool)
    assert float(medusa_loss(right, hidden, ids, wanted)) == pytest.approx(0.0, abs=1e-6)
    early: Any = SimpleNamespace(shape=right.shape, logits=lambda head, states: logits(head, states - 1))
    assert float(medusa_loss(early, hidden, ids, wanted)) == pytest.approx(150.0, rel=1e-3)


def test_states_are_those_of_the_target_with_its_image_features() -> None:
    model: Any = toys.oracle("llava")
    prompt, images = "<s> w7 <image> w9", (toys.picture(3),)
    inputs = toys.front_end("llava").encode(prompt, images)
    ids = inputs["input_ids"]
    batch = Batch(ids, torch.ones(ids.shape), inputs["attention_mask"], inputs["pixel_values"])
    embeds, hidden = teacher_states(model, batch)
    prefix = toys.target("llava").encode(prompt, images)
    torch.testing.assert_close(embeds[0], prefix.embeds)
    with torch.no_grad():
        torch.testing.assert_close(model.lm_head(hidden), model(**inputs).logits)


@pytest.mark.parametrize("train", [train_eagle, train_medusa])
def test_training_learns_repeats_itself_and_leaves_the_target_as_it_was(train: Any) -> None:
    model = toys.oracle("llama")
    before = [parameter.clone() for parameter in model.parameters()]
    lines: list[str] = []
    one = train(model, batches(), 200, 3, lr=3e-3, report=lines.append)
    assert [line.split(" loss ")[0] for line in lines] == ["step 100/200", "step 200/200"]
    first, last = (float(line.split()[-1]) for line in lines)
    assert last < first
    assert all(map(torch.equal, before, model.parameters()))
    assert all(parameter.requires_grad for parameter in model.parameters())
    short = [train(model, batches(), 5, 3, report=lines.append).state_dict() for _ in range(2)]
    assert all(torch.equal(short[0][name], short[1][name]) for name in short[0])
    if train is train_eagle:
        assert torch.equal(one.embed_tokens.weight, model.get_input_embeddings().weight)
