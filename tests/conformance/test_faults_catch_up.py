"""Planted faults of drafters that are off for some steps: each must make its check fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from decoding.drafters import EagleDrafter, LookupDrafter, ModelDrafter
from tests.conformance import heads, planted, test_catch_up
from tests.conformance.catch_up import LONG, check_chains, late_engine
from tests.conformance.planted import Patch

pytestmark = pytest.mark.slow


def without_drafts(commit: Callable[..., None], wrong: Callable[[Any, Any, Any], None]) -> Callable[..., None]:
    """A commit that is wrong only after steps without drafts."""

    def changed(self: Any, verification: Any, result: Any) -> None:
        commit(self, verification, result)
        if verification.tree.num_levels == 0:
            wrong(self, verification, result)

    return changed


def a_missed_token_is_forgotten(patch: Patch) -> None:
    def forget(self: Any, verification: Any, result: Any) -> None:
        self._num_pending[verification.slots.index] -= 1
        self._pending[verification.slots.index, self._num_pending[verification.slots.index] - 1] = result.next

    patch.setattr(ModelDrafter, "commit", without_drafts(ModelDrafter.commit, forget))


def the_batch_catches_up_only_as_far_as_its_youngest_row(patch: Patch) -> None:
    class Least(list[int]):
        """Applies to every slot the state of the one that missed least."""

        def __getitem__(self, index: Any) -> Any:
            return min((value for value in self if value), default=0)

    opened = ModelDrafter.open

    def open_wrongly(self: Any, spec: Any) -> None:
        opened(self, spec)
        self._most_pending = Least(self._most_pending)

    patch.setattr(ModelDrafter, "open", open_wrongly)


def a_row_without_missed_pairs_loses_its_root(patch: Patch) -> None:
    encode = EagleDrafter._encode

    def careless(self: Any, slots: Any, tokens: Tensor, features: Tensor, count: Tensor) -> None:
        encode(self, slots, tokens, features, count)
        none = slots.index[count == 0]
        self._output[none] = torch.zeros_like(self._output[none])

    patch.setattr(EagleDrafter, "_encode", careless)


def lookup_skips_tokens_of_steps_without_drafts(patch: Patch) -> None:
    def undo(self: Any, verification: Any, result: Any) -> None:
        self._length[verification.slots.index] -= 1

    patch.setattr(LookupDrafter, "commit", without_drafts(LookupDrafter.commit, undo))


def heads_drafts() -> None:
    with pytest.MonkeyPatch.context() as patch:
        late_engine(patch, [0, 3], until_drafted=False)
        heads.check_drafts("eagle", "llama", "dynamic")


FAULTS: list[planted.Fault] = [
    (a_missed_token_is_forgotten, lambda: check_chains(LONG)),
    (the_batch_catches_up_only_as_far_as_its_youngest_row, lambda: check_chains(LONG)),
    (a_row_without_missed_pairs_loses_its_root, heads_drafts),
    (
        lookup_skips_tokens_of_steps_without_drafts,
        test_catch_up.test_lookup_tracks_the_text_through_steps_without_drafts,
    ),
]


@planted.each(FAULTS)
def test_a_planted_fault_is_caught(fault: planted.Plant, check: planted.Check) -> None:
    planted.assert_caught(fault, check)
