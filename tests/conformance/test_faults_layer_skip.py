"""Planted faults of self-speculation: each must make its check fail."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import decoding.drafters.layer_skip as layer_skip_drafter
from decoding.contracts import TreePolicy
from models.backends.cache import RaggedCache
from models.kv.lanes import LaneModel
from tests.conformance import layer_skip, methods

pytestmark = pytest.mark.slow

Patch = pytest.MonkeyPatch


def drafts_remain_behind_the_tree(patch: Patch) -> None:
    patch.setattr(RaggedCache, "wipe_scratch", lambda *_: None)


def drafts_are_written_one_position_too_early(patch: Patch) -> None:
    forward = LaneModel.forward

    def early(self: Any, slots: Any, *args: Any, **more: Any) -> Tensor:
        is_draft = len(args) > 4
        if is_draft:
            self.cache.lens -= 1
        out = forward(self, slots, *args, **more)
        if is_draft:
            self.cache.lens += 1
        return out

    patch.setattr(LaneModel, "forward", early)


def the_drafter_commits_its_root(patch: Patch) -> None:
    draft = layer_skip_drafter.LayerSkipDrafter.draft

    def committing(self: Any, slots: Any, frontier: Any) -> Tensor:
        out = draft(self, slots, frontier)
        if frontier.depth == 0:
            self._lanes.commit(slots, frontier.tokens[:, :0], torch.ones_like(frontier.tokens[:, 0]))
        return out

    patch.setattr(layer_skip_drafter.LayerSkipDrafter, "draft", committing)


def a_list_of_layers_is_taken_as_a_number(patch: Patch) -> None:
    of_layers = LaneModel.of_layers
    patch.setattr(LaneModel, "of_layers", lambda self, indices: of_layers(self, range(len(indices))))


def layers_have_the_cache_of_their_new_index(patch: Patch) -> None:
    start = layer_skip_drafter.LayerSkipDrafter.open

    def renumbered(self: Any, spec: Any) -> None:
        start(self, spec)
        decoder = self._runner.decoder
        decoder.layers = copy.deepcopy(decoder.layers)
        for index, layer in enumerate(decoder.layers):
            layer.self_attn.layer_idx = index

    patch.setattr(layer_skip_drafter.LayerSkipDrafter, "open", renumbered)


def drafted_siblings_see_each_other(patch: Patch) -> None:
    place = layer_skip_drafter.ScratchNodes.place

    def everything(self: Any, frontier: Any) -> Any:
        depth, sees, start = place(self, frontier)
        return depth, torch.ones_like(sees), start

    patch.setattr(layer_skip_drafter.ScratchNodes, "place", everything)


def a_drafted_node_is_one_position_too_far(patch: Patch) -> None:
    place = layer_skip_drafter.ScratchNodes.place

    def further(self: Any, frontier: Any) -> Any:
        depth, sees, start = place(self, frontier)
        return depth + 1, sees, start

    patch.setattr(layer_skip_drafter.ScratchNodes, "place", further)


def only_the_trees_nodes_have_room(patch: Patch) -> None:
    patch.setattr(TreePolicy, "num_scratch", lambda self, shares_cache: self.max_nodes)


def the_unconditional_lane_is_not_drafted(patch: Patch) -> None:
    forward = LaneModel.forward

    def alone(self: Any, slots: Any, *args: Any, **more: Any) -> Tensor:
        out = forward(self, slots, *args, **more)
        return out[:, :1].expand_as(out) if len(args) > 4 else out

    patch.setattr(LaneModel, "forward", alone)


FAULTS: list[tuple[Callable[[Patch], None], Callable[[], object]]] = [
    (drafts_remain_behind_the_tree, lambda: layer_skip.check_poisoned("llama", "pruned")),
    (drafts_are_written_one_position_too_early, lambda: methods.check_case(("layer-skip-tree", "llava", 4, "greedy"))),
    (drafts_are_written_one_position_too_early, lambda: layer_skip.check_cache("llama", [0], "chain")),
    (the_drafter_commits_its_root, lambda: methods.check_case(("layer-skip", "llama", 4, "greedy"))),
    (a_list_of_layers_is_taken_as_a_number, lambda: layer_skip.check_drafts("deep", [0, 3], "chain")),
    (layers_have_the_cache_of_their_new_index, lambda: layer_skip.check_drafts("deep", [2, 3], "chain")),
    (drafted_siblings_see_each_other, lambda: layer_skip.check_drafts("deep", [0, 1], "branching")),
    (a_drafted_node_is_one_position_too_far, lambda: layer_skip.check_drafts("deep", [0, 1], "chain")),
    (only_the_trees_nodes_have_room, lambda: layer_skip.check_full_context("wide")),
    (the_unconditional_lane_is_not_drafted, lambda: layer_skip.check_image_drafts("text", "chain")),
]


@pytest.mark.parametrize(("fault", "check"), FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
def test_a_planted_fault_is_caught(
    fault: Callable[[Patch], None], check: Callable[[], object], monkeypatch: Patch
) -> None:
    check()
    fault(monkeypatch)
    with pytest.raises((AssertionError, IndexError)):
        check()
