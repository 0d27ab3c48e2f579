"""Options of Jacobi and suffix decoding, their refusals, and the drafters that are built."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from actors.loading.method import build_method
from configs.drafters import SuffixDrafterConfig
from configs.load import load_preset
from configs.method import MethodConfig
from configs.schema import CaptionJobConfig
from configs.synthesis import SynthesizeJobConfig
from decoding.drafters import JacobiDrafter, SuffixDrafter
from decoding.drafters.suffix_index import Corpus
from tests import toys
from tests.toys import images

JACOBI, SUFFIX = {"kind": "jacobi"}, {"kind": "suffix"}
LANTERN = {"kind": "lantern", "k": 10}


def method(**sections: Any) -> MethodConfig:
    return MethodConfig.model_validate_json(json.dumps(sections))


@pytest.mark.parametrize("kind", ["fly", "lvspec", "random"])
def test_jacobi_refuses_rules_that_accept_drafts_which_the_target_finds_unlikely(kind: str) -> None:
    with pytest.raises(ValidationError, match=rf"acceptance: '{kind}' accepts drafts .* use exact, rejection, typical"):
        method(drafter=JACOBI, acceptance={"kind": kind}, tree={"kind": "chain", "length": 9})


@pytest.mark.parametrize("acceptance", [{"kind": "exact"}, {"kind": "rejection"}, {"kind": "typical"}, LANTERN])
def test_jacobi_takes_rules_that_compare_drafts_with_the_targets_distribution(acceptance: dict[str, Any]) -> None:
    assert method(drafter=JACOBI, acceptance=acceptance).drafter.kind == "jacobi"


@pytest.mark.parametrize("acceptance", [{"kind": "rejection"}, {"kind": "typical"}, {"kind": "fly"}, LANTERN])
def test_suffix_refuses_rules_under_which_tokens_follow_from_drafts(acceptance: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=r"follow from the rows that finished before .* use exact"):
        method(drafter=SUFFIX, acceptance=acceptance, tree={"kind": "chain", "length": 9})


@pytest.mark.parametrize("drafter", [JACOBI, SUFFIX], ids=["jacobi", "suffix"])
@pytest.mark.parametrize("tree", [{"kind": "static", "branching": [2, 2]}, {"kind": "dynamic"}, {"kind": "sage"}])
def test_trees_with_several_children_are_refused(drafter: dict[str, Any], tree: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=f"proposes one token per depth, and a tree '{tree['kind']}'"):
        method(drafter=drafter, tree=tree)


def test_suffix_refuses_a_shortest_match_above_the_longest_and_a_corpus_out_of_bounds() -> None:
    with pytest.raises(ValidationError, match="min_ngram_tokens 9 is above max_ngram_tokens 8"):
        SuffixDrafterConfig(min_ngram_tokens=9)
    for size in (255, 1_048_577):
        with pytest.raises(ValidationError, match="max_corpus_tokens"):
            SuffixDrafterConfig(max_corpus_tokens=size)
    assert SuffixDrafterConfig(max_corpus_tokens=256).max_corpus_tokens == 256


@pytest.mark.parametrize("drafter", [JACOBI, SUFFIX], ids=["jacobi", "suffix"])
def test_jacobi_and_suffix_are_accepted_with_controllers_and_in_trials(drafter: dict[str, Any]) -> None:
    assert method(drafter=drafter, controller={"kind": "measured"}).verify_mode == "lossless"
    trial = method(auto={"candidates": [{"drafter": drafter}, {"drafter": {"kind": "eagle"}}]})
    assert [method.label for method in trial.methods] == [
        "plain",
        f"{drafter['kind']}+chain+exact",
        "eagle+chain+exact",
    ]
    assert trial.drafting.drafter.kind == "eagle"
    assert not method(drafter=drafter).needs_checkpoint


@pytest.mark.parametrize("inside", [False, True])
def test_a_caption_job_refuses_to_fill_from_the_image_row_above(inside: bool) -> None:
    job = load_preset(CaptionJobConfig, "zoo_plain").model_dump(mode="json")
    choice = {"drafter": {**JACOBI, "fill": "above"}}
    job["method"] = {"auto": {"candidates": [choice]}} if inside else choice
    with pytest.raises(ValidationError, match="fill 'above' copies codes of the image row above, and a text has none"):
        CaptionJobConfig.model_validate_json(json.dumps(job))


def test_an_image_job_passes_the_grid_to_jacobi() -> None:
    above = ("method={drafter: {kind: jacobi, fill: above}, tree: {kind: chain, length: 16}}",)
    job = load_preset(SynthesizeJobConfig, "zoo_images_jacobi", above)
    made = build_method(job.method, None, images.target("class")).drafter
    assert isinstance(made, JacobiDrafter)
    assert made.grid == images.GRID
    repeating = build_method(method(drafter=JACOBI), None, images.target("class")).drafter
    assert isinstance(repeating, JacobiDrafter)
    assert repeating.grid is None
    assert toys.target("llama").grid is None


def test_suffix_is_built_with_its_options() -> None:
    options = {"min_ngram_tokens": 2, "max_ngram_tokens": 5, "max_corpus_tokens": 512}
    made = build_method(method(drafter={**SUFFIX, **options}), None, toys.target("llama")).drafter
    assert isinstance(made, SuffixDrafter)
    assert (made.min_ngram_tokens, made.max_ngram_tokens, made.corpus.max_tokens) == (2, 5, 512)


def test_engines_of_one_pair_share_their_finished_outputs_and_others_do_not() -> None:
    corpora: dict[int, Corpus] = {}
    target, choice = toys.target("llama"), method(drafter=SUFFIX)
    first, second = (build_method(choice, None, target, None, corpora).drafter for _ in range(2))
    other_size = build_method(method(drafter={**SUFFIX, "max_corpus_tokens": 512}), None, target, None, corpora).drafter
    alone = build_method(choice, None, target).drafter
    assert all(isinstance(engine, SuffixDrafter) for engine in (first, second, other_size, alone))
    assert first.corpus is second.corpus  # type: ignore[attr-defined]
    assert len({id(engine.corpus) for engine in (first, other_size, alone)}) == 3  # type: ignore[attr-defined]
