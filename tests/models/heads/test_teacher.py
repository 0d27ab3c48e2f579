"""States of a training sample equal those of transformers and of decoding, in any batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from decoding import Engine, Method, Request, Sampling
from decoding.acceptance import Exact
from decoding.contracts import VerificationOutput
from decoding.drafters import EagleDrafter
from decoding.drafters.merge import Guided, SingleLane
from decoding.tree import AcceptanceResult
from decoding.trees import Chain
from models.contract import TargetModel
from models.heads.training.losses import EagleTask, fresh_eagle
from models.heads.training.teacher import TrainingSample, make_training_sample
from models.llamagen.eagle import image_eagle, image_eagle_shape
from models.llamagen.target import LlamaGenTarget
from tests import toys
from tests.toys import images as image_toys
from tests.toys.training import teach_states
from tests.toys.weights import randomise

ANSWER = (9, 12, 40, 7, 2)


def training_sample(target: TargetModel, family: str, seed: int) -> TrainingSample:
    prompt, pictures = toys.prompt(family, seed)
    (prefix,) = target.encode_lanes(prompt, pictures, None)
    return make_training_sample(target, prefix, ANSWER[: 2 + seed % 4])


@pytest.mark.parametrize("family", list(toys.FAMILIES))
def test_states_of_a_ragged_batch_are_those_of_transformers_alone_on_the_whole_text(family: str) -> None:
    target = toys.target(family)
    training_samples = [training_sample(target, family, seed) for seed in range(5)]
    states = teach_states(target, training_samples)
    assert states.lengths == tuple(each.prefix.length for each in training_samples)
    for row in range(5):
        prompt, pictures = toys.prompt(family, row)
        result = ANSWER[: 2 + row % 4]
        inputs = toys.front_end(family).encode(prompt, pictures)
        length = inputs["input_ids"].shape[1]
        for name, after in (("input_ids", torch.tensor([result])), ("attention_mask", torch.ones(1, len(result)))):
            inputs[name] = torch.cat([inputs[name], after.to(inputs[name].dtype)], dim=1)
        if "mm_token_type_ids" in inputs:
            kinds = inputs["mm_token_type_ids"]
            inputs["mm_token_type_ids"] = torch.cat([kinds, kinds.new_zeros(1, len(result))], dim=1)
        model: Any = toys.oracle(family)
        with torch.no_grad():
            expected = model(**inputs, use_cache=False, logits_to_keep=0).logits[0]
        size = states.lengths[row]
        torch.testing.assert_close(target.head(states.hidden[row, :size]), expected, rtol=1e-3, atol=1e-4)
        assert states.tokens[row, :size].tolist() == inputs["input_ids"][0].tolist()
        assert states.wanted[row].tolist() == [length <= index < size for index in range(states.wanted.shape[1])]


class Watching(EagleDrafter):
    """Keeps what the head guessed at the pending token, before every step and lane by lane."""

    def prefill(self, slots: Any, prefixes: Any) -> None:
        super().prefill(slots, prefixes)
        self.guesses = [self._output[0].clone()]

    def commit(self, verification: VerificationOutput, result: AcceptanceResult) -> None:
        super().commit(verification, result)
        if verification.tree.num_levels:
            self.guesses.append(self._output[0].clone())


def watch(target: TargetModel, task: EagleTask, request: Request, length: int) -> tuple[tuple[int, ...], torch.Tensor]:
    """Tokens of one decoded request, and the head's guesses (steps, R, D); no drafts, so that a step is a token."""
    merge = SingleLane() if target.num_lanes == 1 else Guided()
    drafter = Watching(task.network, task.head, target.num_lanes, merge)
    engine = Engine(target, Method(drafter, Chain(1), NoneAccepted()), 1, length)
    (done,) = engine.run([request])
    assert done.error is None
    task.network.set_attn_implementation("sdpa")
    return done.token_ids, torch.stack(drafter.guesses)


class NoneAccepted(Exact):
    """Takes the target's token alone, so that every step commits one token."""

    def accept(self, verification: VerificationOutput) -> AcceptanceResult:
        verdict = super().accept(verification)
        first = verification.target_logits[:, 0].argmax(dim=-1)
        return AcceptanceResult(
            torch.zeros_like(verdict.path), torch.ones_like(verdict.n), first, torch.zeros_like(verdict.relaxed)
        )


