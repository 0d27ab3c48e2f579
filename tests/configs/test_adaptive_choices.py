"""Options of SAGE and prompt lookup, and their refusals."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from actors.loading.method import build_tree
from configs.drafters import LookupDrafterConfig, ModelDrafterConfig
from configs.method import MethodConfig
from configs.trees import SageTreeConfig
from decoding.trees import OnlineSageTree, SageTree
from decoding.trees.static import SPECVLM_PATHS

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"min_depth": 9}, "must be in ascending order"),
    ({"max_width": 11}, "only top_k candidates"),
    ({"history_low": 4.0}, "history_low 4.0 is above history_high 3.0"),
    ({"max_nodes": 20}, "does not hold the 25 nodes"),
    ({"growth": "online", "source": "mean"}, "use root"),
    ({"first_paths": ((1,),)}, r"\[1\] needs \[0\]"),
    ({"first_paths": ((0, 0),)}, r"\[0, 0\] needs \[0\]"),
    ({"first_paths": ((),)}, "a path must not be empty"),
]


@pytest.mark.parametrize(("options", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_settings_that_contradict_each_other_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        SageTreeConfig(**options)


def test_lookup_refuses_a_shortest_match_above_the_longest() -> None:
    with pytest.raises(ValidationError, match="min_ngram_tokens 4 is above max_ngram_tokens 3"):
        LookupDrafterConfig(min_ngram_tokens=4)


def test_an_online_tree_is_refused_with_rejection_sampling_and_a_planned_one_is_not() -> None:
    rejection: Any = {"kind": "rejection"}
    with pytest.raises(ValidationError, match="would bias rejection"):
        MethodConfig(drafter=ModelDrafterConfig(), tree=SageTreeConfig(growth="online"), acceptance=rejection)
    assert (
        MethodConfig(drafter=ModelDrafterConfig(), tree=SageTreeConfig(), acceptance=rejection).tree == SageTreeConfig()
    )


def test_every_option_reaches_the_policy() -> None:
    tree = SageTreeConfig(threshold="node", max_nodes=9, first_paths=((0,), (1,)), depth_cap=12, source="mean")
    policy = build_tree(MethodConfig(drafter=ModelDrafterConfig(), tree=tree))
    assert isinstance(policy, SageTree)
    given = tree.model_dump(exclude={"kind", "growth", "first_paths"})
    assert vars(policy.settings) == given
    assert (policy.max_nodes, policy.max_levels) == (10, 12)
    default = build_tree(MethodConfig(drafter=ModelDrafterConfig(), tree=SageTreeConfig()))
    assert isinstance(default, SageTree)
    assert default._first_paths == SPECVLM_PATHS
    online = build_tree(MethodConfig(drafter=ModelDrafterConfig(), tree=SageTreeConfig(growth="online", max_nodes=9)))
    assert isinstance(online, OnlineSageTree)
    assert online.max_nodes == 10


def test_removed_options_of_sage_stay_in_the_content_of_old_outputs() -> None:
    tree = MethodConfig(drafter=ModelDrafterConfig(), tree=SageTreeConfig()).content()["tree"]
    old = {"order": "best_first", "count_root": False, "depth_rounding": "nearest", "min_children": 1}
    assert tree.items() >= old.items()
