"""Planted faults of Jacobi and suffix decoding: each must make its check fail.

Under exact acceptance a wrong draft changes no token, so most checks are of the text that a drafter knows, and of the
acceptance length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import decoding.drafters.jacobi as jacobi
import decoding.drafters.suffix_index as suffix_index
from decoding.contracts import VerificationOutput
from decoding.drafters import JacobiDrafter, SuffixDrafter
from tests.conformance import planted
from tests.conformance import test_training_free as contract
from tests.conformance.catch_up import MIXED
from tests.conformance.planted import Patch
from tests.decoding.drafters import test_jacobi, test_suffix

pytestmark = pytest.mark.slow


def choices_are_drawn_without_noise(patch: Patch) -> None:
    patch.setattr(jacobi, "target_choice", lambda verification: verification.processed_logits.argmax(dim=-1))


def steps_without_drafts_are_forgotten(patch: Patch) -> None:
    for kind in (JacobiDrafter, SuffixDrafter):
        commit = kind.commit

        def forget(self: Any, verification: VerificationOutput, result: Any, commit: Any = commit) -> None:
            if verification.tree.num_levels:
                commit(self, verification, result)

        patch.setattr(kind, "commit", forget)


def rows_write_to_each_others_slots(patch: Patch) -> None:
    for kind in (JacobiDrafter, SuffixDrafter):
        commit = kind.commit

        def crossed(self: Any, verification: VerificationOutput, result: Any, commit: Any = commit) -> None:
            name = "_output" if isinstance(self, JacobiDrafter) else "_text"
            commit(self, verification, result)
            index = verification.slots.index
            getattr(self, name)[index] = getattr(self, name)[index.flip(0)]

        patch.setattr(kind, "commit", crossed)


def the_image_row_is_one_code_too_long(patch: Patch) -> None:
    made = JacobiDrafter.__init__
    patch.setattr(JacobiDrafter, "__init__", lambda self, grid=None: made(self, grid and grid + 1))


def finished_outputs_are_never_noted(patch: Patch) -> None:
    patch.setattr(SuffixDrafter, "finished", lambda self, token_ids: None)


def the_rarest_continuation_is_drafted(patch: Patch) -> None:
    where = suffix_index.np.where
    patch.setattr(suffix_index.np, "where", lambda mask, sizes, other: where(mask, 100 - sizes, other))


def ngrams_cross_the_ends_of_outputs(patch: Patch) -> None:
    patch.setattr(suffix_index, "_tokens_to_separator", lambda text: suffix_index.np.full(len(text), len(text)))


def accepts() -> None:
    contract.test_drafts_of_unchanged_choices_are_all_accepted(False)


def text_of(drafter: str) -> Callable[[], None]:
    return lambda: contract.test_training_free_drafters_track_the_text_at_every_depth(drafter, MIXED)


def repeats() -> None:
    contract.test_texts_that_were_written_before_are_accepted(False)


FAULTS: list[planted.Fault] = [
    (choices_are_drawn_without_noise, accepts),
    (choices_are_drawn_without_noise, contract.test_jacobi_accepts_drafts_of_guided_images_at_high_temperature),
    (steps_without_drafts_are_forgotten, text_of("jacobi")),
    (steps_without_drafts_are_forgotten, text_of("suffix")),
    (rows_write_to_each_others_slots, text_of("jacobi")),
    (rows_write_to_each_others_slots, text_of("suffix")),
    (the_image_row_is_one_code_too_long, test_jacobi.test_a_window_wider_than_a_row_is_filled_from_filled_rows),
    (finished_outputs_are_never_noted, repeats),
    (the_rarest_continuation_is_drafted, test_suffix.test_the_worked_example_of_the_index),
    (ngrams_cross_the_ends_of_outputs, test_suffix.test_drafts_never_cross_the_end_of_an_output_or_a_visual_token),
]


@planted.each(FAULTS)
def test_a_planted_fault_is_caught(fault: planted.Plant, check: planted.Check) -> None:
    planted.assert_caught(fault, check)