def fresh(target: TargetModel) -> EagleTask:
    make = None
    if isinstance(target, LlamaGenTarget):
        shape = target.gpt.shape
        make = lambda: image_eagle(image_eagle_shape(shape), shape)  # noqa: E731
    task = fresh_eagle(target, 3, make)
    # The default weights are too small to distinguish positions.
    randomise(task.network.layers, 3)
    return task


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "llama"])
def test_the_inputs_of_a_head_in_training_equal_those_in_decoding(family: str) -> None:
    target = toys.target(family)
    prompt, pictures = toys.prompt(family, 3)
    assert len(pictures) == (1 if toys.FAMILIES[family].takes_images else 0)
    task = fresh(target)
    request = Request("one", prompt, pictures, sampling=Sampling(max_new_tokens=8, ignore_eos=True))
    tokens, guesses = watch(target, task, request, 128)
    (prefix,) = target.encode_lanes(prompt, pictures, None)
    states = teach_states(target, [make_training_sample(target, prefix, tokens)])
    with torch.no_grad():
        taught = task._guess(states, states.hidden)[0, prefix.length - 1 :]
    torch.testing.assert_close(guesses[: len(taught), 0], taught[: len(guesses)], rtol=1e-4, atol=1e-5)
    assert len(guesses) >= 6


@pytest.mark.parametrize("kind", ["text", "class"])
@pytest.mark.parametrize("index", [0, 2])
def test_the_inputs_of_an_image_head_in_training_equal_those_in_decoding_in_both_lanes(kind: str, index: int) -> None:
    """Pads, token 0 at the condition, and positions that begin one column early: a shift in any would show here."""
    target = image_toys.target(kind)
    task = fresh(target)
    condition = image_toys.condition(kind, index)
    sampling = Sampling(max_new_tokens=image_toys.GRID**2, guidance_scale=3.0)
    tokens, guesses = watch(target, task, Request("one", "", condition=condition, sampling=sampling), 64)
    assert len(tokens) == image_toys.GRID**2
    lanes = target.encode_lanes("", (), condition)
    assert (lanes[0].padding is not None) == (kind == "text" and index == 0)
    states = teach_states(target, [make_training_sample(target, lane, tokens, num_known=1) for lane in lanes])
    with torch.no_grad():
        taught = task._guess(states, states.hidden)[:, lanes[0].length - 1 :]
    assert len(guesses) >= image_toys.GRID**2 - 2
    torch.testing.assert_close(guesses, taught[:, : len(guesses)].transpose(0, 1), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(taught[0], taught[1], atol=1e-3)


def test_the_first_draft_is_the_second_code_and_is_left_out_on_request() -> None:
    target = image_toys.target("text")
    (lane, _) = target.encode_lanes("", (), image_toys.condition("text", 1))
    codes = list(range(16))
    wanted = make_training_sample(target, lane, codes, 1).wanted
    # A pair at column t teaches the token at t + 2: the first one is at the condition's last column.
    assert torch.nonzero(wanted[2:]).flatten().tolist() == list(range(lane.length - 1, lane.length + 14))
    published = make_training_sample(target, lane, codes, 2).wanted
    assert torch.nonzero(wanted & ~published).flatten().tolist() == [lane.length + 1]


def test_padding_is_masked_in_a_training_sample() -> None:
    target = image_toys.target("text")
    (lane, _) = target.encode_lanes("", (), image_toys.condition("text", 0))
    assert lane.num_padding == image_toys.NUM_COLUMNS - 1
    sample = make_training_sample(target, lane, range(16))
    embeds = sample.prefix.embeds.clone()
    embeds[: lane.num_padding] = torch.from_numpy(np.random.default_rng(0).standard_normal(embeds[0].shape)).float()
    other = replace(sample, prefix=replace(sample.prefix, embeds=embeds))
    first, second = (teach_states(target, [each]).hidden[0, lane.num_padding :] for each in (sample, other))
    assert torch.equal(first, second)
