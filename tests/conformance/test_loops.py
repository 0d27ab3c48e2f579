"""Texts that loop end at the same token with every method, where the rule cuts the output of `generate`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from decoding import Engine, Method, Request, Sampling
from decoding.acceptance import Exact
from tests import toys
from tests.conformance import checks
from tests.covering import tiers
from tests.decoding.scheduling.test_loops import expected

RULES = ((2, 2), (2, 8), (3, 9))
DRAFTERS = [("none", "chain"), ("right", "chain"), ("right", "branching"), ("perturbed", "ragged"), ("wrong", "chain")]


def wanted(family: str, min_repeats: int, min_tokens: int) -> list[Request]:
    sampling = Sampling(ignore_eos=True, stop_loops=min_repeats, min_loop_tokens=min_tokens)
    return [
        replace(request, sampling=replace(request.sampling, max_new_tokens=70))
        for request in checks.requests(family, 6, sampling)
    ]


@tiers("family, drafter, tree, min_repeats, min_tokens, is_late", ("llama", "llava"), DRAFTERS, RULES, [False, True])
def test_a_loop_ends_a_text_where_the_rule_cuts_generate(
    family: str, drafter: str, tree: str, min_repeats: int, min_tokens: int, is_late: bool
) -> None:
    rule = (min_repeats, min_tokens)
    target = toys.target(family)
    method = Method(checks.make_drafter(drafter, family), checks.TREES[tree](), Exact())
    engine = Engine(target, method, 3, 192, async_output=is_late)
    requests = wanted(family, *rule)
    done = checks.run(engine, requests)
    num_looped = num_inside = 0
    for request in requests:
        whole = checks.generated(family, request, frozenset())
        cut = expected(whole, *rule)
        completion = done[request.sample_id]
        checks.check_telemetry(completion)
        num_inside += completion.telemetry.ended_inside_path
        if cut is None:
            assert (completion.finish_reason, completion.loop_start) == ("length", None)
            assert completion.token_ids == whole
        else:
            num_looped += 1
            assert (completion.finish_reason, completion.loop_start) == ("looped", cut[1]), request.sample_id
            assert completion.token_ids == whole[: cut[0]]
    assert num_looped >= (2 if min_tokens == 2 else 1), "the toy repeats itself, so some of these texts must loop"
    if drafter == "right" and min_tokens == 2:
        assert num_inside >= 1, "no text ended inside a path"


@pytest.mark.parametrize("min_repeats", [1, -1])
def test_a_rule_without_repetition_is_refused(min_repeats: int) -> None:
    with pytest.raises(ValueError, match=r"sampling\.stop_loops must be 0 \(off\) or at least 2"):
        Sampling(stop_loops=min_repeats)
