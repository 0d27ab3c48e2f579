"""Options of LANTERN and named trees, and their refusals."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest
import torch
from pydantic import ValidationError

from actors.loading.method import build_lantern, build_method, build_tree
from configs.acceptance import LanternAcceptanceConfig
from configs.load import ConfigError
from configs.method import MethodConfig
from configs.schema import CaptionJobConfig
from configs.synthesis import SynthesizeJobConfig
from configs.trees import NAMED_TREE_LEVELS, StaticTreeConfig
from decoding.acceptance import Lantern, LanternResidual
from decoding.trees.static import NAMED_PATHS
from models.llamagen.neighbours import CodebookError, Proximity, nearest_codes
from tests.toys import images


def codebook(num_codes: int = 60) -> torch.Tensor:
    return torch.randn(num_codes, 8, generator=torch.Generator().manual_seed(3))


def method(acceptance: dict[str, Any], **changed: Any) -> MethodConfig:
    data = {"drafter": {"kind": "eagle"}, "tree": {"kind": "dynamic"}, "acceptance": {"kind": "lantern"} | acceptance}
    return MethodConfig.model_validate_json(json.dumps(data | changed))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"k": 0}, "greater than or equal to 1"),
    ({"k": 1001}, "less than or equal to 1000"),
    ({"delta": -0.1}, "greater than or equal to 0"),
    ({"delta": 1.5}, "tvd is never above 1; .* LANTERN\\+\\+'s λ, which is divergence: multiplicative"),
    ({"delta": 5.0, "divergence": "jsd"}, "jsd is never above 1"),
    ({"divergence": "multiplicative"}, "delta 0.1 is λ for the divergence multiplicative, and must be at least 1"),
    ({"metric": "cosine", "codebook": "normalised"}, "the metric cosine, which compares directions already"),
    ({"metric": "random", "codebook": "normalised"}, "the metric random, which compares no codes"),
    ({"seed": 3}, "seed 3 is for the metric random; l2 draws nothing"),
    ({"draw": "residual"}, "'coupled', 'paper' or 'code'"),
    ({"lossless": True}, "Extra inputs are not permitted"),
]


@pytest.mark.parametrize(("options", "reason"), REFUSED, ids=[str(options) for options, _ in REFUSED])
def test_options_without_effect_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        method(options)


def test_lantern_is_lossy_and_needs_a_drafter() -> None:
    assert method({}).verify_mode == "lossy"
    with pytest.raises(ValidationError, match="'lantern' relaxes drafts, and the drafter 'none' makes none"):
        method({}, drafter={"kind": "none"})


@pytest.mark.parametrize("draw", ["paper", "code"])
def test_residual_draws_are_refused_with_an_online_tree(draw: str) -> None:
    online = {"kind": "sage", "growth": "online"}
    with pytest.raises(ValidationError, match=r"would bias rejection sampling; .* or acceptance\.draw coupled"):
        method({"draw": draw}, tree=online)
    assert method({}, tree=online).acceptance.kind == "lantern"
    assert method({"draw": draw}, tree={"kind": "sage"}).acceptance.kind == "lantern"


def test_a_caption_job_refuses_lantern() -> None:
    job: dict[str, Any] = {
        "source": {"kind": "parquet", "path": "in"},
        "prompt": "Describe it.",
        "model": {"target": {"path": "t"}, "drafter": {"path": "d"}},
        "method": {"drafter": {"kind": "model"}, "acceptance": {"kind": "lantern"}},
        "sink": {"path": "out"},
    }
    with pytest.raises(ValidationError, match=r"method\.acceptance 'lantern' accepts codes of similar images"):
        CaptionJobConfig.model_validate_json(json.dumps(job))


def test_a_job_that_writes_codes_only_still_names_the_codebook() -> None:
    job: dict[str, Any] = {
        "source": {"kind": "text", "path": "in"},
        "prompt": "{text}",
        "model": {"target": {"path": "t"}, "drafter": {"path": "d"}, "condition": {"path": "c"}},
        "method": {"drafter": {"kind": "eagle"}, "tree": {"kind": "dynamic"}, "acceptance": {"kind": "lantern"}},
        "sink": {"path": "out", "images": False},
    }
    with pytest.raises(ValidationError, match=r"model\.vq must name its model"):
        SynthesizeJobConfig.model_validate_json(json.dumps(job))
    job["model"]["vq"] = {"path": "v"}
    assert SynthesizeJobConfig.model_validate_json(json.dumps(job)).method.acceptance.kind == "lantern"


# --- built ---------------------------------------------------------------------------------------------------------


def test_every_option_reaches_the_rule() -> None:
    choice = LanternAcceptanceConfig(
        k=20, k_counts_draft=False, delta=5.0, divergence="multiplicative", metric="cosine"
    )
    rule = build_lantern(choice, codebook(), 60)
    assert type(rule) is Lantern
    hood = rule.neighbourhood
    assert (hood.num_neighbours, hood.delta, hood.divergence) == (20, 5.0, "multiplicative")
    assert hood.table.equal(nearest_codes(codebook(), 59, Proximity("cosine")))
    counted = build_lantern(LanternAcceptanceConfig(k=20, codebook="normalised"), codebook(), 60).neighbourhood
    assert counted.num_neighbours == 19
    assert counted.table.equal(nearest_codes(codebook(), 59, Proximity("l2", normalised=True)))
    lot = build_lantern(LanternAcceptanceConfig(k=20, metric="random", seed=4), codebook(), 60).neighbourhood
    assert lot.table.equal(nearest_codes(codebook(), 59, Proximity("random", seed=4)))


@pytest.mark.parametrize("draw", ["paper", "code"])
def test_residuals_have_a_rule_of_their_own(draw: Any) -> None:
    rule = build_lantern(LanternAcceptanceConfig(k=20, draw=draw), codebook(), 60)
    assert isinstance(rule, LanternResidual)
    assert type(rule._drawn).__name__ == f"{draw.capitalize()}Residual"


def test_a_method_over_an_image_model_takes_its_codebook() -> None:
    target = images.target("text")
    built = build_method(method({"k": 20}), images.eagle_network(target), target, codebook())
    assert isinstance(built.acceptance, Lantern)


def test_the_codebook_of_another_model_is_refused_before_a_table_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.loading.method.nearest_codes", None)
    with pytest.raises(CodebookError, match="the codebook has 60 codes, but the target draws from 16384"):
        build_lantern(LanternAcceptanceConfig(), codebook(), 16384)


@pytest.mark.parametrize(
    ("k", "counts", "legal"), [(60, True, True), (61, True, False), (59, False, True), (60, False, False)]
)
def test_more_neighbours_than_codes_are_refused(k: int, counts: bool, legal: bool) -> None:
    choice = LanternAcceptanceConfig(k=k, k_counts_draft=counts)
    if legal:
        assert build_lantern(choice, codebook(), 60).neighbourhood.num_neighbours == 59
        return
    with pytest.raises(
        ConfigError, match=f"method.acceptance.k: {k} asks for 60 neighbours of a code, .* has 59; take a smaller k"
    ):
        build_lantern(choice, codebook(), 60)


# --- named trees ---------------------------------------------------------------------------------------------------


def test_the_schema_lists_the_named_trees() -> None:
    names = get_args(get_args(StaticTreeConfig.model_fields["name"].annotation)[0])
    assert set(names) == set(NAMED_PATHS)
    assert {max(map(len, paths)) for paths in NAMED_PATHS.values()} == {NAMED_TREE_LEVELS}


@pytest.mark.parametrize(
    ("name", "levels"), [("mc_sim_7b_63", [4, 8, 8, 3, 2]), ("naive_extend_57", [5, 13, 16, 14, 9])]
)
def test_a_named_tree_has_every_parent_and_sibling_and_the_published_number_of_nodes(
    name: str, levels: list[int]
) -> None:
    paths = NAMED_PATHS[name]
    assert [sum(len(path) == depth for path in paths) for depth in range(1, 6)] == levels
    assert StaticTreeConfig(paths=paths).paths == paths, "every parent and every better sibling is there"
    built = build_tree(method({"draw": "code"}, tree={"kind": "static", "name": name}))
    assert (built.max_nodes, built.max_levels) == (sum(levels) + 1, 5)


def test_a_fixed_tree_is_given_by_branching_paths_or_name_alone() -> None:
    for data in ({}, {"name": "naive_extend_57", "branching": [2]}, {"name": "naive_extend_57", "paths": [[0]]}):
        with pytest.raises(ValidationError, match="give one of branching, paths and name"):
            StaticTreeConfig.model_validate_json(json.dumps(data))
    with pytest.raises(ValidationError, match="'mc_sim_7b_63' or 'naive_extend_57'"):
        StaticTreeConfig.model_validate_json('{"name": "medusa"}')


def test_a_named_tree_has_a_depth_for_rules_that_ask() -> None:
    rule = {"kind": "fly", "window": 5, "block_end": "fit"}
    with pytest.raises(ValidationError, match="the tree is 5 deep"):
        method(rule, tree={"kind": "static", "name": "mc_sim_7b_63"})
