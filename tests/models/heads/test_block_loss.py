"""Training of block drafters: blocks read what decoding reads, and the loss equals a loop over single positions."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from models.backends.attention import DecoderRunner
from models.heads.formats import BLOCK
from models.heads.loader import load_head
from models.heads.training.block_loss import MAX_ANCHORS, BlockTask, anchors_of, fresh_block
from models.heads.training.teacher import TrainingSample, make_training_sample
from models.heads.training.trainer import Pace, Trainer, count_right
from models.heads.writer import save_block
from models.inputs.prefix import Prefix
from models.kv.lanes import LaneModel, SlotBatch
from models.loading.checkpoints import CheckpointRef
from models.target import Target
from tests.toys.training import teach_states, training_samples
from tests.toys.weights import randomise

MASK, SIZE = 3, 4
SLOTS = SlotBatch(torch.zeros(1, dtype=torch.long), (0,), (1,))


def fresh(target: Target) -> BlockTask:
    task = fresh_block(target, 3, MASK, SIZE, 2, (0, 1))
    # The default weights are too small to distinguish positions.
    randomise(task.network, 3)
    return task


def decoded(task: BlockTask, target: Target, sample: TrainingSample, anchor: int) -> Tensor:
    """The outputs (S, D) of the block at `anchor` as decoding computes them, over a KV cache of the features before."""
    network, ids = task.network, sample.prefix.token_ids
    features = teach_states(target, [sample], task.feature_layers).features[0]
    lanes = LaneModel(network.context, task.head, 1, 1, len(ids) + SIZE)
    positions = torch.arange(anchor)
    lanes.admit(SLOTS, [[Prefix(ids[:anchor], network.project(features[:anchor]), positions, positions < 0)]])
    block = torch.cat([ids[anchor : anchor + 1], torch.full((SIZE - 1,), MASK)])
    everything, depth = torch.ones(1, SIZE, SIZE, dtype=torch.bool), torch.arange(SIZE)[None]
    embeds = task.embedding(block)[None].float()
    return lanes.forward_embeds(SLOTS, embeds, depth, everything, 0, DecoderRunner(network))[0, 0]


@torch.no_grad()
@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_the_inputs_of_blocks_in_training_equal_those_in_decoding(family: str) -> None:
    target, made = training_samples(family, 4)
    task = fresh(target)
    states = teach_states(target, made, task.feature_layers)
    anchor_lists = [anchors_of(sample.wanted) for sample in made]
    anchors = torch.nn.utils.rnn.pad_sequence(anchor_lists, batch_first=True, padding_value=1)
    outputs = task._run(states, states.features, anchors)
    for row, sample in enumerate(made):
        assert anchor_lists[row].tolist() == sample.wanted.nonzero()[:-1, 0].tolist()
        for number, anchor in enumerate(anchor_lists[row].tolist()):
            expected = decoded(task, target, sample, anchor)
            torch.testing.assert_close(outputs[row, number], expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_the_loss_equals_a_loop_over_single_positions() -> None:
    target, made = training_samples("llava", 4)
    made[1].wanted[-3] = False  # two answers
    task = fresh(target)
    states = teach_states(target, made, task.feature_layers)
    expected, count = 0.0, 0
    for sample in made:
        hidden = teach_states(target, [sample]).hidden[0]
        for anchor in anchors_of(sample.wanted).tolist():
            outputs = decoded(task, target, sample, anchor)
            for mask in range(1, SIZE):
                position = anchor + mask
                if position >= sample.prefix.length or not sample.wanted[position]:
                    break
                probs = target.head(hidden[position - 1]).softmax(-1)
                logprobs = target.head(outputs[mask]).log_softmax(-1)
                expected -= math.exp(-(mask - 1) / (SIZE / 2)) * float((probs * logprobs).sum())
                count += 1
    sums = task.sums(states, torch.zeros_like(states.features))
    torch.testing.assert_close(sums, torch.tensor([expected]), rtol=1e-4, atol=1e-3)
    assert sum(task.counts(sample.wanted)[0] for sample in made) == count


@torch.no_grad()
def test_accuracy_is_that_of_the_first_draft() -> None:
    target, made = training_samples("llava", 4)
    task = fresh(target)
    states = teach_states(target, made[:1], task.feature_layers)
    logits = task.logits(states)[0]
    for position in made[0].wanted.nonzero()[1:, 0].tolist():
        expected = target.head(decoded(task, target, made[0], position - 1)[1])
        torch.testing.assert_close(logits[position - 2], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_tokens", [0, 1, 2, MAX_ANCHORS + 1, MAX_ANCHORS + 2, 10 * MAX_ANCHORS])
def test_a_sample_has_a_bounded_number_of_blocks(num_tokens: int) -> None:
    wanted = torch.arange(num_tokens + 5) >= 5
    anchors = anchors_of(wanted).tolist()
    assert len(anchors) == min(max(0, num_tokens - 1), MAX_ANCHORS)
    assert anchors == sorted(set(anchors))
    if anchors:
        assert (anchors[0], anchors[-1]) == (5, num_tokens + 3)


def test_a_block_ends_with_its_answer() -> None:
    target, [sample] = training_samples("llava", 1)
    wanted = torch.zeros_like(sample.wanted)
    first, gap, second = 2, 1, 4
    wanted[-(first + gap + second) : -(gap + second)] = wanted[-second:] = True
    start = len(wanted) - (first + gap + second)
    assert anchors_of(wanted).tolist() == [start, *range(start + first + gap, len(wanted) - 1)]
    # The first answer has one draft, the second 3, 2 and 1.
    assert fresh(target).counts(wanted) == [1 + 3 + 2 + 1]
    assert fresh(target).counts(torch.zeros_like(wanted)) == [0]


def test_a_drafter_learns_and_the_embedding_stays() -> None:
    target, made = training_samples("llava", 6)
    task = fresh_block(target, 0, MASK, SIZE, 1, (0, 1))
    embedding = task.embedding.weight.clone()
    trainer = Trainer(target, task, Pace(80, 5e-3, clip="norm", clip_limit=1.0, feature_noise=0.1))
    before, *_ = count_right(task, target, made)
    losses = [trainer.learn(list(enumerate(made))) for _ in range(80)]
    assert losses[0] is not None
    assert losses[-1] is not None
    assert losses[-1] < losses[0]
    assert torch.equal(task.embedding.weight, embedding)
    first, three, total = count_right(task, target, made)
    assert before + total / 4 < first <= three <= total


def test_samples_without_a_block_and_padded_rows_have_no_loss() -> None:
    target, made = training_samples("llava", 2)
    short = make_training_sample(target, made[0].prefix.head(2), [5])
    task = fresh(target)
    assert Trainer(target, task, Pace(2, 1e-3)).learn([(0, short)]) is None
    with torch.no_grad():
        alone = teach_states(target, made[1:], task.feature_layers)
        both = teach_states(target, [short, made[1]], task.feature_layers)
        expected = task.sums(alone, torch.zeros_like(alone.features))
        torch.testing.assert_close(task.sums(both, torch.zeros_like(both.features)), expected)


@torch.no_grad()
def test_a_written_drafter_is_read_again(tmp_path: Path) -> None:
    target, made = training_samples("llava", 1)
    task = fresh(target)
    save_block(task.network, tmp_path, "some/target", ("LlavaForConditionalGeneration",))
    num_layers = target.decoder.config.num_hidden_layers
    again = load_head(BLOCK, CheckpointRef(str(tmp_path)), "float32", torch.device("cpu"), num_layers)
    assert (again.shape.block_size, again.shape.mask_token_id) == (SIZE, MASK)
    assert again.feature_layers == (0, 1)
    anchor = int(anchors_of(made[0].wanted)[0])
    expected = decoded(task, target, made[0], anchor)
    torch.testing.assert_close(decoded(BlockTask(again, task.embedding, task.head), target, made[0], anchor), expected)
