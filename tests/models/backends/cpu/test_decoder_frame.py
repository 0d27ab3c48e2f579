"""The code around the layers of a decoder is recorded where it is simple, and otherwise runs itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from decoding import Request
from models.backends.cpu.compiled import CompiledDecoder
from models.backends.cpu.decoder_frame import DecoderFrame, FrameRecorder
from models.kv.lanes import SlotBatch
from tests import toys
from tests.conformance import checks
from tests.models.backends.cpu.test_compiled import states_of

# The import of inductor raises a deprecation warning of torch.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.slow,
]
STEPS = [(4, 3, 5), (4, 3, 40), (4, 1, 5), (4, 1, 70), (4, 3, 70)]


class Rotary(nn.Module):
    def forward(self, states: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None] * torch.tensor([1.0, 0.1])
        return angles.cos(), angles.sin()


class Layer(nn.Module):
    def __init__(self, recorders: list[FrameRecorder]) -> None:
        super().__init__()
        self._recorders = recorders

    def forward(self, hidden: Tensor, **given: Any) -> Tensor:
        out = hidden.tanh() + given["position_embeddings"][0].sum(-1, keepdim=True)
        for recorder in self._recorders:
            recorder.record(hidden, given, out)
        return out


class Decoder(nn.Module):
    """Three layers between rotary angles and a norm; `oddity` names one further operation."""

    def __init__(self, oddity: str) -> None:
        super().__init__()
        self.recorders: list[FrameRecorder] = []
        self.rotary_emb = Rotary()
        self.norm = nn.LayerNorm(4)
        self.layers = nn.ModuleList(Layer(self.recorders) for _ in range(3))
        self.oddity = oddity

    def forward(self, embeds: Tensor, positions: Tensor) -> Tensor:
        odd = self.oddity
        hidden = embeds * 2 if odd == "scaled inputs" else embeds
        angles = self.rotary_emb(hidden, positions + 1 if odd == "shifted positions" else positions)
        if odd == "scaled angles":
            angles = angles[0] * 1.5, angles[1]
        given: dict[str, Any] = {"position_embeddings": angles, "position_ids": positions, "attention_mask": None}
        if odd == "other positions":
            given["position_ids"] = positions.clamp_max(1)
        if odd == "a mask":
            given["attention_mask"] = torch.ones(2, 3)
        for number, layer in enumerate(self.layers):
            if odd == "a layer without angles" and number == 1:
                given = given | {"position_embeddings": (torch.zeros_like(angles[0]), angles[1])}
            if odd == "a switch per layer":
                given = given | {"is_sliding": number == 1}
            if odd == "a layer left out" and number == 2:
                continue
            hidden = layer(hidden, **given)
            if odd == "an operation between layers" and number == 1:
                hidden = hidden + 1.0
        if odd == "several angles":
            self.rotary_emb(hidden, position_ids=positions + 5)
        return hidden if odd == "no norm" else self.norm(hidden) * (2.0 if odd == "scaled outputs" else 1.0)


def record(decoder: Decoder) -> tuple[DecoderFrame | None, Tensor, Tensor]:
    embeds, positions = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)), torch.arange(3).expand(2, -1)
    with FrameRecorder(decoder, 3) as recorder:
        decoder.recorders.append(recorder)
        last = decoder(embeds, positions)
    decoder.recorders.clear()
    return recorder.frame(embeds, positions, last), embeds, last


def test_a_plain_decoder_is_recorded() -> None:
    decoder = Decoder("")
    frame, embeds, last = record(decoder)
    assert frame is not None
    other = torch.arange(7, 10).expand(2, -1)
    hidden, given = embeds, frame.before(embeds, other)
    for layer in decoder.layers:
        hidden = layer(hidden, **given)
    assert torch.equal(frame.after(hidden), decoder(embeds, other))
    assert not torch.equal(frame.after(hidden), last)


@pytest.mark.parametrize(
    "oddity",
    [
        "scaled inputs", "shifted positions", "scaled angles", "other positions", "a mask",
        "a layer without angles", "a switch per layer", "an operation between layers", "several angles",
        "a layer left out", "no norm", "scaled outputs",
    ],
)  # fmt: skip
def test_a_decoder_with_other_operations_is_not_recorded(oddity: str) -> None:
    assert record(Decoder(oddity))[0] is None


def test_the_recorder_removes_its_hook() -> None:
    decoder = Decoder("")
    record(decoder)
    assert not decoder.rotary_emb._forward_pre_hooks


def run_twice(family: str, expected: Sequence[Request] = ()) -> tuple[CompiledDecoder, list[list[Tensor]], list[int]]:
    """Return a compiled decoder, the states of two equal passes, and how many steps of each pass ran the code of the
    family's decoder."""
    target = toys.target(family)
    expected = expected or checks.requests(family, 4)
    prefixes = [target.encode(request.prompt, request.images, request.videos) for request in expected]
    assert target.compile()
    lanes = target.lanes(4, 1, 200)
    num_own = 0

    def count(module: nn.Module, given: Any, named: dict[str, Any]) -> None:
        nonlocal num_own
        num_own += named["lanes"].num_leading_rows is not None

    states, counts = [], []
    assert isinstance(target._run, CompiledDecoder)
    with target._run._compiled_decoder.register_forward_pre_hook(count, with_kwargs=True):
        for _ in range(2):
            num_own = 0
            states.append(states_of(lanes, prefixes, STEPS))
            counts.append(num_own)
    run = target._run
    assert isinstance(run, CompiledDecoder)
    return run, states, counts


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "qwen3_vl", "llama"])
def test_frames_of_real_families_give_equal_states(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run, (first, second), counts = run_twice(family)
    # One forward of each kind (one node, several nodes) is recorded; later ones use its frame.
    assert counts == [2, 0]
    assert all(frame is not None for form, frame in run._frames.items() if not form[0].is_prefill)
    torch._dynamo.reset()
    monkeypatch.setattr("models.backends.cpu.compiled.FrameRecorder.frame", lambda *_: None)
    _, expected, counts = run_twice(family)
    assert counts == [len(STEPS), len(STEPS)]
    for got, right in zip((*first, *second), (*expected[0], *expected[1]), strict=True):
        assert torch.equal(got, right)


def test_positions_of_one_axis_and_of_three_have_separate_frames() -> None:
    texts = [request for request in checks.requests("qwen2_5_vl", 20) if not (request.images or request.videos)]
    for expected, dims, num_axes in (((), 3, 0), ((texts * 4)[:4], 2, 3)):
        torch._dynamo.reset()
        run, *_ = run_twice("qwen2_5_vl", expected)
        known = [(form, frame) for form, frame in run._frames.items() if frame is not None]
        axes = {(form[0].is_prefill, form[1]): frame.num_axes for form, frame in known}
        # Steps after prompts with pictures have positions of three axes, after texts alone of one.
        assert axes[False, dims] == num_axes


def test_inputs_that_are_not_contiguous_are_read_correctly() -> None:
    target = toys.target("llama")
    prefixes = [
        target.encode(request.prompt, request.images, request.videos) for request in checks.requests("llama", 4)
    ]
    assert target.compile()
    lanes = target.lanes(4, 1, 200)
    slots = SlotBatch(torch.arange(4), (0, 1, 2, 3), (1,) * 4)
    wide = torch.randn(4, 6, 64, generator=torch.Generator().manual_seed(0))[:, ::2, ::2]
    assert wide.shape[2] == target.decoder.config.hidden_size  # type: ignore[union-attr]
    depth, visible = torch.arange(3).expand(4, -1), torch.ones(3, 3, dtype=torch.bool).tril().expand(4, -1, -1)
    with torch.inference_mode():
        for _ in range(2):
            lanes.admit(slots, [[prefix] for prefix in prefixes])
        dense = [lanes.forward_embeds(slots, wide.contiguous(), depth, visible) for _ in range(3)][-1]
        # Sums over inputs with other strides may be taken in another order.
        torch.testing.assert_close(lanes.forward_embeds(slots, wide, depth, visible), dense, atol=1e-5, rtol=1e-5)


def test_a_frame_with_other_states_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    original = FrameRecorder.frame

    def wrong(self: FrameRecorder, *given: Any) -> DecoderFrame | None:
        frame = original(self, *given)
        return None if frame is None else replace(frame, norm=nn.Identity())

    _, expected, _ = run_twice("llama")
    torch._dynamo.reset()
    monkeypatch.setattr(FrameRecorder, "frame", wrong)
    run, states, _ = run_twice("llama")
    assert set(run._frames.values()) == {None}
    for got, right in zip((*states[0], *states[1]), (*expected[0], *expected[1]), strict=True):
        assert torch.equal(got, right)
