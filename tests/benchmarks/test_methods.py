"""Tests scenarios, results of the committed file, drafters that are followed, and the arithmetic of ablations."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from actors.loading.method import build_method
from actors.loading.pair import load
from benchmarks.harness.results import read_results
from benchmarks.methods import __main__ as methods
from benchmarks.methods.runs import FollowDrafter, run_cases
from benchmarks.methods.scenarios import VIDEO, build_scenarios, build_video_scenarios
from decoding import Engine, Sampling
from decoding.contexts import Full
from decoding.contracts import Method
from decoding.drafters import ModelDrafter
from decoding.trees import Chain
from models.target import Target

NUM_CASES = 3


def test_a_followed_drafter_continues_the_targets_first_token_as_it_does_alone() -> None:
    job = methods.presets()["sd_chain"]
    pair = load(job)
    cases = build_scenarios(NUM_CASES, 0)["single"]
    sampling = Sampling(max_new_tokens=30)
    # A model that drafts for itself writes its own text, whatever the rule; a chain that ends in mid-text shows it.
    second = load(job).drafter
    assert isinstance(pair.drafter, Target)
    assert isinstance(second, Target)
    drafter = replace(pair, target=pair.drafter)
    followed = Method(ModelDrafter(second, [Full()], pair.target.vocab_size), Chain(4), FollowDrafter())
    alone = run_cases(drafter, Engine(pair.drafter, followed, 4, 512), cases, sampling, 0)
    plain = build_method(methods.presets()["plain"].method, None, pair.drafter)
    expected = run_cases(drafter, Engine(pair.drafter, plain, 4, 512), cases, sampling, 0)
    assert {name: completion.token_ids for name, completion in alone.items()} == {
        name: completion.token_ids for name, completion in expected.items()
    }
    # Under another target it is still the drafter's text behind the first token, not the target's.
    followed = Method(ModelDrafter(pair.drafter, [Full()], pair.target.vocab_size), Chain(4), FollowDrafter())
    under = run_cases(pair, Engine(pair.target, followed, 4, 512), cases, sampling, 0)
    target = build_method(methods.presets()["plain"].method, None, pair.target)
    own = run_cases(pair, Engine(pair.target, target, 4, 512), cases, sampling, 0)
    for name, completion in under.items():
        if completion.token_ids[0] == expected[name].token_ids[0]:
            # Nothing is drafted for the last token that the limit leaves.
            assert completion.token_ids[:-1] == expected[name].token_ids[:-1]
    assert any(under[name].token_ids != own[name].token_ids for name in own)


def test_only_chains_can_be_followed() -> None:
    job = methods.presets()["sd_tree"]
    pair = load(job)
    built = build_method(job.method, pair.drafter, pair.target)
    engine = Engine(pair.target, Method(built.drafter, built.tree, FollowDrafter()), 4, 512)
    with pytest.raises((ValueError, RuntimeError), match="along chains only"):
        run_cases(pair, engine, build_scenarios(1, 0)["single"], Sampling(max_new_tokens=8), 0)


def test_video_scenarios_have_equal_numbers_a_score_and_frames_of_their_seed() -> None:
    scenarios = build_video_scenarios(2, 0)
    assert {name: len(cases) for name, cases in scenarios.items()} == dict.fromkeys(VIDEO, 2)
    for cases in scenarios.values():
        for case in cases:
            assert len(case.videos) == 1
            assert case.score is not None
            right, stated = case.score("nothing of the kind")
            assert right < stated
    first, other = (build_video_scenarios(1, seed)[VIDEO[0]][0].videos[0].frames for seed in (0, 1))
    assert not torch.equal(torch.from_numpy(first), torch.from_numpy(other))


def test_every_preset_of_the_zoo_is_in_the_results() -> None:
    results = read_results(methods.RESULTS)
    alone = {"drafter_alone", "pruned_drafter_alone"}
    assert set(results["methods"]) == set(methods.presets()) | set(methods.varied_jobs()) | alone
    others = {"video_drafter_alone", "video_pruned_drafter_alone", *methods.BUILT}
    assert set(results["video"]["methods"]) == set(methods.presets(video=True)) | others
