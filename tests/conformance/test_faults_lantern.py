"""Planted faults in LANTERN: each must make its check fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import decoding.acceptance.lantern as lantern
import decoding.acceptance.lantern_residual as residual
import decoding.acceptance.relaxed as relaxed
from decoding.acceptance.neighbourhood import WITHIN, Neighbourhood
from decoding.acceptance.relaxed import RelaxedRule
from tests.conformance import test_lantern_images as on_images
from tests.decoding.acceptance import test_lantern as coupled
from tests.decoding.acceptance import test_lantern_residual as residuals
from tests.decoding.acceptance import test_neighbourhood as by_hand

pytestmark = pytest.mark.slow

Patch = pytest.MonkeyPatch


def the_first_neighbour_beyond_the_bound_is_let_in(patch: Patch) -> None:
    find = Neighbourhood.members

    def one_more(self: Any, tokens: Tensor, own: Tensor, near: Tensor, probs: Tensor) -> Tensor:
        inside = find(self, tokens, own, near, probs)
        return torch.cat([torch.ones_like(inside[..., :1]), inside[..., :-1]], dim=-1)

    patch.setattr(Neighbourhood, "members", one_more)


def smaller_neighbours_behind_the_bound_are_let_in(patch: Patch) -> None:
    def gaps(self: Any, tokens: Tensor, own: Tensor, near: Tensor, probs: Tensor) -> Tensor:
        return probs <= self.delta

    patch.setattr(Neighbourhood, "members", gaps)


def k_does_not_count_the_draft(patch: Patch) -> None:
    made = Neighbourhood.__init__
    patch.setattr(Neighbourhood, "__init__", lambda self, t, k, d, v, _: made(self, t, k, d, v, False))


def the_table_is_shifted_by_a_row(patch: Patch) -> None:
    opened = Neighbourhood.open

    def shift(self: Any, spec: Any) -> None:
        opened(self, spec)
        self._near = self._near.roll(1, 0)

    patch.setattr(Neighbourhood, "open", shift)


def the_bound_counts_the_drafts_own_probability(patch: Patch) -> None:
    patch.setitem(WITHIN, "tvd", lambda own, moved, bound: own + moved <= bound)


def the_divergence_is_in_bits(patch: Patch) -> None:
    nats = WITHIN["jsd"]
    patch.setitem(WITHIN, "jsd", lambda own, moved, bound: nats(own, moved, bound * np.log(2)))


def the_multiple_leaves_out_the_drafts_own(patch: Patch) -> None:
    patch.setitem(WITHIN, "multiplicative", lambda own, moved, bound: moved <= bound * own)


def gathered_probability_is_forgotten(patch: Patch) -> None:
    find = lantern._at_drafts

    def alone(judgement: Any, tokens: Tensor) -> Tensor:
        out = find(judgement, tokens)
        return torch.cat([out[..., :2], 0 * out[..., 2:]], dim=-1)

    patch.setattr(lantern, "_at_drafts", alone)


def a_draft_is_judged_by_what_follows_it(patch: Patch) -> None:
    find = lantern._at_drafts

    def own_node(judgement: Any, tokens: Tensor) -> Tensor:
        nodes = torch.arange(tokens.shape[1]).expand(tokens.shape[0], -1)
        return find(replace(judgement, tree=replace(judgement.tree, parents=nodes)), tokens)

    patch.setattr(lantern, "_at_drafts", own_node)


def greedy_rows_take_whatever_holds_the_best_token_only(patch: Patch) -> None:
    pardon = lantern.Lantern.pardon

    def coupled_only(self: Any, judgement: Any, seen: Any) -> Tensor:
        rows = replace(judgement.rows, temperature=torch.ones_like(judgement.rows.temperature))
        return pardon(self, replace(judgement, rows=rows), seen)

    patch.setattr(lantern.Lantern, "pardon", coupled_only)


def every_sibling_that_passes_is_followed(patch: Patch) -> None:
    patch.setattr(lantern.Lantern, "accepts", RelaxedRule.accepts)


def an_invalid_sibling_goes_first(patch: Patch) -> None:
    accepts = lantern.Lantern.accepts

    def blind(self: Any, judgement: Any, seen: Any) -> Tensor:
        tree = judgement.tree
        return accepts(self, replace(judgement, tree=replace(tree, valid=torch.ones_like(tree.valid))), seen)

    patch.setattr(lantern.Lantern, "accepts", blind)


def the_targets_draw_ignores_the_shared_noise(patch: Patch) -> None:
    patch.setattr(relaxed, "target_choice", lambda one: one.warped.argmax(dim=-1))


def special_tokens_lend(patch: Patch) -> None:
    patch.setattr(Neighbourhood, "may_lend", lambda self, tokens, near: torch.ones_like(near, dtype=torch.bool))


def the_residual_keeps_the_neighbours(patch: Patch) -> None:
    def kept(self: Any, trial: Any) -> tuple[Tensor, Tensor]:
        near, members = residual.gather_members(self.neighbourhood, trial, trial.law)
        own = trial.mass.gather(1, trial.token[:, None])[:, 0]
        left = (trial.mass - trial.drawn_from).clamp_min(0)
        return own + (trial.mass.gather(1, near) * members).sum(-1), residual.normalise(left, trial.mass)

    patch.setattr(residual.PaperResidual, "weigh", kept)


def the_residual_forgets_the_drafter(patch: Patch) -> None:
    weigh = residual.PaperResidual.weigh

    def certain(self: Any, trial: Any) -> tuple[Tensor, Tensor]:
        only = torch.nn.functional.one_hot(trial.token, trial.mass.shape[-1]).float()
        return weigh(self, replace(trial, drawn_from=only))

    patch.setattr(residual.PaperResidual, "weigh", certain)


def the_paper_judges_by_what_is_left(patch: Patch) -> None:
    gather = residual.gather_members
    patch.setattr(residual, "gather_members", lambda hood, trial, law: gather(hood, trial, trial.mass))


def the_code_empties_what_it_looked_at_and_no_more(patch: Patch) -> None:
    patch.setattr(Neighbourhood, "around_and_one_more", Neighbourhood.around)


def siblings_in_turn() -> None:
    residuals.test_certain_siblings_lead_to_the_distribution_worked_out_by_hand((3, 1, 2), "paper", "tvd", 0.46)


def slow_loop() -> None:
    coupled.test_greedy_verdicts_equal_a_slow_loop_written_from_the_paper(4, "tvd")


def one_neighbour_more() -> None:
    residuals.test_the_codes_residual_of_a_certain_draft_empties_one_neighbour_more_than_is_looked_at()


FAULTS: list[tuple[Callable[[Patch], None], Callable[[], object]]] = [
    (
        the_first_neighbour_beyond_the_bound_is_let_in,
        by_hand.test_the_total_variation_never_exceeds_delta_and_one_more_neighbour_would,
    ),
    (
        smaller_neighbours_behind_the_bound_are_let_in,
        by_hand.test_neighbours_are_added_while_their_probability_stays_within_delta,
    ),
    (k_does_not_count_the_draft, by_hand.test_k_counts_the_draft_or_does_not),
    (the_table_is_shifted_by_a_row, slow_loop),
    (the_bound_counts_the_drafts_own_probability, by_hand.test_the_closed_forms_find_what_the_definition_finds),
    (the_divergence_is_in_bits, by_hand.test_the_closed_forms_find_what_the_definition_finds),
    (the_multiple_leaves_out_the_drafts_own, by_hand.test_the_closed_forms_find_what_the_definition_finds),
    (gathered_probability_is_forgotten, slow_loop),
    (a_draft_is_judged_by_what_follows_it, slow_loop),
    (
        a_draft_is_judged_by_what_follows_it,
        lambda: on_images.test_every_code_against_the_targets_choice_was_close_to_it_and_counted(
            "sampled-guided", "chain"
        ),
    ),
    (greedy_rows_take_whatever_holds_the_best_token_only, slow_loop),
    (
        every_sibling_that_passes_is_followed,
        coupled.test_of_siblings_whose_neighbourhoods_hold_the_draw_the_first_is_taken,
    ),
    (an_invalid_sibling_goes_first, coupled.test_an_invalid_sibling_takes_nothing_from_the_next),
    (
        the_targets_draw_ignores_the_shared_noise,
        lambda: coupled.test_a_sampled_token_has_the_distribution_of_the_papers_rule([12], 0.16),
    ),
    (special_tokens_lend, residuals.test_special_tokens_keep_their_probability),
    (the_residual_keeps_the_neighbours, siblings_in_turn),
    (
        the_residual_forgets_the_drafter,
        lambda: residuals.test_drawn_siblings_lead_to_the_distribution_worked_out_by_hand(1, "paper", "tvd", 0.21),
    ),
    (the_paper_judges_by_what_is_left, siblings_in_turn),
    (the_code_empties_what_it_looked_at_and_no_more, one_neighbour_more),
]


@pytest.mark.parametrize(("fault", "check"), FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
def test_a_planted_fault_is_caught(
    fault: Callable[[Patch], None], check: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    try:
        check()
    except (AssertionError, IndexError, RuntimeError):
        return
    pytest.fail(f"the check passes although {fault.__name__.replace('_', ' ')}")


@pytest.mark.parametrize("place", range(len(FAULTS)), ids=[fault.__name__ for fault, _ in FAULTS])
def test_the_same_check_passes_without_the_fault(place: int) -> None:
    FAULTS[place][1]()
