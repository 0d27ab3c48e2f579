"""Methods that may have a measured controller, and the controller that is built."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from actors.loading.method import build_method, build_tree, make_controller
from configs.method import MeasuredController, Method
from decoding.controllers.base import Controller
from decoding.controllers.goodput import GoodputController
from tests import toys

MEASURED = {"kind": "measured"}
LOOKUP = {"kind": "lookup"}


def method(**sections: Any) -> Method:
    return Method.model_validate_json(json.dumps(sections))


@pytest.mark.parametrize(
    ("acceptance", "reason"),
    [
        ({"kind": "rejection"}, "chooses depths by the clock, and under acceptance 'rejection' tokens follow"),
        ({"kind": "lvspec"}, "under acceptance 'lvspec' tokens follow from depths"),
        ({"kind": "fly"}, "use exact"),
        ({"kind": "typical"}, "use exact"),
        ({"kind": "random"}, "use exact"),
    ],
)
def test_depths_by_the_clock_are_refused_where_tokens_follow_from_them(acceptance: Any, reason: str) -> None:
    tree = {"kind": "chain", "length": 9}
    assert method(drafter=LOOKUP, acceptance=acceptance, tree=tree, controller={"kind": "none"})
    with pytest.raises(ValidationError, match=reason):
        method(drafter=LOOKUP, acceptance=acceptance, tree=tree, controller=MEASURED)


def test_plain_decoding_has_no_depth_to_choose() -> None:
    with pytest.raises(ValidationError, match="'measured' has nothing to decide where the drafter is 'none'"):
        method(controller=MEASURED)


@pytest.mark.parametrize("value", [-0.1, 0.6, "a lot"])
def test_an_impossible_share_of_trials_is_refused(value: Any) -> None:
    with pytest.raises(ValidationError, match="max_exploration"):
        method(drafter=LOOKUP, controller={**MEASURED, "max_exploration": value})


PER_ROW = {**MEASURED, "per_row": True}


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        ({"drafter": LOOKUP}, "controller.per_row: drafts of 'lookup' have no probabilities"),
        ({"drafter": {"kind": "suffix"}}, "drafts of 'suffix' have no probabilities"),
        ({"drafter": {"kind": "model"}, "tree": {"kind": "sage"}}, "the tree 'sage' plans nodes row by row itself"),
    ],
)
def test_rows_compete_only_where_drafts_can_be_compared(sections: dict[str, Any], reason: str) -> None:
    assert method(**sections, controller=MEASURED)
    with pytest.raises(ValidationError, match=reason):
        method(**sections, controller=PER_ROW)


@pytest.mark.parametrize(
    ("tree", "max_drafts"),
    [
        ({"kind": "chain", "length": 4}, 4),
        ({"kind": "static", "branching": [2, 2]}, 6),
        ({"kind": "dynamic", "top_k": 3, "depth": 2, "total_tokens": 12}, 11),
    ],
)
def test_rows_compete_for_all_drafts_of_the_tree(tree: dict[str, Any], max_drafts: int) -> None:
    config = method(drafter={"kind": "eagle"}, tree=tree, controller=PER_ROW)
    controller = make_controller(config.controller, build_tree(config))
    assert isinstance(controller, GoodputController)
    assert controller.limits_drafts
    assert controller.shares.max_drafts == max_drafts
    assert not make_controller(MeasuredController(), build_tree(config)).limits_drafts


def test_a_controller_is_made_for_the_depth_of_the_tree() -> None:
    target = toys.target("llama")
    config = method(
        drafter=LOOKUP, tree={"kind": "chain", "length": 7}, controller={**MEASURED, "max_exploration": 0.5}
    )
    made = build_method(config, None, target).controller
    assert isinstance(made, GoodputController)
    assert (made.depths, made.max_exploration) == ((0, 1, 2, 3, 5, 7), 0.5)
    assert type(build_method(method(drafter=LOOKUP), None, target).controller) is Controller
    assert GoodputController(3).max_exploration == MeasuredController().max_exploration


def test_two_engines_never_share_a_controller() -> None:
    config = method(drafter=LOOKUP, controller=MEASURED)
    made = [build_method(config, None, toys.target("llama")).controller for _ in range(2)]
    assert made[0] is not made[1]


def test_the_controller_is_no_part_of_what_decides_the_output() -> None:
    assert method(drafter=LOOKUP, controller=MEASURED).content() == method(drafter=LOOKUP).content()
    assert method(drafter=LOOKUP, controller=MEASURED).label == "lookup+chain+exact"


def test_a_candidate_of_a_trial_may_have_a_controller() -> None:
    candidate = {"drafter": LOOKUP, "controller": MEASURED}
    made = method(auto={"candidates": [candidate]})
    assert isinstance(made.methods[1].controller, MeasuredController)
    with pytest.raises(ValidationError, match="controller: the candidates of auto have their own"):
        method(auto={"candidates": [candidate]}, controller=MEASURED)
