"""Training of heads: the token learned from each state, the loss, and resuming and sharing a run."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.contract import TargetModel
from models.heads.training.losses import EagleTask, HeadTask, MedusaTask, fresh_eagle, fresh_medusa
from models.heads.training.teacher import States, TrainingSample, make_training_sample
from models.heads.training.trainer import Pace, Reduce, Trainer, count_right, key_of
from models.kv.feature_layers import LAST
from models.llamagen.eagle import image_eagle, image_eagle_shape
from tests import toys
from tests.toys import images as image_toys
from tests.toys.training import teach_states, training_samples

pytestmark = pytest.mark.slow

PACE = Pace(num_steps=8, learning_rate=3e-3, seed=7, warmup_steps=2)


def image_lessons(count: int = 6) -> tuple[TargetModel, list[TrainingSample]]:
    """Images after captions of different lengths, every third without its condition."""
    target = image_toys.target("text")
    generator = torch.Generator().manual_seed(1)
    made = []
    for index in range(count):
        lanes = target.encode_lanes("", (), image_toys.condition("text", index))
        codes = torch.randint(0, image_toys.CODES, (16,), generator=generator).tolist()
        made.append(make_training_sample(target, lanes[index % 3 == 2], codes, 1))
    return target, made


def fresh(kind: str) -> Callable[[TargetModel], HeadTask]:
    if kind == "medusa":
        return lambda target: fresh_medusa(target, 0, 3)
    if kind == "image":
        shape = image_toys.SHAPES["text"]
        return lambda target: fresh_eagle(target, 0, lambda: image_eagle(image_eagle_shape(shape), shape))
    return lambda target: fresh_eagle(target, 0)


WORLDS: dict[str, Callable[[], tuple[TargetModel, list[TrainingSample]]]] = {
    "eagle": training_samples,
    "image": image_lessons,
    "medusa": training_samples,
}


# --- the losses ----------------------------------------------------------------------------------------------------


def slow_eagle_loss(task: EagleTask, target: Any, made: list[TrainingSample], noises: list[Tensor]) -> float:
    """One training sample and one position at a time, without padding."""
    features, tokens, count = 0.0, 0.0, 0
    for training_sample, noise in zip(made, noises, strict=True):
        prefix = training_sample.prefix
        states = teach_states(target, [training_sample]).hidden[0]
        results = [
            prefix.embeds[t + 1].float()
            if prefix.visual[t + 1]
            else task.network.embed_tokens.weight[prefix.token_ids[t + 1]]
            for t in range(prefix.length - 1)
        ]
        inputs = task.network.fc(torch.cat([torch.stack(results), states[:-1] + noise[: prefix.length - 1]], dim=-1))
        positions = torch.arange(prefix.length - 1)[None]
        guessed = task.network(inputs[None], positions).last_hidden_state[0]
        for t in range(prefix.length - 2):
            if not training_sample.wanted[t + 2]:
                continue
            difference = (guessed[t] - states[t + 1]).abs()
            huber = torch.where(difference < 1, 0.5 * difference**2, difference - 0.5)
            features += float(huber.mean())
            true = target.head(states[t + 1]).softmax(-1)
            tokens += float(-(true * target.head(guessed[t]).log_softmax(-1)).sum())
            count += 1
    return (features + 0.1 * tokens) / count


@pytest.mark.parametrize("kind", ["eagle", "image"])
@torch.no_grad()
def test_eagles_loss_equals_a_loop_over_single_positions(kind: str) -> None:
    target, made = WORLDS[kind]()
    task = fresh(kind)(target)
    assert isinstance(task, EagleTask)
    trainer = Trainer(target, task, PACE)
    states = teach_states(target, made)
    noise = trainer._noise(states, range(len(made)))
    count = sum(task.counts(training_sample.wanted)[0] for training_sample in made)
    assert count == int(states.wanted[:, 2:].sum())
    expected = slow_eagle_loss(task, target, made, list(noise))
    assert float(task.sums(states, noise)[0]) / count == pytest.approx(expected, rel=1e-5)
    assert float(task.sums(states, torch.zeros_like(noise))[0]) / count != pytest.approx(expected, rel=1e-4)


@torch.no_grad()
def test_medusas_loss_equals_a_loop_and_head_i_learns_the_token_i_plus_2_positions_ahead() -> None:
    target, made = training_samples()
    task = fresh_medusa(target, 0, 3)
    states = teach_states(target, made)
    for head, sums in enumerate(task.sums(states, states.hidden)):
        losses = []
        for training_sample in made:
            hidden = teach_states(target, [training_sample]).hidden[0]
            for t in range(training_sample.prefix.length - 2 - head):
                if training_sample.wanted[t + 2 + head]:
                    token = training_sample.prefix.token_ids[t + 2 + head]
                    losses.append(float(F.cross_entropy(task.heads.logits(head, hidden[t]), token)))
        assert sum(task.counts(training_sample.wanted)[head] for training_sample in made) == len(losses)
        assert float(sums) == pytest.approx(sum(losses), rel=1e-5)


class Knowing:
    """A head given by a table: at position t it ranks the target's likeliest token second, and the right one third."""

    feature_layers = (LAST,)

    def __init__(self, target: Any, rank: int) -> None:
        self._target, self._rank = target, rank

    def logits(self, states: States) -> Tensor:
        true = self._target.head(states.hidden[:, 1:-1]).argmax(-1)
        positions = (true[..., None] + torch.arange(1, 4)) % toys.VOCAB_SIZE
        positions[..., self._rank] = true
        scores = torch.zeros(*true.shape, toys.VOCAB_SIZE)
        return scores.scatter(-1, positions, torch.tensor([3.0, 2.0, 1.0]).expand(positions.shape))


