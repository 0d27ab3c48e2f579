"""Tests structured output on the shipped text pair; the oracle is `generate` with the same grammar."""

from __future__ import annotations

from dataclasses import replace

import pytest

from decoding import Sampling
from decoding.acceptance import RandomRelaxation, Rejection, Typical
from decoding.contracts import Acceptance
from tests.conformance import structures
from tests.conformance.structures import GREEDY, METHODS, SAMPLED


@pytest.mark.slow_cases(
    "grammar+tree-greedy", "dynamic", "grammar+model", "grammar-", "lookup", "model", "plain", "tree"
)
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", list(METHODS))
def test_tokens_equal_those_of_generate(method: str, sampling: Sampling) -> None:
    structures.check_equal(method, 3, sampling)


@pytest.mark.slow
@pytest.mark.parametrize("slots", [1, 10])
def test_tokens_do_not_depend_on_the_number_of_slots(slots: int) -> None:
    structures.check_equal("grammar+tree", slots, SAMPLED)


@pytest.mark.slow_cases("tree")
@pytest.mark.parametrize("method", ["plain", "tree", "grammar"])
def test_masks_follow_the_last_step_with_asynchronous_output_processing(method: str) -> None:
    structures.check_equal(method, 3, GREEDY, async_output=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule", [RandomRelaxation(1.0), Typical(), Rejection()], ids=["random", "typical", "rejection"]
)
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", ["model", "tree"])
def test_no_rule_accepts_a_forbidden_token(method: str, sampling: Sampling, rule: Acceptance) -> None:
    structures.check_legal(method, rule, sampling)


@pytest.mark.parametrize("method", ["plain", "grammar+model"])
def test_a_text_without_room_for_its_end_is_not_finished(method: str) -> None:
    short = Sampling(max_new_tokens=7)
    done = structures.decode(method, 3, [r for r, name in structures.requests(short) if name == "nested"])
    assert {completion.finish_reason for completion in done.values()} == {"length"}
    assert all(len(completion.token_ids) == 7 for completion in done.values())


def test_forced_tokens_are_drafted_without_a_model() -> None:
    wanted = [request for request, name in structures.requests(GREEDY) if name == "nested"]
    lengths = {
        name: min(c.telemetry.mean_acceptance_length for c in structures.decode(name, 3, wanted).values())
        for name in ("model", "grammar", "grammar+model")
    }
    assert lengths["grammar"] > 1.5
    assert lengths["grammar+model"] > max(lengths["model"], lengths["grammar"])


def test_a_request_with_a_grammar_takes_no_stop_strings() -> None:
    request = structures.requests(GREEDY)[0][0]
    with pytest.raises(ValueError, match="neither stop strings nor ignore_eos"):
        replace(request, sampling=Sampling(stop=("}",)))
