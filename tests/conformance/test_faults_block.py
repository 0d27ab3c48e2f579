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
from models.backends.attention import DecoderRunner
from models.heads.block import BlockNetwork, View
from models.kv.lanes import LaneModel
from tests.conformance import block, checks, test_block

pytestmark = pytest.mark.slow

Patch = pytest.MonkeyPatch


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


def the_pending_tokens_output_is_the_first_level(patch: Patch) -> None:
    draft = BlockDrafter.draft

    def early(self: Any, slots: Any, frontier: Any) -> Tensor:
        return (
            draft(self, slots, frontier)
            if frontier.depth == 0
            else draft(self, slots, replace(frontier, depth=frontier.depth - 1))
        )

    patch.setattr(BlockDrafter, "draft", early)


def the_root_is_a_mask_too(patch: Patch) -> None:
    run = BlockDrafter._run_block
    patch.setattr(BlockDrafter, "_run_block", lambda self, s, root: run(self, s, torch.full_like(root, block.MASK)))


def a_block_begins_one_position_too_late(patch: Patch) -> None:
    forward = LaneModel.forward_embeds

    def late(self: Any, slots: Any, embeds: Tensor, depth: Tensor, *rest: Any) -> Tensor:
        is_block = rest[-1] is not None and isinstance(rest[-1], DecoderRunner)
        return forward(self, slots, embeds, depth + is_block, *rest)

    patch.setattr(LaneModel, "forward_embeds", late)


def accepted_features_are_shifted_by_one(patch: Patch) -> None:
    commit = BlockDrafter.commit

    def shifted(self: Any, judgement: Any, verdict: Any) -> None:
        commit(self, replace(judgement, features=judgement.features.roll(1, 2)), verdict)

    patch.setattr(BlockDrafter, "commit", shifted)


def the_first_nodes_are_encoded_instead_of_the_accepted_ones(patch: Patch) -> None:
    commit = BlockDrafter.commit

    def first(self: Any, judgement: Any, verdict: Any) -> None:
        places = torch.arange(verdict.path.shape[1]).expand_as(verdict.path)
        commit(self, judgement, replace(verdict, path=places))

    patch.setattr(BlockDrafter, "commit", first)


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
        found = take(self, slots)
        return None if found is None else (*found[:-1], (found[-1] - 1).clamp_min(0))

    patch.setattr(MissedTokens, "take", fewer)


def a_refilled_slot_keeps_its_missed_features(patch: Patch) -> None:
    admit = BlockDrafter.admit

    def stale(self: Any, slots: Any, *rest: Any) -> None:
        count, most = self._missed.count.clone(), list(self._missed.most)
        admit(self, slots, *rest)
        self._missed.count.copy_(count)
        self._missed.most[:] = most

    patch.setattr(BlockDrafter, "admit", stale)


def windows_are_one_position_wider(patch: Patch) -> None:
    mask = View.mask

    def wider(view: View, *rest: Any) -> Tensor:
        return mask(replace(view, window=None if view.window is None else view.window + 1), *rest)

    patch.setattr(View, "mask", wider)


def every_layer_has_the_windows_of_the_last(patch: Patch) -> None:
    run = BlockNetwork.run_layers

    def last(self: Any, *rest: Any, **kwargs: Any) -> Tensor:
        shape = self.shape
        self.shape = replace(shape, views=(shape.views[-1],) * len(self.layers))
        try:
            return run(self, *rest, **kwargs)
        finally:
            self.shape = shape

    patch.setattr(BlockNetwork, "run_layers", last)


def windows(views: str) -> Callable[[], None]:
    return lambda: block.check_drafts("llama", "branching", block.VIEWS[views])


def drafts(tree: str, family: str = "llama") -> Callable[[], None]:
    return lambda: block.check_drafts(family, tree)


def memory(tree: str) -> Callable[[], None]:
    return lambda: block.check_memory(block.make_engine("llama", tree, 3), "llama", checks.requests("llama", 10))


def memory_after_rests() -> None:
    block.check_memory(test_block.resting_engine([0, 2, 0, 0, 4, 1, 0]), "llama", checks.requests("llama", 10))


FAULTS: list[tuple[Callable[[Patch], None], Callable[[], None]]] = [
    (features_are_those_of_the_layer_before, drafts("chain")),
    (a_block_reads_earlier_masks_only, drafts("branching")),
    (the_pending_tokens_output_is_the_first_level, drafts("chain")),
    (the_root_is_a_mask_too, drafts("branching")),
    (a_block_begins_one_position_too_late, drafts("chain", "qwen2_5_vl")),
    (accepted_features_are_shifted_by_one, memory("chain")),
    (the_first_nodes_are_encoded_instead_of_the_accepted_ones, memory("branching")),
    (a_block_stays_in_the_cache, memory("chain")),
    (windows_are_one_position_wider, windows("windows from the anchor")),
    (windows_are_one_position_wider, windows("windows")),
    (every_layer_has_the_windows_of_the_last, windows("windows from the anchor")),
    (a_missed_feature_is_forgotten, memory_after_rests),
    (a_refilled_slot_keeps_its_missed_features, memory_after_rests),
]


@pytest.mark.parametrize(("fault", "check"), FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
def test_a_planted_fault_is_caught(
    fault: Callable[[Patch], None], check: Callable[[], None], monkeypatch: Patch
) -> None:
    check()
    fault(monkeypatch)
    with pytest.raises((AssertionError, IndexError)):
        check()
