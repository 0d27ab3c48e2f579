"""Planted faults of drafters that are off for some steps: each must make its check fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import decoding.drafters.model as model_module
from decoding.drafters import EagleDrafter, LookupDrafter, ModelDrafter
from tests.conformance import heads, test_catch_up
from tests.conformance.resting import LONG, MIXED, check_chains, late_engine

pytestmark = pytest.mark.slow

Patch = pytest.MonkeyPatch


def without_drafts(commit: Callable[..., None], wrong: Callable[[Any, Any, Any], None]) -> Callable[..., None]:
    """A commit that is wrong only after steps without drafts."""

    def changed(self: Any, judgement: Any, verdict: Any) -> None:
        commit(self, judgement, verdict)
        if judgement.tree.num_levels == 0:
            wrong(self, judgement, verdict)

    return changed


def a_missed_token_is_forgotten(patch: Patch) -> None:
    def forget(self: Any, judgement: Any, verdict: Any) -> None:
        self._num_pending[judgement.slots.index] -= 1
        self._pending[judgement.slots.index, self._num_pending[judgement.slots.index] - 1] = verdict.next

    patch.setattr(ModelDrafter, "commit", without_drafts(ModelDrafter.commit, forget))


def the_batch_catches_up_only_as_far_as_its_youngest_row(patch: Patch) -> None:
    class Least(list[int]):
        """Applies to every slot the state of the one that missed least."""

        def __getitem__(self, place: Any) -> Any:
            return min((value for value in self if value), default=0)

    opened = ModelDrafter.open

    def open_wrongly(self: Any, spec: Any) -> None:
        opened(self, spec)
        self._most_pending = Least(self._most_pending)

    patch.setattr(ModelDrafter, "open", open_wrongly)


def the_second_forward_reads_what_the_first_has_read(patch: Patch) -> None:
    widths = model_module.catch_up_widths
    patch.setattr(model_module, "catch_up_widths", lambda most: [(0, width) for _, width in widths(most)])


def a_feature_is_kept_one_place_too_early(patch: Patch) -> None:
    def shift(self: Any, judgement: Any, verdict: Any) -> None:
        index = judgement.slots.index
        last, features = self._missed.count[index] - 1, self._missed.values[1]
        features[index, last] = features[index, (last - 1).clamp_min(0)]

    patch.setattr(EagleDrafter, "commit", without_drafts(EagleDrafter.commit, shift))


def missed_pairs_are_encoded_twice(patch: Patch) -> None:
    encode = EagleDrafter._encode_missed

    def twice(self: Any, slots: Any) -> None:
        count, most = self._missed.count.clone(), list(self._missed.most)
        encode(self, slots)
        self._missed.count.copy_(count)
        self._missed.most[:] = most
        encode(self, slots)

    patch.setattr(EagleDrafter, "_encode_missed", twice)


def a_row_without_missed_pairs_loses_its_root(patch: Patch) -> None:
    encode = EagleDrafter._encode

    def careless(self: Any, slots: Any, tokens: Tensor, features: Tensor, count: Tensor) -> None:
        encode(self, slots, tokens, features, count)
        none = slots.index[count == 0]
        self._output[none] = torch.zeros_like(self._output[none])

    patch.setattr(EagleDrafter, "_encode", careless)


def a_look_up_does_not_follow_while_it_rests(patch: Patch) -> None:
    def undo(self: Any, judgement: Any, verdict: Any) -> None:
        self._length[judgement.slots.index] -= 1

    patch.setattr(LookupDrafter, "commit", without_drafts(LookupDrafter.commit, undo))


def chains(patch: Patch) -> None:
    check_chains(LONG)


def chains_in_parts(patch: Patch) -> None:
    patch.setattr("decoding.drafters.model.WIDEST", 4)
    check_chains(LONG)


def heads_drafts(patch: Patch) -> None:
    late_engine(patch, [0, 3], until_drafted=False)
    heads.check_drafts("eagle", "llama", "dynamic")


def heads_drafts_after_long_rests(patch: Patch) -> None:
    late_engine(patch, MIXED, until_drafted=False)
    heads.check_drafts("eagle", "llama", "dynamic")


def look_up(patch: Patch) -> None:
    test_catch_up.test_a_look_up_knows_the_text_whatever_was_off()


FAULTS: list[tuple[Callable[[Patch], None], Callable[[Patch], None]]] = [
    (a_missed_token_is_forgotten, chains),
    (the_batch_catches_up_only_as_far_as_its_youngest_row, chains),
    (the_second_forward_reads_what_the_first_has_read, chains_in_parts),
    (a_feature_is_kept_one_place_too_early, heads_drafts_after_long_rests),
    (missed_pairs_are_encoded_twice, heads_drafts),
    (a_row_without_missed_pairs_loses_its_root, heads_drafts),
    (a_look_up_does_not_follow_while_it_rests, look_up),
]


@pytest.mark.parametrize(("fault", "check"), FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
def test_the_suite_notices(
    fault: Callable[[Patch], None], check: Callable[[Patch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises((AssertionError, IndexError)):
        check(monkeypatch)
