"""Prompts whose last token is visual: positions continue axis by axis, as in transformers' `generate`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from decoding import Engine, Method, Request, Sampling
from decoding.acceptance import Exact
from decoding.drafters import NoDrafter
from decoding.trees import Chain
from models.backends.cuda.graphs import CapturedDecoder
from models.heads.training.teacher import extend
from models.inputs.prefix import Prefix
from tests import toys
from tests.conformance import checks, sharing
from tests.conformance.sharing import small_savings
from tests.models.backends.cuda.test_graphs import captured

pytestmark = pytest.mark.slow

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
SAMPLED = Sampling(temperature=0.9, top_k=20, top_p=0.9, repetition_penalty=1.3)
IMAGE, VIDEO = "<image>", "<video>"
TEXTS = (
    "<s> w7 w9 w5 <image>",
    "<s> w5 <image>",
    "<s> w5 <image> w6 w20 w21 w5 <image>",
    "<s> w30 w5 <video>",
    "<s> w5 <image> w6 w5 <video>",
    "<s> w5 <video> w6 w11 w12 w5 <image>",
    "<s> w5 <image> w6 w5 <image> w6 w5 <image>",
)
"""The opening mark of an image without the closing one."""


def requests(family: str, sampling: Sampling | None = None) -> list[Request]:
    """Prompts that end in an image or a video of several sizes, among prompts that end in words."""
    base = sampling or Sampling()
    made = checks.requests(family, 3, base)
    for i in range(2 * len(TEXTS)):
        text = TEXTS[i % len(TEXTS)]
        pictures = tuple(toys.picture(10 * i + n, family) for n in range(text.count(IMAGE)))
        clips = tuple(toys.clip(i + n, family) for n in range(text.count(VIDEO)))
        limits = replace(base, max_new_tokens=5 + (7 * i) % 19)
        # The oracle's outputs are cached by the prompt's text, which therefore identifies the images.
        text = text.replace("<s>", f"<s> w{40 + i}")
        made.insert((5 * i) % (len(made) + 1), Request(f"end-{i}", text, pictures, limits, seed=3, videos=clips))
    return made


def engine(family: str, tree: str, drafter: str, slots: int) -> Engine:
    return Engine(
        toys.target(family), Method(checks.make_drafter(drafter, family), checks.TREES[tree](), Exact()), slots, 128
    )


@pytest.mark.parametrize(
    ("tree", "drafter", "slots"), [("chain", "none", 4), ("chain", "right", 1), ("ragged", "perturbed", 9)]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_rows_equal_generate(family: str, tree: str, drafter: str, slots: int) -> None:
    made = engine(family, tree, drafter, slots)
    wanted = requests(family)
    done = checks.run(made, wanted)
    assert all(
        done[request.sample_id].token_ids == checks.generated(family, request, made.target.eos_ids)
        for request in wanted
    ), [
        request.sample_id
        for request in wanted
        if done[request.sample_id].token_ids != checks.generated(family, request, made.target.eos_ids)
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_rows_equal_the_reference(family: str) -> None:
    made = engine(family, "ragged", "perturbed", 4)
    wanted = requests(family, SAMPLED)
    done = checks.run(made, wanted)
    for request in wanted:
        assert done[request.sample_id].token_ids == checks.referenced(family, request, made.target.eos_ids), (
            request.sample_id
        )
    # A drafter with wrong positions would have a lower acceptance than on other prompts.
    ends = [
        done[request.sample_id].telemetry.mean_acceptance_length
        for request in wanted
        if request.sample_id.startswith("end")
    ]
    assert sum(ends) / len(ends) > 1.1


@pytest.mark.parametrize("family", FAMILIES)
def test_the_reference_equals_generate(family: str) -> None:
    for request in requests(family):
        assert checks.referenced(family, request, frozenset()) == checks.generated(family, request, frozenset()), (
            request.sample_id
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_of_the_target_itself_are_never_rejected(family: str) -> None:
    for completion in checks.run(engine(family, "chain", "right", 5), requests(family)).values():
        telemetry = completion.telemetry
        assert telemetry.ended_inside_path or telemetry.num_accepted_draft_tokens == telemetry.num_draft_tokens, (
            completion.sample_id
        )


def kin(family: str) -> list[Request]:
    """Equal prompts, and prompts with the same images that differ in words before the last image."""
    words = " ".join(f"w{7 + i}" for i in range(40))
    pictures = tuple(toys.picture(i, family) for i in range(2))
    limits = Sampling(max_new_tokens=14)
    texts = [f"<s> w5 <image> w6 {words} w5 <image>"] * 3
    texts += [f"<s> w5 <image> w6 {words} w{50 + i} w5 <image>" for i in range(3)]
    return [Request(f"kin-{i}", text, pictures, replace(limits, max_new_tokens=8 + i)) for i, text in enumerate(texts)]


@pytest.mark.parametrize("family", FAMILIES)
def test_shared_prompts_and_stems_keep_each_rows_axes(family: str) -> None:
    made, wanted = engine(family, "ragged", "perturbed", 6), kin(family)
    with small_savings():
        done = checks.run(made, wanted)
    for request in wanted:
        assert done[request.sample_id].token_ids == checks.generated(family, request, made.target.eos_ids), (
            request.sample_id
        )
    # Features that layers add are never behind a stem.
    assert (sharing.check_states(family, wanted) > 0) == (family == "qwen2_5_vl")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_text_appended_to_a_prompt_has_the_positions_of_decoding(family: str) -> None:
    target = toys.target(family)
    (ending,) = [request for request in requests(family) if request.sample_id == "end-2"]
    prompt = target.encode(ending.prompt, ending.images, ending.videos)
    assert prompt.visual[-1]
    assert prompt.axis_offsets is not None
    assert not torch.equal(prompt.axis_offsets, torch.zeros(3, dtype=torch.long))
    longer = extend(prompt, torch.tensor([5, 6]), torch.zeros(2, prompt.embeds.shape[1]))
    expected = prompt.positions[:, -1:] + torch.tensor([1, 2])
    assert torch.equal(longer.positions[:, -2:], expected)


def axes_are_made_equal(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Prefix, "axis_offsets", None)


def axes_stay_in_their_place(patch: pytest.MonkeyPatch) -> None:
    from models.backends.rows import SlotRows

    swap = SlotRows._swap

    def without_axes(self: SlotRows, slot: int, other: int) -> None:
        axes, self.axes = self.axes, None
        swap(self, slot, other)
        self.axes = axes

    patch.setattr(SlotRows, "_swap", without_axes)


@pytest.mark.parametrize("fault", [axes_are_made_equal, axes_stay_in_their_place])
def test_a_planted_fault_is_caught(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        test_greedy_rows_equal_generate("qwen2_5_vl", "ragged", "perturbed", 9)


def test_recorded_steps_keep_each_rows_axes() -> None:
    made = toys.target("qwen2_5_vl")
    run = captured(made)
    wanted = requests("qwen2_5_vl")
    done = checks.run(Engine(made, Method(NoDrafter(), Chain(1), Exact()), 4, 128), wanted)
    for request in wanted:
        assert done[request.sample_id].token_ids == checks.generated("qwen2_5_vl", request, made.eos_ids), (
            request.sample_id
        )
    assert isinstance(run, CapturedDecoder)
