"""Planted faults in LANTERN: each must make its check fail."""

from __future__ import annotations

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
from tests.conformance import planted
from tests.conformance import test_lantern_images as on_images
from tests.conformance.planted import Patch
from tests.decoding.acceptance import test_lantern as coupled
from tests.decoding.acceptance import test_lantern_residual as residuals
from tests.decoding.acceptance import test_neighbourhood as by_hand

pytestmark = pytest.mark.slow


def the_first_neighbour_beyond_the_bound_is_accepted(patch: Patch) -> None:
    find = Neighbourhood.members

    def one_more(self: Any, tokens: Tensor, own: Tensor, near: Tensor, probs: Tensor) -> Tensor:
        inside = find(self, tokens, own, near, probs)
        return torch.cat([torch.ones_like(inside[..., :1]), inside[..., :-1]], dim=-1)

    patch.setattr(Neighbourhood, "members", one_more)


def k_does_not_count_the_draft(patch: Patch) -> None:
    made = Neighbourhood.__init__
    patch.setattr(Neighbourhood, "__init__", lambda self, t, k, d, v, _: made(self, t, k, d, v, False))


def the_divergence_is_in_bits(patch: Patch) -> None:
    nats = WITHIN["jsd"]
    patch.setitem(WITHIN, "jsd", lambda own, moved, bound: nats(own, moved, bound * np.log(2)))


def gathered_probability_is_ignored(patch: Patch) -> None:
    find = lantern._at_drafts

    def alone(verification: Any, tokens: Tensor) -> Tensor:
        out = find(verification, tokens)
        return torch.cat([out[..., :2], 0 * out[..., 2:]], dim=-1)

    patch.setattr(lantern, "_at_drafts", alone)


def drafts_are_verified_with_the_logits_after_them(patch: Patch) -> None:
    find = lantern._at_drafts

    def own_node(verification: Any, tokens: Tensor) -> Tensor:
        nodes = torch.arange(tokens.shape[1]).expand(tokens.shape[0], -1)
        return find(replace(verification, tree=replace(verification.tree, parents=nodes)), tokens)

    patch.setattr(lantern, "_at_drafts", own_node)


def every_sibling_that_passes_is_followed(patch: Patch) -> None:
    patch.setattr(lantern.Lantern, "accepts", RelaxedRule.accepts)


def the_targets_draw_ignores_the_shared_noise(patch: Patch) -> None:
    patch.setattr(relaxed, "target_choice", lambda verification: verification.processed_logits.argmax(dim=-1))


def the_residual_keeps_the_neighbours(patch: Patch) -> None:
    def kept(self: Any, trial: Any) -> tuple[Tensor, Tensor]:
        near, members = residual.gather_members(self.neighbourhood, trial, trial.law)
        own = trial.mass.gather(1, trial.token[:, None])[:, 0]
        left = (trial.mass - trial.drawn_from).clamp_min(0)
        return own + (trial.mass.gather(1, near) * members).sum(-1), residual.normalise(left, trial.mass)

    patch.setattr(residual.PaperResidual, "weigh", kept)


def the_residual_ignores_the_drafters_distribution(patch: Patch) -> None:
    weigh = residual.PaperResidual.weigh

    def certain(self: Any, trial: Any) -> tuple[Tensor, Tensor]:
        only = torch.nn.functional.one_hot(trial.token, trial.mass.shape[-1]).float()
        return weigh(self, replace(trial, drawn_from=only))

    patch.setattr(residual.PaperResidual, "weigh", certain)


def siblings_in_turn() -> None:
    residuals.test_certain_siblings_lead_to_the_distribution_worked_out_by_hand((3, 1, 2), "paper", "tvd", 0.46)


def slow_loop() -> None:
    coupled.test_greedy_verdicts_equal_a_slow_loop_written_from_the_paper(4, "tvd")


FAULTS: list[planted.Fault] = [
    (
        the_first_neighbour_beyond_the_bound_is_accepted,
        by_hand.test_the_total_variation_never_exceeds_delta_and_one_more_neighbour_would,
    ),
    (k_does_not_count_the_draft, by_hand.test_k_counts_the_draft_if_k_counts_draft_is_set),
    (the_divergence_is_in_bits, by_hand.test_the_closed_forms_give_the_neighbours_of_the_definition),
    (gathered_probability_is_ignored, slow_loop),
    (drafts_are_verified_with_the_logits_after_them, slow_loop),
    (
        drafts_are_verified_with_the_logits_after_them,
        lambda: on_images.test_every_code_against_the_targets_choice_was_close_to_it_and_counted(
            "sampled-guided", "chain"
        ),
    ),
    (
        every_sibling_that_passes_is_followed,
        coupled.test_of_siblings_whose_neighbourhoods_hold_the_draw_the_first_is_taken,
    ),
    (
        the_targets_draw_ignores_the_shared_noise,
        lambda: coupled.test_a_sampled_token_has_the_distribution_of_the_papers_rule([12], 0.16),
    ),
    (the_residual_keeps_the_neighbours, siblings_in_turn),
    (
        the_residual_ignores_the_drafters_distribution,
        lambda: residuals.test_drawn_siblings_lead_to_the_distribution_worked_out_by_hand(1, "paper", "tvd", 0.21),
    ),
]


@planted.each(FAULTS)
def test_a_planted_fault_is_caught(fault: planted.Plant, check: planted.Check) -> None:
    planted.assert_caught(fault, check)
