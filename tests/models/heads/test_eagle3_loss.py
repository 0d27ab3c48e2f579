"""Training of EAGLE-3 heads: draft steps read what decoding reads, and the loss equals a loop over single positions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from models.heads.eagle3 import Eagle3Network
from models.heads.training.eagle3_loss import STEP_DECAY, Eagle3Task, default_feature_layers, fresh_eagle3
from models.heads.training.teacher import States, TrainingSample, make_training_sample
from models.heads.training.trainer import Pace, Trainer, count_right
from models.target import Target
from tests import toys
from tests.toys import images as image_toys
from tests.toys.training import teach_states, training_samples
from tests.toys.weights import randomise

NUM_STEPS = 3
IDS = [token for token in range(toys.VOCAB_SIZE) if token % 3]


def fresh(target: Target, has_axes: bool = False) -> Eagle3Task:
    network = fresh_eagle3(target, 3, NUM_STEPS, IDS, (0, 1)).network
    if has_axes:
        half = network.config.head_dim // 2
        ids, network = network.token_ids, Eagle3Network(replace(network.shape, mrope_sections=(half - 2, 1, 1)))
        network.token_ids = ids
    # The default weights are too small to distinguish positions.
    randomise(network, 3)
    return Eagle3Task(network, target.head, target.vocab_size, NUM_STEPS)


def slow_outputs(task: Eagle3Task, target: Target, sample: TrainingSample, last: int) -> list[Tensor]:
    """The outputs of all draft steps at position `last`, whose drafts are the sample's own tokens, one at a time."""
    network, prefix = task.network, sample.prefix
    network.set_attn_implementation("sdpa")
    features = teach_states(target, [sample], task.feature_layers).features[0]

    def embed(index: int) -> Tensor:
        if prefix.visual[index]:
            return prefix.embeds[index].float()
        return network.embed_tokens(prefix.token_ids[index])

    pairs = [network.fuse(embed(t + 1), network.project(features[t])) for t in range(last + 1)]
    outputs: list[Tensor] = []
    positions = prefix.positions[..., : last + 1] if network.takes_axes else torch.arange(last + 1)
    for step in range(NUM_STEPS):
        if step:
            pairs.append(network.fuse(embed(last + 1 + step), outputs[-1]))
            positions = torch.cat([positions, positions[..., -1:] + 1], dim=-1)
        states = network(torch.stack(pairs)[None], positions[..., None, :]).last_hidden_state[0]
        outputs.append(states[-1])
    return outputs


