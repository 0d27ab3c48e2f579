"""Losses in chunks: sums and gradients equal those of autograd over all positions at once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.heads.training import chunks
from models.heads.training.chunks import sum_in_chunks
from models.heads.training.losses import fresh_eagle
from models.heads.training.teacher import make_training_sample
from models.heads.training.trainer import Pace, Trainer
from tests import toys

VOCAB = 11


@pytest.mark.parametrize("count", [0, 1, 7, 8])
@pytest.mark.parametrize("size", [1, 3, 8])
def test_losses_and_gradients_of_chunks_sum_to_those_of_the_batch(
    count: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "MAX_LOGITS", size * VOCAB)
    generator = torch.Generator().manual_seed(count)
    states, other_states = (torch.randn(count, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    weight, frozen = (torch.randn(VOCAB, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    true = torch.randint(0, VOCAB, (count,), generator=generator)
    scale = torch.tensor([0.3, 2.0], dtype=torch.float64)
    seen = []

    def terms(hidden: Tensor, other: Tensor, true: Tensor) -> Tensor:
        seen.append(len(true))
        first = F.cross_entropy(hidden @ weight.T + hidden @ frozen.T, true, reduction="sum")
        return torch.stack([first, F.cross_entropy(other @ weight.T, true, reduction="sum")])

    leaves = [states.requires_grad_(), other_states.requires_grad_(), weight.requires_grad_()]
    whole = terms(states, other_states, true)
    expected = torch.autograd.grad((whole * scale).sum(), leaves)
    seen.clear()
    parts = sum_in_chunks(terms, [states, other_states], [true], [weight, frozen], VOCAB)
    assert max(seen) <= size
    assert sum(seen) == count
    torch.testing.assert_close(parts, whole)
    torch.testing.assert_close(torch.autograd.grad((parts * scale).sum(), leaves), expected)
    with torch.no_grad():
        torch.testing.assert_close(
            sum_in_chunks(terms, [states, other_states], [true], [weight], VOCAB), whole.detach()
        )


def test_heads_with_bf16_gemms_learn_in_fp32_weights_and_stay_near_those_in_fp32() -> None:
    target = toys.target("llama")
    made = []
    for seed in range(4):
        prefix = target.encode(*toys.prompt("llama", seed))
        made.append(make_training_sample(target, prefix, range(5 + seed, 15 + seed)))
    losses = {}
    for dtype in (torch.float32, torch.bfloat16):
        trainer = Trainer(target, fresh_eagle(target, 0), Pace(20, 3e-3, feature_noise=0.0), dtype=dtype)
        losses[dtype] = [trainer.learn(list(enumerate(made))) or 0.0 for _ in range(20)]
        assert all(value.dtype == torch.float32 for value in trainer.weights().values())
    assert losses[torch.bfloat16] != losses[torch.float32], "bf16 changes rounding"
    assert losses[torch.bfloat16] == pytest.approx(losses[torch.float32], rel=0.05)
    assert losses[torch.bfloat16][-1] < 0.9 * losses[torch.bfloat16][0]


def test_forwards_are_bounded_in_rows_and_padded_tokens() -> None:
    target = toys.target("llama")
    prefix = target.encode(*toys.prompt("llama", 0)).head(1)
    made = [make_training_sample(target, prefix, range(4, 4 + length)) for length in (30, 3, 9, 9, 4, 3)]
    trainer = Trainer(target, fresh_eagle(target, 0), Pace(2, 1e-3), max_rows=3, max_tokens=20)
    groups = [[number for number, _ in group] for group in trainer._groups(list(enumerate(made)))]
    assert groups == [[1, 5, 4], [2, 3], [0]], "the longest row alone exceeds the bound"
