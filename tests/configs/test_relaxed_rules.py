"""Relaxed rules are marked as lossy, and refused if they could relax nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from actors.loading.method import ACCEPTANCES
from configs.load import load_preset
from configs.method import MethodConfig
from configs.schema import CaptionJobConfig
from decoding.acceptance import Fly, LVSpec, RandomRelaxation, Typical
from decoding.acceptance.relaxed import RelaxedRule

CHAIN = {"kind": "chain", "length": 10}


def method(acceptance: dict[str, Any], **changed: Any) -> MethodConfig:
    # Through JSON, as for a job file, because only there lists become tuples.
    return MethodConfig.model_validate_json(
        json.dumps({"drafter": {"kind": "model"}, "tree": CHAIN, "acceptance": acceptance} | changed)
    )


@pytest.mark.parametrize("kind", ["lvspec", "fly", "random", "typical"])
def test_a_relaxed_rule_is_lossy_and_needs_a_drafter(kind: str) -> None:
    assert method({"kind": kind}).verify_mode == "lossy"
    with pytest.raises(ValidationError, match=f"'{kind}' relaxes drafts, and the drafter 'none' makes none"):
        method({"kind": kind}, drafter={"kind": "none"})


def test_lossless_rules_are_reported_as_lossless() -> None:
    assert {method({"kind": kind}).verify_mode for kind in ("exact", "rejection")} == {"lossless"}


@pytest.mark.parametrize(
    ("tree", "window", "block_end", "legal"),
    [
        ({"kind": "chain", "length": 7}, 5, "margin", True),
        ({"kind": "chain", "length": 6}, 5, "margin", False),
        ({"kind": "chain", "length": 6}, 5, "fit", True),
        ({"kind": "chain", "length": 5}, 5, "fit", False),
        ({"kind": "chain", "length": 1}, 0, "margin", True),
        ({"kind": "static", "branching": [2, 2]}, 2, "fit", False),
        ({"kind": "static", "paths": [[0], [1], [0, 0], [0, 0, 0]]}, 2, "fit", True),
    ],
)
def test_a_window_has_to_fit_into_the_deepest_block(
    tree: dict[str, Any], window: int, block_end: str, legal: bool
) -> None:
    rule = {"kind": "fly", "window": window, "block_end": block_end}
    if legal:
        assert method(rule, tree=tree).acceptance.kind == "fly"
        return
    with pytest.raises(ValidationError, match="draft deeper, or take a smaller window"):
        method(rule, tree=tree)


@pytest.mark.parametrize(
    "rule",
    [
        {"kind": "lvspec", "loose": 1.01},
        {"kind": "lvspec", "loose": -0.1},
        {"kind": "lvspec", "top_visual": 0},
        {"kind": "fly", "min_entropy": -1.0},
        {"kind": "fly", "block_end": "loose"},
        {"kind": "random", "probability": 2.0},
        {"kind": "typical", "epsilon": 0.0},
        {"kind": "lvspec", "lossless": True},
    ],
)
def test_values_out_of_range_are_refused(rule: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        method(rule)


@pytest.mark.parametrize(
    ("preset", "rule", "options"),
    [
        ("zoo_lvspec", LVSpec, {"loose": 0.7, "top_visual": 10, "position_shift": True}),
        ("caption_qwen25vl_lvspec_tree", LVSpec, {"loose": 0.7, "top_visual": 10, "position_shift": True}),
        ("caption_qwen25vl_fly", Fly, {"min_entropy": 0.1, "window": 4, "top": 3, "margin": 0}),
        ("caption_qwen25vl_fly_gate", Fly, {"min_entropy": 0.1, "window": 0}),
        ("zoo_random", RandomRelaxation, {"probability": 0.5}),
        ("zoo_typical", Typical, {"epsilon": 0.09, "alpha": 0.3, "temperature": 0.7}),
    ],
)
def test_a_preset_builds_its_rule(preset: str, rule: type[RelaxedRule], options: dict[str, Any]) -> None:
    chosen = load_preset(CaptionJobConfig, preset).method
    made = ACCEPTANCES[chosen.acceptance.kind](**chosen.acceptance.model_dump(exclude={"kind"}))
    assert type(made) is rule
    assert {name: vars(made)[name] for name in options} == options


def test_the_two_branch_preset_is_two_chains_of_ten() -> None:
    tree = load_preset(CaptionJobConfig, "zoo_lvspec_tree").method.tree
    assert tree.kind == "static"
    assert sorted(tree.paths) == sorted((first, *(0,) * depth) for first in (0, 1) for depth in range(10))
