"""Methods that may have a measured controller, and the controller that is built."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from pydantic import ValidationError

from actors.loading.method import build_method
from configs.load import ConfigError, validate
from configs.method import MeasuredControllerConfig, MethodConfig
from configs.section import Section
from decoding.controllers.base import Controller
from decoding.controllers.goodput import GoodputController
from tests import toys

MEASURED = {"kind": "measured"}
LOOKUP = {"kind": "lookup"}


def method(**sections: Any) -> MethodConfig:
    return MethodConfig.model_validate_json(json.dumps(sections))


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
def test_controllers_that_measure_time_are_refused_if_depths_change_tokens(acceptance: Any, reason: str) -> None:
    tree = {"kind": "chain", "length": 9}
    assert method(drafter=LOOKUP, acceptance=acceptance, tree=tree, controller={"kind": "none"})
    with pytest.raises(ValidationError, match=reason):
        method(drafter=LOOKUP, acceptance=acceptance, tree=tree, controller=MEASURED)


def test_plain_decoding_refuses_a_controller() -> None:
    with pytest.raises(ValidationError, match="'measured' has nothing to decide where the drafter is 'none'"):
        method(controller=MEASURED)


@pytest.mark.parametrize("value", [-0.1, 0.6, "a lot"])
def test_an_impossible_share_of_trials_is_refused(value: Any) -> None:
    with pytest.raises(ValidationError, match="max_exploration"):
        method(drafter=LOOKUP, controller={**MEASURED, "max_exploration": value})


@pytest.mark.parametrize("dotted_path", ["method.controller", "method.auto.candidates.1.controller"])
def test_a_removed_key_is_refused_by_name_and_an_old_record_at_its_default_is_read(dotted_path: str) -> None:
    controller = {"kind": "measured", "per_row": True}
    measured = {"drafter": LOOKUP, "controller": controller, "name": "measured"}
    several = {"auto": {"candidates": [{"drafter": LOOKUP}, measured]}}
    data = {"method": measured if dotted_path == "method.controller" else several}
    removed = f"^{re.escape(f'job.yaml: {dotted_path}.per_row: was removed: rows do not compete for drafts')}[^\\n]*$"
    for recorded in (False, True):
        with pytest.raises(ConfigError, match=removed):
            validate(Outer, data, "job.yaml", recorded)
    controller["per_row"] = False
    with pytest.raises(ConfigError, match=removed):
        validate(Outer, data, "job.yaml")
    kept = validate(Outer, data, "job.yaml", recorded=True).method
    assert MeasuredControllerConfig() in [method.controller for method in kept.methods]


class Outer(Section):
    """A job with a method only."""

    method: MethodConfig


def test_a_controller_is_made_for_the_depth_of_the_tree() -> None:
    target = toys.target("llama")
    config = method(
        drafter=LOOKUP, tree={"kind": "chain", "length": 7}, controller={**MEASURED, "max_exploration": 0.5}
    )
    made = build_method(config, None, target).controller
    assert isinstance(made, GoodputController)
    assert (made.depths, made.max_exploration) == ((0, 1, 2, 3, 5, 7), 0.5)
    assert type(build_method(method(drafter=LOOKUP), None, target).controller) is Controller
    assert GoodputController(3).max_exploration == MeasuredControllerConfig().max_exploration


def test_two_engines_never_share_a_controller() -> None:
    config = method(drafter=LOOKUP, controller=MEASURED)
    made = [build_method(config, None, toys.target("llama")).controller for _ in range(2)]
    assert made[0] is not made[1]


def test_the_controller_is_not_part_of_the_fingerprint() -> None:
    assert method(drafter=LOOKUP, controller=MEASURED).content() == method(drafter=LOOKUP).content()
    assert method(drafter=LOOKUP, controller=MEASURED).label == "lookup+chain+exact"


def test_a_candidate_of_a_trial_may_have_a_controller() -> None:
    candidate = {"drafter": LOOKUP, "controller": MEASURED}
    made = method(auto={"candidates": [candidate]})
    assert isinstance(made.methods[1].controller, MeasuredControllerConfig)
    with pytest.raises(ValidationError, match="controller: the candidates of auto have their own"):
        method(auto={"candidates": [candidate]}, controller=MEASURED)
