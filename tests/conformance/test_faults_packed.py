"""Planted faults of steps that verify chosen drafts: each must change an output, which the check finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from decoding.tree import DraftTree
from models.backends.packed_nodes import Packing
from models.kv.lanes import LaneModel
from tests.conformance import test_erratic

Patch = pytest.MonkeyPatch


def states_go_to_the_next_node(patch: Patch) -> None:
    unpack = Packing.unpack
    patch.setattr(Packing, "unpack", lambda self, values: unpack(self, values.roll(1, 1)))


def keys_go_to_another_row(patch: Patch) -> None:
    unpack = Packing.unpack_heads

    def other(self: Packing, values: Tensor) -> Tensor:
        return unpack(self, values).roll(1, 0)

    patch.setattr(Packing, "unpack_heads", other)


def positions_are_those_of_the_first_nodes(patch: Patch) -> None:
    def first(self: Packing, positions: Tensor) -> Tensor:
        return positions.flatten(-2)[..., : len(self.source)].unsqueeze(-2)

    patch.setattr(Packing, "pack_positions", first)


def drafts_that_are_left_out_may_be_accepted(patch: Patch) -> None:
    best = DraftTree.best
    patch.setattr(DraftTree, "best", lambda self, num: replace(best(self, num), valid=self.valid))


def rows_are_packed_in_slot_order(patch: Patch) -> None:
    """The cache's rows are in another order wherever a slot was refilled."""
    mixed = LaneModel._are_leading
    patch.setattr(LaneModel, "_are_leading", lambda self, slots: bool(mixed(self, slots)) or self.num_lanes == 1)


def logits_of_the_chosen_nodes_are_in_another_order(patch: Patch) -> None:
    logits = LaneModel.logits

    def reversed_rows(self: Any, hidden: Tensor, chosen: Any = None) -> Tensor:
        found = logits(self, hidden, chosen)
        return found if chosen is None else torch.flip(found, [0])

    patch.setattr(LaneModel, "logits", reversed_rows)


FAULTS = (
    states_go_to_the_next_node,
    keys_go_to_another_row,
    positions_are_those_of_the_first_nodes,
    drafts_that_are_left_out_may_be_accepted,
    rows_are_packed_in_slot_order,
    logits_of_the_chosen_nodes_are_in_another_order,
)


def check() -> None:
    for name in ("sd-chain", "sd-tree", "dynamic"):
        test_erratic.check_method(name, "greedy", seed=3, limits_drafts=True)


def test_the_check_passes_without_a_fault() -> None:
    check()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault: Callable[[Patch], None], monkeypatch: Patch) -> None:
    fault(monkeypatch)
    with pytest.raises((AssertionError, IndexError, RuntimeError)):
        check()
