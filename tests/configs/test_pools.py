"""Pools of actors: sizes, shares of a GPU, and labels."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError
from ray._private.label_utils import validate_label_key, validate_label_selector_value

from configs.pool import ActorPoolConfig, EnginePoolConfig, PoolConfig
from configs.schema import CaptionJobConfig
from configs.synthesis import VqPoolConfig
from configs.training import WorkersConfig

CONDITIONS = ["gpu", "!gpu", "in(a, b)", "!in(a,b)", "in(a)", "in()", "in(a", "-a", "a-", "!!a", "a b", "x" * 64]
NAMES = ["pool", "example.com/pool", "ray.io/accelerator-type", "", "-a", "a b", "a/", "x" * 64]


def message(kind: type[ActorPoolConfig] = PoolConfig, **fields: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        kind(**fields)
    return str(caught.value)


@pytest.mark.parametrize("size", [1, 5])
def test_the_initial_size_of_a_pool_is_between_its_minimum_and_maximum(size: int) -> None:
    result = message(min_size=2, max_size=4, initial_size=size)
    assert f"initial_size ({size}) is not between min_size (2) and max_size (4)" in result
    assert PoolConfig(min_size=2, max_size=4, initial_size=4).initial_size == 4


def test_an_actor_has_a_share_of_one_gpu_or_whole_ones() -> None:
    assert PoolConfig(num_gpus=0.25).num_gpus == 0.25
    assert "must be a share of one GPU, or a whole number of them" in message(num_gpus=1.5)
    assert "num_gpus (2) is more than one" in message(EnginePoolConfig, num_gpus=2.0)
    assert "models run on one GPU" in message(ActorPoolConfig, num_gpus=1.5)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("one", "Input should be a valid number, or auto"),
        (True, "Input should be a valid number, or auto"),
        (None, "Input should be a valid number, or auto"),
        (-0.5, "Input should be greater than or equal to 0"),
        (float("nan"), "Input should be a finite number"),
        (float("inf"), "Input should be a finite number"),
        (0.00005, "Input should be 0 or at least 0.0001, Ray's smallest share"),
    ],
)
def test_other_numbers_of_gpus_are_refused(value: Any, text: str) -> None:
    assert text in message(num_gpus=value)
    with pytest.raises(ValidationError, match=text):
        WorkersConfig(num_gpus=value)


def test_the_number_of_gpus_is_chosen_for_the_job_unless_it_is_named() -> None:
    assert (PoolConfig().num_gpus, VqPoolConfig().num_gpus, WorkersConfig().num_gpus) == ("auto", "auto", "auto")
    assert (PoolConfig().gpus, WorkersConfig().gpus, WorkersConfig(num_gpus=2).gpus) == (0, 0, 2)
    assert isinstance(PoolConfig(num_gpus=1).num_gpus, float)


def test_a_target_over_several_gpus_has_no_device_of_its_own() -> None:
    target = {"path": "/target"}
    job = {"source": {"kind": "images", "path": "in"}, "prompt": "Describe.", "pool": {"num_gpus": 2.0}}
    whole = {**job, "model": {"target": target}, "method": {"drafter": {"kind": "none"}}, "sink": {"path": "out"}}
    assert CaptionJobConfig.model_validate(whole).pool.num_gpus == 2
    with pytest.raises(
        ValidationError, match=r"model\.target\.device is 'cuda:1', but with pool\.num_gpus 2 its layers"
    ):
        CaptionJobConfig.model_validate({**whole, "model": {"target": {**target, "device": "cuda:1"}}})


@pytest.mark.parametrize("condition", CONDITIONS)
def test_conditions_on_labels_are_taken_and_refused_as_ray_does(condition: str) -> None:
    if validate_label_selector_value(condition) is None:
        assert PoolConfig(label_selector={"pool": condition}).label_selector == {"pool": condition}
    else:
        assert "is none of value, !value, in(a, b), !in(a, b)" in message(decode_label_selector={"pool": condition})


@pytest.mark.parametrize("name", NAMES)
def test_names_of_labels_are_taken_and_refused_as_ray_does(name: str) -> None:
    if validate_label_key(name) is None:
        assert PoolConfig(label_selector={name: "a"}).label_selector == {name: "a"}
    else:
        assert "is not a label name" in message(label_selector={name: "a"})