@pytest.mark.parametrize(("rank", "shares"), [(0, (1, 1)), (1, (0, 1)), (2, (0, 1))])
def test_accuracy_counts_the_targets_likeliest_token_first_and_among_three(rank: int, shares: tuple[int, int]) -> None:
    target, made = training_samples()
    first, three, total = count_right(Knowing(target, rank), target, made)  # type: ignore[arg-type]
    assert total == sum(int(training_sample.wanted[2:].sum()) for training_sample in made)
    assert (first, three) == (shares[0] * total, shares[1] * total)


# --- the noise and the pace ----------------------------------------------------------------------------------------


def test_noise_belongs_to_the_sample_and_is_as_wide_as_published() -> None:
    target, made = training_samples()
    trainer = Trainer(target, fresh_eagle(target, 0), PACE)
    states = teach_states(target, made)
    noise = trainer._noise(states, range(6))
    for row, length in enumerate(states.lengths):
        own = noise[row, :length]
        width = 0.2 * 512 / length
        assert float(own.abs().max()) == pytest.approx(width / 2, rel=0.02)
        assert float(own.mean()) == pytest.approx(0.0, abs=0.1 * width)
        assert float(noise[row, length:].abs().sum()) == 0.0
    alone = trainer._noise(teach_states(target, made[3:4]), [3])
    assert torch.equal(alone[0], noise[3, : states.lengths[3]])
    assert not torch.equal(trainer._noise(teach_states(target, made[3:4]), [4]), alone)
    plain = Trainer(target, fresh_eagle(target, 0), replace(PACE, noise_tokens=None))
    assert float(plain._noise(states, range(6)).abs().max()) == pytest.approx(0.1, rel=0.01)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("linear", [0.25, 0.5, 0.75, 1.0, 1.0, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]),
        ("constant", [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_the_learning_rate_rises_and_falls_as_configured(schedule: Any, expected: list[float]) -> None:
    pace = Pace(10, 1.0, warmup_steps=4, schedule=schedule)
    assert [pace.scale(step) for step in range(10)] == pytest.approx(expected)
    cosine = Pace(10, 1.0, warmup_steps=4, schedule="cosine")
    assert (cosine.scale(4), cosine.scale(7), cosine.scale(10)) == pytest.approx((1.0, 0.5, 0.0))


@pytest.mark.parametrize("clip", ["value", "norm", "none"])
def test_gradients_are_clipped_as_configured(clip: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    target, made = training_samples()
    task = fresh_eagle(target, 0)
    trainer = Trainer(target, task, replace(PACE, clip=clip, clip_limit=0.01, weight_decay=0.0))
    seen: list[Tensor] = []

    def look(*_: Any, **__: Any) -> None:
        seen.append(torch.cat([p.grad.flatten() for p in task.network.parameters() if p.grad is not None]))

    monkeypatch.setattr(trainer._optimizer, "step", look)
    trainer.learn(list(enumerate(made)))
    largest, norm = float(seen[0].abs().max()), float(seen[0].norm())
    if clip == "value":
        assert largest == pytest.approx(0.01)
        assert norm > 0.02
    elif clip == "norm":
        assert norm == pytest.approx(0.01, rel=1e-3)
    else:
        assert largest > 0.01


# --- the run -------------------------------------------------------------------------------------------------------


def begin(kind: str, rows: int = 16, reduce: Reduce = lambda _: None) -> tuple[Trainer, list[TrainingSample]]:
    target, made = WORLDS[kind]()
    return Trainer(target, fresh(kind)(target), PACE, rows, reduce), made


def go_on(trainer: Trainer, made: list[TrainingSample], num_steps: int, part: slice = slice(None)) -> None:
    for step in range(trainer.step, trainer.step + num_steps):
        trainer.learn([(10 * step + number, each) for number, each in enumerate(made)][part])


def train(kind: str, num_steps: int, rows: int = 16) -> Trainer:
    trainer, made = begin(kind, rows)
    go_on(trainer, made, num_steps)
    return trainer


@pytest.mark.parametrize("kind", list(WORLDS))
def test_training_learns_repeats_itself_and_leaves_target_and_embedding_as_they_were(kind: str) -> None:
    target, made = WORLDS[kind]()
    before = {name: value.clone() for name, value in target.decoder.state_dict().items()}
    trainer = Trainer(target, fresh(kind)(target), replace(PACE, num_steps=60))
    batch = list(enumerate(made))
    losses = [trainer.learn(batch) or 0.0 for _ in range(60)]
    assert losses[-1] < 0.7 * losses[0]
    assert all(torch.equal(before[name], value) for name, value in target.decoder.state_dict().items())
    if isinstance(trainer.task, EagleTask):
        assert "embed_tokens.weight" not in trainer.weights()
        own = trainer.task.network.embed_tokens.weight
        assert torch.equal(own, target.decoder.get_input_embeddings().weight)  # type: ignore[operator]
    first, other = (train(kind, 3).weights() for _ in range(2))
    assert all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("kind", list(WORLDS))
def test_an_interrupted_run_resumes_to_bitwise_equal_weights(kind: str) -> None:
    whole = train(kind, 6)
    buffer = io.BytesIO()
    torch.save(train(kind, 3).state(), buffer)
    buffer.seek(0)
    later, made = begin(kind)
    later.resume(torch.load(buffer, weights_only=True))
    assert later.step == 3
    go_on(later, made, 3)
    assert all(torch.equal(value, later.weights()[name]) for name, value in whole.weights().items())


@pytest.mark.parametrize("kind", list(WORLDS))
def test_gradients_of_a_batch_in_parts_equal_those_of_the_batch(kind: str) -> None:
    whole, parts = train(kind, 3), train(kind, 3, rows=2)
    for name, value in whole.weights().items():
        torch.testing.assert_close(parts.weights()[name], value, rtol=1e-3, atol=2e-5)


class Meeting:
    """Adds tensors up over threads, as a process group does over processes."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size)
        self._shared: list[Tensor] = []

    def add_up(self, values: Tensor) -> None:
        self._shared.append(values.clone())
        self._barrier.wait()
        total = torch.stack(self._shared).sum(dim=0)
        self._barrier.wait()
        values.copy_(total)
        if self._barrier.wait() == 0:
            self._shared.clear()
        self._barrier.wait()


@pytest.mark.parametrize("kind", ["image", "medusa"])
def test_workers_that_share_a_batch_unevenly_learn_what_one_learns(kind: str) -> None:
    """One of the three has a single training sample, one has none: the number of tokens counts, not their owner."""
    meeting = Meeting(3)
    parts = [slice(0, 1), slice(1, None), slice(0, 0)]
    made = [begin(kind, reduce=meeting.add_up) for _ in parts]
    threads = [threading.Thread(target=go_on, args=(*each, 3, part)) for each, part in zip(made, parts, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done = [trainer.weights() for trainer, _ in made]
    for name, value in train(kind, 3).weights().items():
        assert torch.equal(done[0][name], done[1][name])
        assert torch.equal(done[0][name], done[2][name])
        torch.testing.assert_close(done[0][name], value, rtol=1e-3, atol=2e-5)


def test_a_batch_without_training_tokens_changes_only_the_step() -> None:
    target, made = training_samples()
    trainer = Trainer(target, fresh_eagle(target, 0), PACE)
    before = trainer.weights()
    empty = replace(made[0], wanted=torch.zeros_like(made[0].wanted))
    assert trainer.learn([]) is None
    assert trainer.learn([(0, empty)]) is None
    assert trainer.step == 2
    assert all(torch.equal(value, trainer.weights()[name]) for name, value in before.items())


def test_a_non_finite_loss_stops_the_run_before_an_update() -> None:
    target, made = training_samples()
    trainer = Trainer(target, fresh_eagle(target, 0), PACE)
    before = trainer.weights()
    bad = replace(made[0], prefix=replace(made[0].prefix, embeds=made[0].prefix.embeds * float("nan")))
    with pytest.raises(FloatingPointError, match=r"step 1 is nan: lower training\.learning_rate"):
        trainer.learn([(0, bad)])
    assert all(torch.equal(value, trainer.weights()[name]) for name, value in before.items())


def test_keys_depend_on_every_part_and_fill_their_range() -> None:
    keys = [key_of(1, "null", ordinal) for ordinal in range(4000)]
    assert len(set(keys)) == 4000
    assert min(keys) >= 0
    assert sum(key < 0.1 * 2**63 for key in keys) / 4000 == pytest.approx(0.1, abs=0.02)
    assert key_of(1, "null", 2) != key_of(1, "noise", 2) != key_of(2, "noise", 2)


def test_medusa_heads_start_as_the_targets_own_output_layer() -> None:
    target, _ = training_samples(count=1)
    task = fresh_medusa(target, 0, 2)
    assert isinstance(task, MedusaTask)
    states = torch.randn(3, target.hidden_size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(task.heads.logits(1, states), target.head(states))
