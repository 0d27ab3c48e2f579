"""`method.auto`, and its refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from configs.drafters import LookupDrafterConfig, NoDrafterConfig
from configs.load import ConfigError, validate
from configs.method import MethodConfig
from configs.schema import CaptionJobConfig
from configs.synthesis import SynthesizeJobConfig

MODEL = {"kind": "model"}
CHAIN: dict[str, Any] = {"name": "chain", "drafter": MODEL}
LOOKUP: dict[str, Any] = {"name": "lookup", "drafter": {"kind": "lookup"}}

REFUSED: list[tuple[list[dict[str, Any]], str]] = [
    ([], "at least 1 item"),
    ([{**CHAIN, "acceptance": {"kind": "rejection"}}], "candidates.0.acceptance: 'rejection' may give other tokens"),
    ([LOOKUP, {**CHAIN, "acceptance": {"kind": "lvspec"}}], "candidates.1.acceptance: 'lvspec' may give other tokens"),
    ([CHAIN, {"name": "e", "drafter": {"kind": "eagle"}}], "eagle and model drafters are different checkpoints"),
    ([CHAIN, CHAIN], "two are called 'chain'; give each a name"),
    ([{**CHAIN, "name": "plain"}], "two are called 'plain'"),
    ([{"name": "a"}, {"name": "b"}, CHAIN], "plain decoding is named twice"),
    ([{"name": "a"}], "plain decoding is always tried; name a method"),
    ([{"name": "a", "auto": {"candidates": [CHAIN]}}], "a candidate names one method, and not several"),
    ([{**CHAIN, "contexts": [{"kind": "full"}, {"kind": "caption", "path": "x"}]}], "leave out 'caption'"),
    ([{**CHAIN, "name": str(index)} for index in range(9)], "at most 8 items"),
]


def method(candidates: list[dict[str, Any]], **more: Any) -> MethodConfig:
    return MethodConfig.model_validate_json(json.dumps({"auto": {"candidates": candidates}, **more}))


@pytest.mark.parametrize(("candidates", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_candidates_that_cannot_be_compared_are_refused(candidates: list[dict[str, Any]], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        method(candidates)


@pytest.mark.parametrize(
    ("name", "value"), [("drafter", MODEL), ("tree", {"kind": "chain", "length": 3}), ("acceptance", {"kind": "fly"})]
)
def test_choices_beside_candidates_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValidationError, match=f"{name}: the candidates of auto have their own; leave it out"):
        method([CHAIN], **{name: value})


def test_plain_decoding_is_always_tried_first_and_under_the_name_it_was_given() -> None:
    assert [candidate.label for candidate in method([CHAIN, LOOKUP]).methods] == ["plain", "chain", "lookup"]
    assert [candidate.label for candidate in method([CHAIN, {"name": "slow"}]).methods] == ["slow", "chain"]
    auto = method([CHAIN, LOOKUP])
    assert (auto.label, auto.verify_mode) == ("auto", "lossless")
    assert isinstance(auto.drafter, NoDrafterConfig)
    assert (auto.needs_checkpoint, auto.drafting.label) == (True, "chain")
    only = method([LOOKUP])
    assert (only.needs_checkpoint, type(only.drafting.drafter)) == (False, LookupDrafterConfig)
    assert MethodConfig().methods == (MethodConfig(),)


def job(method: dict[str, Any], **sections: Any) -> CaptionJobConfig:
    data = {
        "source": {"kind": "images", "path": "in"},
        "prompt": "Describe.",
        "model": {"target": {"path": "t"}, "drafter": {"path": "d"}},
        "method": method,
        "sink": {"path": "out"},
        **sections,
    }
    return validate(CaptionJobConfig, data, "job.yaml")


def test_a_candidate_without_its_required_checkpoint_is_refused() -> None:
    alone = {"target": {"path": "t"}}
    with pytest.raises(ConfigError, match=r"'model', so model\.drafter must name a checkpoint"):
        job({"auto": {"candidates": [LOOKUP, CHAIN]}}, model=alone)
    assert job({"auto": {"candidates": [LOOKUP]}}, model=alone).method.label == "auto"
    with pytest.raises(ConfigError, match=r"job.yaml: method.auto.candidates.1.tree.length"):
        job({"auto": {"candidates": [CHAIN, {**LOOKUP, "tree": {"kind": "chain", "length": 0}}]}})


def test_an_image_job_refuses_a_candidate_with_another_prompt_for_its_drafter() -> None:
    data: dict[str, Any] = {
        "source": {"kind": "text", "path": "in"},
        "prompt": "{text}",
        "model": {"target": {"path": "t"}, "drafter": {"path": "d"}, "condition": {"path": "c"}, "vq": {"path": "v"}},
        "sink": {"path": "out"},
    }
    auto = {"auto": {"candidates": [CHAIN]}}
    assert validate(SynthesizeJobConfig, {**data, "method": auto}, "job.yaml").method.label == "auto"
    pooled = {"auto": {"candidates": [LOOKUP, {**CHAIN, "contexts": [{"kind": "text_only"}]}]}}
    with pytest.raises(ConfigError, match="a prompt for an image has no visual part to change"):
        validate(SynthesizeJobConfig, {**data, "method": pooled}, "job.yaml")


def test_the_fingerprint_holds_the_candidates_and_not_how_long_they_are_tried() -> None:
    def fingerprint(**options: Any) -> str:
        return job({"auto": {"candidates": [CHAIN, LOOKUP], **options}}).fingerprint({})

    assert fingerprint() == fingerprint(max_rounds=2, max_rechecks=0) == fingerprint(max_rounds=50)
    assert fingerprint() != fingerprint(candidates=[CHAIN])
    assert fingerprint() != job({"drafter": MODEL}).fingerprint({})


def test_a_resolved_job_is_read_again_as_it_was() -> None:
    first = job({"auto": {"candidates": [CHAIN, LOOKUP], "max_rounds": 3}})
    assert validate(CaptionJobConfig, first.resolved(), "again") == first


def test_jobs_of_one_method_keep_the_fingerprints_they_had() -> None:
    """Outputs of earlier versions, whose content has no key `auto`, can be resumed."""
    content = job({"drafter": MODEL}).content({})["method"]
    assert {"acceptance", "contexts", "drafter", "name", "tree"} <= set(content)
    assert "auto" not in content
    assert sorted(job({}).content({})["method"]) == ["acceptance", "drafter"]
