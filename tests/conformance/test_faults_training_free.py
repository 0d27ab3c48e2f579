"""Planted faults of Jacobi and suffix decoding: each must make its check fail.

Under exact acceptance a wrong draft changes no token, so most checks are of the text that a drafter knows, and of the
acceptance length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import decoding.drafters.jacobi as jacobi
import decoding.drafters.suffix as suffix
import decoding.drafters.suffix_index as suffix_index
from decoding.contracts import Judgement
from decoding.drafters import JacobiDrafter, SuffixDrafter
from tests.conformance import test_training_free as contract
from tests.conformance.resting import MIXED
from tests.decoding.drafters import test_jacobi, test_suffix

pytestmark = pytest.mark.slow

Patch = pytest.MonkeyPatch


def choices_are_one_position_off(patch: Patch) -> None:
    choice = jacobi.target_choice
    patch.setattr(jacobi, "target_choice", lambda judgement: choice(judgement).roll(1, dims=1))


def choices_are_drawn_without_noise(patch: Patch) -> None:
    patch.setattr(jacobi, "target_choice", lambda judgement: judgement.warped.argmax(dim=-1))


def choices_after_the_accepted_path_are_dropped(patch: Patch) -> None:
    fill = JacobiDrafter._fill
    patch.setattr(JacobiDrafter, "_fill", lambda self, slots, length, known: fill(self, slots, length, length))


def drafts_start_at_the_pending_token(patch: Patch) -> None:
    places = JacobiDrafter._places
    patch.setattr(JacobiDrafter, "_places", lambda self, length: places(self, length - 1))


def steps_without_drafts_are_forgotten(patch: Patch) -> None:
    for kind in (JacobiDrafter, SuffixDrafter):
        commit = kind.commit

        def forget(self: Any, judgement: Judgement, verdict: Any, commit: Any = commit) -> None:
            if judgement.tree.num_levels:
                commit(self, judgement, verdict)

        patch.setattr(kind, "commit", forget)


def a_refilled_slot_keeps_its_length(patch: Patch) -> None:
    for kind in (JacobiDrafter, SuffixDrafter):
        admit = kind.admit

        def stale(self: Any, slots: Any, *rest: Any, admit: Any = admit) -> None:
            before = self._length.clone()
            admit(self, slots, *rest)
            self._length.copy_(torch.where(before > 0, before, self._length))

        patch.setattr(kind, "admit", stale)


def rows_write_to_each_others_slots(patch: Patch) -> None:
    for kind in (JacobiDrafter, SuffixDrafter):
        commit = kind.commit

        def crossed(self: Any, judgement: Judgement, verdict: Any, commit: Any = commit) -> None:
            name = "_output" if isinstance(self, JacobiDrafter) else "_text"
            commit(self, judgement, verdict)
            index = judgement.slots.index
            getattr(self, name)[index] = getattr(self, name)[index.flip(0)]

        patch.setattr(kind, "commit", crossed)


def the_image_row_is_one_code_too_long(patch: Patch) -> None:
    made = JacobiDrafter.__init__
    patch.setattr(JacobiDrafter, "__init__", lambda self, grid=None: made(self, grid and grid + 1))


def finished_outputs_are_never_noted(patch: Patch) -> None:
    patch.setattr(SuffixDrafter, "finished", lambda self, token_ids: None)


def the_index_never_reaches_the_device(patch: Patch) -> None:
    patch.setattr(suffix_index.Corpus, "add", lambda self, token_ids: False)


def drafts_are_copied_from_one_place_too_far(patch: Patch) -> None:
    build = suffix_index.build_index

    def further(*args: Any) -> Any:
        index = build(*args)
        return suffix_index.SuffixIndex(index.text, index.keys, index.starts + 1)

    patch.setattr(suffix_index, "build_index", further)


def the_ngram_is_read_backwards(patch: Patch) -> None:
    factors = suffix.key_factors
    patch.setattr(suffix, "key_factors", lambda size: factors(size)[::-1].copy())


def the_rarest_continuation_is_drafted(patch: Patch) -> None:
    where = suffix_index.np.where
    patch.setattr(suffix_index.np, "where", lambda mask, sizes, other: where(mask, 100 - sizes, other))


def ngrams_cross_the_ends_of_outputs(patch: Patch) -> None:
    patch.setattr(suffix_index, "_tokens_to_separator", lambda text: suffix_index.np.full(len(text), len(text)))


def a_match_of_one_token_replaces_the_rows_own(patch: Patch) -> None:
    find = SuffixDrafter._find_shared

    def longer(self: Any, slots: Any) -> tuple[Tensor, Tensor]:
        drafts, matched = find(self, slots)
        return drafts, torch.where(matched > 0, matched + 10, 0)

    patch.setattr(SuffixDrafter, "_find_shared", longer)


def the_corpus_grows_without_a_limit(patch: Patch) -> None:
    add = suffix_index.Corpus.add

    def unlimited(self: Any, token_ids: Any) -> bool:
        limit, self.max_tokens = self.max_tokens, 1 << 20
        due = add(self, token_ids)
        self.max_tokens = limit
        return due

    patch.setattr(suffix_index.Corpus, "add", unlimited)


def accepts() -> None:
    contract.test_choices_that_do_not_change_are_all_accepted(False)


def text_of(drafter: str) -> Callable[[], None]:
    return lambda: contract.test_the_text_is_known_whatever_depths_a_controller_chooses(drafter, MIXED)


def repeats() -> None:
    contract.test_texts_that_were_written_before_are_accepted(False)


FAULTS: list[tuple[Callable[[Patch], None], Callable[[], None]]] = [
    (choices_are_one_position_off, accepts),
    (choices_are_drawn_without_noise, accepts),
    (choices_are_drawn_without_noise, contract.test_hot_images_are_accepted_under_guidance),
    (choices_after_the_accepted_path_are_dropped, accepts),
    (drafts_start_at_the_pending_token, accepts),
    (steps_without_drafts_are_forgotten, text_of("jacobi")),
    (steps_without_drafts_are_forgotten, text_of("suffix")),
    (a_refilled_slot_keeps_its_length, text_of("jacobi")),
    (a_refilled_slot_keeps_its_length, text_of("suffix")),
    (rows_write_to_each_others_slots, text_of("jacobi")),
    (rows_write_to_each_others_slots, text_of("suffix")),
    (the_image_row_is_one_code_too_long, test_jacobi.test_a_window_wider_than_a_row_is_filled_from_filled_rows),
    (finished_outputs_are_never_noted, repeats),
    (the_index_never_reaches_the_device, repeats),
    (drafts_are_copied_from_one_place_too_far, repeats),
    (the_ngram_is_read_backwards, repeats),
    (the_rarest_continuation_is_drafted, test_suffix.test_the_worked_example_of_the_index),
    (ngrams_cross_the_ends_of_outputs, test_suffix.test_drafts_never_cross_the_end_of_an_output_or_a_visual_token),
    (
        a_match_of_one_token_replaces_the_rows_own,
        test_suffix.test_the_rows_own_text_comes_first_and_a_longer_match_in_finished_outputs_replaces_it,
    ),
    (the_corpus_grows_without_a_limit, lambda: test_suffix.test_tensors_of_the_index_never_change_their_size(7)),
]


@pytest.mark.parametrize(
    ("fault", "check"), FAULTS, ids=[f"{place}-{fault.__name__}" for place, (fault, _) in enumerate(FAULTS)]
)
def test_a_planted_fault_is_caught(
    fault: Callable[[Patch], None], check: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        fault(patch)
        try:
            check()
        except (AssertionError, IndexError, RuntimeError, ValueError):
            return
    pytest.fail(f"the check passes although {fault.__name__.replace('_', ' ')}")
