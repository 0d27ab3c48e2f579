"""Planted faults of self-speculation: each must make its check fail."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import decoding.drafters.layer_skip as layer_skip_drafter
from decoding.contracts import TreePolicy
from models.backends.cache import RaggedCache
from models.kv.lanes import LaneModel
from tests.conformance import layer_skip, planted
from tests.conformance.planted import Patch

pytestmark = pytest.mark.slow


def drafts_remain_behind_the_tree(patch: Patch) -> None:
    patch.setattr(RaggedCache, "zero_scratch", lambda *_: None)


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
    index_of = layer_skip_drafter.ScratchNodes.place

    def everything(self: Any, frontier: Any) -> Any:
        depth, sees, start = index_of(self, frontier)
        return depth, torch.ones_like(sees), start

    patch.setattr(layer_skip_drafter.ScratchNodes, "place", everything)


def scratch_positions_exclude_those_of_the_drafter(patch: Patch) -> None:
    patch.setattr(TreePolicy, "num_scratch", lambda self, shares_cache: self.max_nodes)


def the_unconditional_lane_is_not_drafted(patch: Patch) -> None:
    forward = LaneModel.forward

    def alone(self: Any, slots: Any, *args: Any, **more: Any) -> Tensor:
        out = forward(self, slots, *args, **more)
        return out[:, :1].expand_as(out) if len(args) > 4 else out

    patch.setattr(LaneModel, "forward", alone)


FAULTS: list[planted.Fault] = [
    (drafts_remain_behind_the_tree, lambda: layer_skip.check_poisoned("llama", "pruned")),
    (a_list_of_layers_is_taken_as_a_number, lambda: layer_skip.check_drafts("deep", [0, 3], "chain")),
    (layers_have_the_cache_of_their_new_index, lambda: layer_skip.check_drafts("deep", [2, 3], "chain")),
    (drafted_siblings_see_each_other, lambda: layer_skip.check_drafts("deep", [0, 1], "branching")),
    (scratch_positions_exclude_those_of_the_drafter, lambda: layer_skip.check_full_context("wide")),
    (the_unconditional_lane_is_not_drafted, lambda: layer_skip.check_image_drafts("text", "chain")),
]


@planted.each(FAULTS)
def test_a_planted_fault_is_caught(fault: planted.Plant, check: planted.Check) -> None:
    planted.assert_caught(fault, check)
