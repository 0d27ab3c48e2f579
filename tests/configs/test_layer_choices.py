"""Options of self-speculation, and their refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from configs.load import ConfigError, load_preset
from configs.method import MethodConfig
from configs.schema import CaptionJobConfig


def method(**sections: Any) -> MethodConfig:
    return MethodConfig.model_validate_json(json.dumps(sections))


@pytest.mark.parametrize(("layers", "indices"), [(1, (0,)), (3, (0, 1, 2)), ([0], (0,)), ([0, 2, 5], (0, 2, 5))])
def test_a_number_names_the_first_layers_and_a_list_names_each(layers: Any, indices: tuple[int, ...]) -> None:
    chosen = method(drafter={"kind": "layer_skip", "layers": layers})
    assert chosen.drafter.indices == indices  # type: ignore[union-attr]
    assert not chosen.needs_checkpoint
    assert chosen.label == "layer_skip+chain+exact"


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        (0, "greater than or equal to 1"),
        (-1, "greater than or equal to 1"),
        (1001, "less than or equal to 1000"),
        (True, "valid integer"),
        (1.5, "valid integer"),
        ("3", "valid integer"),
        ([], "at least 1 item"),
        ([-1], "greater than or equal to 0"),
        ([1000], "less than 1000"),
        ([0, 0], r"layers: \[0, 0\] is not in ascending order, each layer once"),
        ([2, 1], r"layers: \[2, 1\] is not in ascending order"),
        (None, "valid integer"),
    ],
)
def test_layers_that_no_target_has_are_refused(layers: Any, reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        method(drafter={"kind": "layer_skip", "layers": layers})


def test_layers_must_be_given() -> None:
    with pytest.raises(ValidationError, match=r"layers\n  Field required"):
        method(drafter={"kind": "layer_skip"})


def test_a_prompt_of_its_own_is_refused() -> None:
    with pytest.raises(ValidationError, match="the drafter 'layer_skip' has no prompt of its own to change"):
        method(drafter={"kind": "layer_skip", "layers": 2}, contexts=[{"kind": "text_only"}])


def test_layers_determine_the_output_of_a_job_and_a_controller_does_not() -> None:
    first, other = (method(drafter={"kind": "layer_skip", "layers": layers}) for layers in (2, [0, 1]))
    assert first.content() != other.content()
    measured = method(drafter={"kind": "layer_skip", "layers": 2}, controller={"kind": "measured"})
    assert measured.content() == first.content()


def test_an_override_replaces_the_number_by_a_list() -> None:
    job = load_preset(CaptionJobConfig, "zoo_layer_skip", ["method.drafter.layers=1"])
    assert job.method.drafter.indices == (0,)  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match=r"method\.drafter.*layers"):
        load_preset(CaptionJobConfig, "zoo_layer_skip", ["method.drafter.layers=[1,1]"])