@torch.no_grad()
@pytest.mark.parametrize(("family", "has_axes"), [("llava", False), ("qwen2_5_vl", False), ("qwen2_5_vl", True)])
def test_the_inputs_of_draft_steps_in_training_equal_those_in_decoding(family: str, has_axes: bool) -> None:
    target, made = training_samples(family, 4)
    task = fresh(target, has_axes)
    states = teach_states(target, made, task.feature_layers)
    unrolled = list(task._unroll(states, states.features))
    assert len(unrolled) == NUM_STEPS
    for row, sample in enumerate(made):
        for last in range(0, sample.prefix.length - 1 - NUM_STEPS, 3):
            for step, expected in enumerate(slow_outputs(task, target, sample, last)):
                torch.testing.assert_close(unrolled[step][row, last], expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_the_loss_equals_a_loop_over_single_positions() -> None:
    target, made = training_samples("llava", 4)
    task = fresh(target)
    states = teach_states(target, made, task.feature_layers)
    expected = [0.0] * NUM_STEPS
    num_left_out = 0
    for sample in made:
        hidden = teach_states(target, [sample]).hidden[0]
        for last in range(sample.prefix.length - 2):
            outputs = None
            for step in range(NUM_STEPS):
                position = last + 2 + step
                if position >= sample.prefix.length or not sample.wanted[position]:
                    continue
                wanted = target.head(hidden[position - 1])
                if int(wanted.argmax()) not in IDS:
                    num_left_out += 1
                    continue
                outputs = outputs or slow_outputs(task, target, padded(sample, last), last)
                mine = task.network.output_layer(target.vocab_size)(outputs[step])[IDS].log_softmax(-1)
                expected[step] -= STEP_DECAY**step * float((wanted[IDS].softmax(-1) * mine).sum())
    assert num_left_out
    sums = task.sums(states, torch.zeros_like(states.features))
    torch.testing.assert_close(sums, torch.tensor(expected), rtol=1e-4, atol=1e-3)
    counts = [sum(int(sample.wanted[2 + step :].sum()) for sample in made) for step in range(NUM_STEPS)]
    assert [sum(column) for column in zip(*(task.counts(sample.wanted) for sample in made), strict=True)] == counts


def padded(sample: TrainingSample, last: int) -> TrainingSample:
    """The sample with tokens behind its end, which later draft steps read but no loss does."""
    missing = max(0, last + 1 + NUM_STEPS - sample.prefix.length)
    if not missing:
        return sample
    prefix, more = sample.prefix, torch.zeros(missing, dtype=torch.long)
    ids = torch.cat([prefix.token_ids, more])
    embeds = torch.cat([prefix.embeds, prefix.embeds[:1].expand(missing, -1)])
    positions = torch.arange(len(ids))
    return replace(
        sample,
        prefix=replace(
            prefix, token_ids=ids, embeds=embeds, positions=positions, visual=torch.cat([prefix.visual, more > 0])
        ),
    )


def test_a_head_learns_and_its_embedding_stays() -> None:
    target, made = training_samples("llava", 6)
    task = fresh_eagle3(target, 0, 2, feature_layers=(0, 1))
    embedding = task.network.embed_tokens.weight.clone()
    trainer = Trainer(target, task, Pace(30, 5e-3, clip="norm", clip_limit=1.0, feature_noise=0.1))
    before, *_ = count_right(task, target, made)
    losses = [trainer.learn(list(enumerate(made))) for _ in range(30)]
    assert losses[0] is not None
    assert losses[-1] is not None
    assert losses[-1] < losses[0]
    assert torch.equal(task.network.embed_tokens.weight, embedding)
    first, three, total = count_right(task, target, made)
    assert before + total / 4 < first <= three <= total


def test_a_sample_may_be_shorter_than_the_draft_steps() -> None:
    target, made = training_samples("llama", 1)
    short = make_training_sample(target, made[0].prefix.head(1), [5, 6])
    task = fresh_eagle3(target, 0, 8, feature_layers=(0, 1))
    loss = Trainer(target, task, Pace(2, 1e-3)).learn([(0, short)])
    assert loss is not None
    assert loss > 0
    assert task.counts(short.wanted) == [1, 0, 0, 0, 0, 0, 0, 0]


def test_new_heads_have_the_sizes_of_their_target() -> None:
    target = toys.target("llama")
    first, other = fresh_eagle3(target, 0), fresh_eagle3(target, 1)
    assert not torch.equal(first.network.fc.weight, other.network.fc.weight)
    again = fresh_eagle3(target, 0)
    assert all(map(torch.equal, first.network.state_dict().values(), again.network.state_dict().values()))
    assert first.network.shape.draft_vocab_size == target.vocab_size
    assert torch.equal(first.network.lm_head.weight, target.head.weight)
    few = fresh_eagle3(target, 0, token_ids=[9, 3, 5])
    assert few.network.token_ids.tolist() == [3, 5, 9]
    states: States = teach_states(target, training_samples("llama", 1)[1], few.feature_layers)
    assert int(torch.isfinite(few.logits(states)).sum(-1).max()) == 3


@pytest.mark.parametrize(
    ("num_layers", "layers"),
    [(28, (2, 14, 25)), (8, (2, 4, 5)), (7, (2, 3, 4)), (4, (1, 2, 3)), (3, (0, 1, 2)), (2, (0, 1)), (1, (0,))],
)
def test_default_layers_exist_and_ascend(num_layers: int, layers: tuple[int, ...]) -> None:
    assert default_feature_layers(num_layers) == layers
    assert all(0 <= layer < max(1, num_layers) for layer in layers)


def test_an_image_head_reads_at_the_grids_positions() -> None:
    from models.llamagen.eagle import pair_rotary

    target = image_toys.target("text")
    shape = target.gpt.shape
    rotary = pair_rotary(shape, shape.head_dim)
    task = fresh_eagle3(target, 0, 2, feature_layers=(0, 1), rotary=rotary)
    lanes = target.encode_lanes("", (), image_toys.condition("text", 1))
    made = [make_training_sample(target, lane, range(16), 1) for lane in lanes]
    states = teach_states(target, made, task.feature_layers)
    assert task.logits(states).shape == (2, lanes[0].length + 14, target.vocab_size)
    assert task.network.rotary is rotary
