"""Requests with different logits processors in one engine equal transformers' `generate` token for token.

Slots are refilled with requests of other kinds, and texts end at tokens that they often have.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest

from decoding import Engine, Method, Request, Sampling
from decoding.acceptance import Exact, Fly, RandomRelaxation
from decoding.contracts import Acceptance
from tests import toys
from tests.conformance import checks, methods

MOST = toys.VOCAB_SIZE
PAIRS = tuple(
    (token_id, other) for token_id in range(4, MOST) for other in range(4, MOST) if (token_id + other) % 3 == 0
)
KINDS = {
    "penalty": Sampling(repetition_penalty=3.0),
    "ngrams of 1": Sampling(no_repeat_ngram_size=1),
    "ngrams of 2": Sampling(no_repeat_ngram_size=2),
    "bad words": Sampling(bad_words_ids=(*PAIRS, (2,), (5,), (9, 10, 11))),
    "sequence bias": Sampling(sequence_bias=(((5,), 4.0), ((9, 10), -3.5), ((12, 13), 8.0))),
    "suppressed": Sampling(suppress_tokens=(*range(20, 40), MOST + 7)),
    "suppressed at the beginning": Sampling(begin_suppress_tokens=tuple(range(4, 50))),
    "minimum of new tokens": Sampling(min_new_tokens=9),
    "minimum length": Sampling(min_length=16),
    "forced end": Sampling(forced_eos_token_id=(2, 9)),
    "all": Sampling(
        repetition_penalty=1.2,
        no_repeat_ngram_size=2,
        bad_words_ids=((5,), (9, 11)),
        sequence_bias=(((6,), 4.0), ((9, 10), -3.5)),
        suppress_tokens=(16, 17),
        begin_suppress_tokens=tuple(range(30, 50)),
        min_new_tokens=6,
        forced_eos_token_id=(2,),
    ),
    "none": Sampling(),
}
METHODS = {
    "llama": ("sd-chain", "sd-tree", "dynamic", "eagle", "medusa", "lookup", "jacobi", "suffix", "layer-skip-tree"),
    "llava": ("tabed-tree", "specvlm", "sage", "block-tree", "lvspec-tree-zero"),
}


@cache
def wanted(family: str, temperature: float = 0.0) -> tuple[Request, ...]:
    """Three requests of each kind in an order in which kinds alternate."""
    made = []
    for index in range(3 * len(KINDS)):
        kind = list(KINDS)[index % len(KINDS)]
        text, images = toys.prompt(family, index)
        options = replace(KINDS[kind], max_new_tokens=12 + (5 * index) % 13, temperature=temperature)
        made.append(Request(f"{kind} {index}", text, images, options, seed=11))
    return tuple(made)


@cache
def ends(family: str) -> frozenset[int]:
    """EOS, and tokens at which some texts end early."""
    plain = [replace(request, sampling=Sampling(max_new_tokens=12)) for request in wanted(family)[:20:4]]
    return frozenset([2, *(checks.generated(family, request, frozenset())[3] for request in plain)])


def check(family: str, method: Method, temperature: float = 0.0, async_output: bool = False) -> float:
    """Return the mean acceptance length."""
    target = toys.target(family)
    target.eos_ids = ends(family)
    requests = wanted(family, temperature)
    done = checks.run(Engine(target, method, 5, 160, async_output=async_output), requests)
    oracle = checks.generated if temperature == 0 else checks.referenced
    for request in requests:
        assert done[request.sample_id].token_ids == oracle(family, request, target.eos_ids), request.sample_id
        checks.check_telemetry(done[request.sample_id])
    return sum(completion.telemetry.mean_acceptance_length for completion in done.values()) / len(done)


@pytest.mark.slow_cases(
    "llama-dynamic",
    "llama-jacobi",
    "llama-medusa",
    "llama-sd-chain",
    "llama-suffix",
    "llava-block",
    "llava-sage",
    "llava-specvlm",
)
@pytest.mark.parametrize(("family", "name"), [(family, name) for family, names in METHODS.items() for name in names])
def test_tokens_equal_those_of_generate(family: str, name: str) -> None:
    check(family, methods.METHODS[name][0](family), async_output=True)


@pytest.mark.parametrize("drafter", ["none", "right", "wrong"])
def test_tokens_do_not_depend_on_the_drafter(drafter: str) -> None:
    length = check("llama", Method(checks.make_drafter(drafter, "llama"), checks.TREES["branching"](), Exact()))
    # The target's processors act on drafts too.
    assert length > 2.5 if drafter == "right" else length < 1.5, length


@pytest.mark.parametrize("name", ["sd-chain", "sd-tree"])
def test_sampled_tokens_equal_those_of_the_slow_reference(name: str) -> None:
    assert check("llama", methods.METHODS[name][0]("llama"), temperature=0.9) > 1.2


def test_every_kind_changes_some_text() -> None:
    changed = set()
    for request in wanted("llama"):
        plain = replace(request, sampling=Sampling(max_new_tokens=request.sampling.max_new_tokens))
        outputs = [checks.generated("llama", each_request, ends("llama")) for each_request in (request, plain)]
        if outputs[0] != outputs[1]:
            changed.add(request.sample_id.rpartition(" ")[0])
    assert changed == KINDS.keys() - {"none"}


@pytest.mark.parametrize("rule", [Fly(min_entropy=0.0, window=0), RandomRelaxation(1.0)])
def test_relaxed_rules_accept_no_removed_token(rule: Acceptance) -> None:
    """They accept all drafts of a drafter that is usually wrong, and none that the processors remove."""
    target = toys.target("llama")
    options = Sampling(max_new_tokens=24, suppress_tokens=tuple(range(4, 30)), no_repeat_ngram_size=2)
    requests = [replace(request, sampling=options) for request in wanted("llama")[:9]]
    method = Method(checks.make_drafter("wrong", "llama"), checks.TREES["chain"](), rule)
    done = checks.run(Engine(target, method, 4, 160), requests)
    assert sum(completion.telemetry.num_relaxed_accepts for completion in done.values()) > 30
    for request in requests:
        text = toys.front_end("llama").encode(request.prompt, ())["input_ids"][0].tolist()
        for token in done[request.sample_id].token_ids:
            assert not 4 <= token < 30
            assert (text[-1], token) not in pairwise(text)
            text.append(token)


def test_a_token_that_the_target_lacks_fails_its_row_only() -> None:
    good, bad = (
        Request(name, *toys.prompt("llama", 1), Sampling(max_new_tokens=4, bad_words_ids=((5, token),)))
        for name, token in (("good", 9), ("bad", MOST))
    )
    engine = Engine(toys.target("llama"), methods.METHODS["plain"][0]("llama"), 2, 64)
    done = {completion.sample_id: completion for completion in engine.run([bad, good])}
    assert done["good"].error is None
    assert done["bad"].error is not None
    assert done["bad"].error.code == "prompt_refused"
    assert f"contain {MOST}, and the target has no such token" in done["bad"].error.message
