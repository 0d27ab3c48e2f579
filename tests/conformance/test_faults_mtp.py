"""Planted faults of MTP layers: each must make its check fail; most do not change lossless output."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from decoding.drafters import MtpDrafter
from decoding.drafters.missed import MissedTokens
from models.heads.mtp import MtpNetwork
from tests import toys
from tests.conformance import mtp, planted
from tests.conformance.planted import Patch

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def families() -> Iterator[None]:
    with mtp.mixtures():
        yield


def hidden_states_are_those_before_the_final_norm(patch: Patch) -> None:
    """The norm divides a state by its root mean square, as `hnorm` does, and multiplies it by its weight."""
    weight = toys.oracle("deepseek_v3").get_decoder().norm.weight  # type: ignore[operator]
    patch.setattr(MtpNetwork, "project", lambda self, features: features / weight)


def positions_are_those_of_the_state(patch: Patch) -> None:
    """Only relative positions matter, so it takes positions of images, which are not consecutive."""
    patch.setattr(MtpDrafter, "_positions", lambda self, prefix: prefix.positions)


def drafts_are_one_position_late(patch: Patch) -> None:
    run = MtpDrafter._run

    def late(self: Any, slots: Any, tokens: Tensor, features: Tensor, depth: Tensor, *rest: Any) -> Tensor:
        return run(self, slots, tokens, features, depth + 1, *rest)

    patch.setattr(MtpDrafter, "_run", late)


def axes_are_swapped(patch: Patch) -> None:
    forward = MtpNetwork.forward

    def swapped(self: Any, inputs_embeds: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        if position_ids.dim() == 3:
            position_ids = position_ids.flip(0)
        return forward(self, inputs_embeds, position_ids, *args, **kwargs)

    patch.setattr(MtpNetwork, "forward", swapped)


def missed_tokens_are_forgotten(patch: Patch) -> None:
    patch.setattr(MissedTokens, "take", lambda self, slots: None)


def accepted_states_are_shifted_by_one(patch: Patch) -> None:
    commit = MtpDrafter.commit

    def shifted(self: Any, verification: Any, result: Any) -> None:
        commit(self, replace(verification, features=verification.features.roll(1, 2)), result)

    patch.setattr(MtpDrafter, "commit", shifted)


def the_state_comes_first_in_the_projection(patch: Patch) -> None:
    fuse = MtpNetwork.fuse

    def swapped(self: Any, embeds: Tensor, features: Tensor, summary: Tensor | None = None) -> Tensor:
        self.config.mtp_hidden_states_first = True
        return fuse(self, embeds, features, summary)

    patch.setattr(MtpNetwork, "fuse", swapped)


def the_next_draft_reads_the_state_before_the_last_norm(patch: Patch) -> None:
    forward = MtpNetwork.forward

    def raw(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = forward(self, *args, **kwargs)
        out.last_hidden_state = out.last_hidden_state * torch.linspace(0.5, 2.0, out.last_hidden_state.shape[-1])
        return out

    patch.setattr(MtpNetwork, "forward", raw)


def drafts_of(family: str, length: int = 4, pattern: Sequence[int] = ()) -> Callable[[], object]:
    return lambda: mtp.check_drafts(family, mtp.chain(length), pattern)


PAUSED = (0, 2, 0, 0, 4, 1, 0, 0, 0)


@planted.each(
    [
        (hidden_states_are_those_before_the_final_norm, drafts_of("deepseek_v3")),
        (positions_are_those_of_the_state, drafts_of("qwen2_5_vl")),
        (drafts_are_one_position_late, drafts_of("glm4_moe")),
        (axes_are_swapped, drafts_of("qwen2_5_vl")),
        (axes_are_swapped, drafts_of("qwen3_vl")),
        (missed_tokens_are_forgotten, drafts_of("llama", pattern=PAUSED)),
        (missed_tokens_are_forgotten, drafts_of("qwen3_vl", pattern=PAUSED)),
        (accepted_states_are_shifted_by_one, drafts_of("deepseek_v3")),
        (the_state_comes_first_in_the_projection, drafts_of("llama")),
        (the_next_draft_reads_the_state_before_the_last_norm, drafts_of("llama")),
    ]
)
def test_a_fault_is_caught(fault: planted.Plant, check: planted.Check) -> None:
    planted.assert_caught(fault, check)
