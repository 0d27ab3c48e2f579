"""Planted faults of block drafters: each must make its check fail; none changes lossless output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from decoding.drafters import BlockDrafter
from decoding.drafters.missed import MissedTokens
from models.heads.block import View
from models.kv.lanes import LaneModel
from tests.conformance import block, checks, planted, test_block
from tests.conformance.planted import Patch

pytestmark = pytest.mark.slow


def features_are_those_of_the_layer_before(patch: Patch) -> None:
    start = BlockDrafter.__init__

    def shifted(self: Any, network: Any, *rest: Any) -> None:
        start(self, network, *rest)
        self.feature_layers = tuple(layer - 1 for layer in self.feature_layers)

    patch.setattr(BlockDrafter, "__init__", shifted)


def a_block_reads_earlier_masks_only(patch: Patch) -> None:
    forward = LaneModel.forward_embeds

    def causal(self: Any, slots: Any, embeds: Tensor, depth: Tensor, visible: Tensor, *rest: Any) -> Tensor:
        return forward(self, slots, embeds, depth, visible.tril(), *rest)

    patch.setattr(LaneModel, "forward_embeds", causal)


def accepted_features_are_shifted_by_one(patch: Patch) -> None:
    commit = BlockDrafter.commit

    def shifted(self: Any, verification: Any, result: Any) -> None:
        commit(self, replace(verification, features=verification.features.roll(1, 2)), result)

    patch.setattr(BlockDrafter, "commit", shifted)


def a_block_stays_in_the_cache(patch: Patch) -> None:
    run = BlockDrafter._run_block

    def committed(self: Any, slots: Any, root: Tensor) -> Tensor:
        out = run(self, slots, root)
        self.lanes.commit(slots, root[:, :0], torch.ones_like(root[:, 0]))
        return out

    patch.setattr(BlockDrafter, "_run_block", committed)


def a_missed_feature_is_forgotten(patch: Patch) -> None:
    take = MissedTokens.take

    def fewer(self: Any, slots: Any) -> Any:
        states = take(self, slots)
        return None if states is None else (*states[:-1], (states[-1] - 1).clamp_min(0))

    patch.setattr(MissedTokens, "take", fewer)


def windows_are_one_position_wider(patch: Patch) -> None:
    mask = View.mask

    def wider(view: View, *rest: Any) -> Tensor:
        return mask(replace(view, window=None if view.window is None else view.window + 1), *rest)

    patch.setattr(View, "mask", wider)


def windows(views: str) -> Callable[[], None]:
    return lambda: block.check_drafts("llama", "branching", block.VIEWS[views])


def drafts(tree: str, family: str = "llama") -> Callable[[], None]:
    return lambda: block.check_drafts(family, tree)


def memory(tree: str) -> Callable[[], None]:
    return lambda: block.check_memory(block.make_engine("llama", tree, 3), "llama", checks.requests("llama", 10))


def memory_after_rests() -> None:
    block.check_memory(test_block.engine_with_pauses([0, 2, 0, 0, 4, 1, 0]), "llama", checks.requests("llama", 10))


FAULTS: list[planted.Fault] = [
    (features_are_those_of_the_layer_before, drafts("chain")),
    (a_block_reads_earlier_masks_only, drafts("branching")),
    (accepted_features_are_shifted_by_one, memory("chain")),
    (a_block_stays_in_the_cache, memory("chain")),
    (windows_are_one_position_wider, windows("windows from the anchor")),
    (windows_are_one_position_wider, windows("windows")),
    (a_missed_feature_is_forgotten, memory_after_rests),
]


@planted.each(FAULTS)
def test_a_planted_fault_is_caught(fault: planted.Plant, check: planted.Check) -> None:
    planted.assert_caught(fault, check)
