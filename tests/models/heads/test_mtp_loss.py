"""Training of MTP layers: the unrolled layer equals that of decoding, and only the layer learns."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from models.heads.mtp import mtp_network
from models.heads.training.mtp_loss import MtpTask, fresh_mtp
from models.heads.training.teacher import States, make_training_sample, teach_rows
from models.heads.training.trainer import Pace, Trainer, count_right
from models.loading.checkpoints import CheckpointError
from tests import toys
from tests.conformance import checks, heads, mtp


@pytest.fixture(autouse=True)
def families() -> Iterator[None]:
    with mtp.mixtures():
        yield


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("family", [*mtp.MIXTURES, "qwen2_5_vl", "llama"])
def test_steps_of_training_equal_drafts_of_decoding(family: str) -> None:
    """Step k at a token equals the slow layer that was fed k true tokens as drafts."""
    target = toys.target(family)
    task = MtpTask(mtp.network(family), target.head, 3)
    request = checks.requests(family, 9)[4]
    prompt = target.encode(request.prompt, request.images, request.videos)
    answer = list(checks.generated(family, request, frozenset()))[:8]
    states = States.of(teach_rows(target, [make_training_sample(target, prompt, answer)]), torch.device("cpu"))
    outputs = [task._logits(each)[0] for each in task._unroll(states, states.features)]
    layer, true = mtp.slow_layer(family), heads.true_states(family, request, answer)
    for number in (1, 3):
        for step in range(3):
            tokens, path = answer[:number], answer[number : number + step]
            expected = mtp.slow_logits(layer, family, prompt, true[: prompt.length + number - 1], tokens, path)
            mine = outputs[step][prompt.length - 2 + number]
            torch.testing.assert_close(mine, expected, atol=2e-3, rtol=1e-3)


def test_a_new_layer_begins_with_parts_of_the_target() -> None:
    target = toys.target("llama")
    network = fresh_mtp(target, 0).network
    last = target.decoder.layers[-1].state_dict()  # type: ignore[index, union-attr]
    assert all(torch.equal(value, last[name]) for name, value in network.mtp_block.state_dict().items())
    identity = torch.eye(32)
    assert torch.equal(network.eh_proj.weight, torch.cat([identity, identity], dim=1))
    first, again, other = (fresh_mtp(toys.target("deepseek_v3"), seed).network for seed in (0, 0, 1))
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in first.state_dict().items())
    assert first.state_dict().keys() == other.state_dict().keys()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_vl"])
def test_only_the_layer_learns(family: str) -> None:
    target = toys.target(family)
    task = fresh_mtp(target, 0, 2)
    before = {name: value.clone() for name, value in target.model.state_dict().items()}
    start = {name: value.clone() for name, value in task.network.state_dict().items()}
    samples = []
    for request in checks.requests(family, 4):
        prompt = target.encode(request.prompt, request.images, request.videos)
        samples.append(make_training_sample(target, prompt, checks.generated(family, request, target.eos_ids)))
    first = count_right(task, target, samples)
    trainer = Trainer(target, task, Pace(60, 1e-2, schedule="cosine", noise_tokens=None))
    losses = [trainer.learn(list(enumerate(samples))) for _ in range(60)]
    assert losses[0] is not None
    assert losses[-1] is not None
    assert losses[-1] < 0.9 * losses[0]
    assert count_right(task, target, samples)[0] > first[0]
    assert all(torch.equal(value, before[name]) for name, value in target.model.state_dict().items())
    assert not torch.equal(task.network.eh_proj.weight, start["eh_proj.weight"])
    assert not any("embed" in name or "head" in name for name in start)


def test_decoders_without_a_final_norm_are_refused() -> None:
    target = toys.target("llama")
    del target.decoder.norm
    with pytest.raises(CheckpointError, match=r"its decoder has no MTP layers: it lacks rotary_emb, or norm"):
        mtp_network(target.decoder, "some/model")
