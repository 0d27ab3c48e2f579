"""Checks of every lossy rule: exact at its zero setting, and correct counts of relaxed tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from decoding import Completion, Engine, Method, Request, Sampling
from decoding.acceptance import Fly, Lantern, LVSpec, RandomRelaxation, Typical
from decoding.acceptance.relaxed import RelaxedRule
from decoding.contracts import TreePolicy
from decoding.noise import Noise, Stream, key_of
from decoding.reference import cache_of
from decoding.trees import StaticTree
from models.llamagen.neighbours import Proximity, nearest_codes
from tests import toys
from tests.conformance import checks

NEIGHBOURS = nearest_codes(torch.zeros(toys.VOCAB_SIZE, 1), toys.VOCAB_SIZE - 1, Proximity("random"))
"""Random neighbours, because the toys' tokens are not codes."""
ZERO: dict[str, Callable[[], RelaxedRule]] = {
    "lvspec": lambda: LVSpec(0.0, 3, position_shift=False),
    "fly": lambda: Fly(min_entropy=100.0, window=1),
    "fly-gate": lambda: Fly(min_entropy=100.0, window=0),
    "random": lambda: RandomRelaxation(0.0),
    "typical": lambda: Typical(epsilon=1.0, alpha=1e9),
    "lantern": lambda: Lantern(NEIGHBOURS, toys.VOCAB_SIZE, 0.0),
    "lantern-jsd": lambda: Lantern(NEIGHBOURS, 30, 0.0, "jsd"),
    "lantern++": lambda: Lantern(NEIGHBOURS, 30, 1.0, "multiplicative"),
}
LOOSE: dict[str, Callable[[], RelaxedRule]] = {
    "lvspec": lambda: LVSpec(0.7, 3, position_shift=False),
    "lvspec-shift": lambda: LVSpec(0.7, 3, position_shift=True),
    "lvspec-before": lambda: LVSpec(0.7, 3, False, "before"),
    "lvspec-embedding": lambda: LVSpec(0.7, 3, False, "embedding"),
    "shift": lambda: LVSpec(0.0, 3, position_shift=True),
    "fly": lambda: Fly(min_entropy=0.3, window=1, block_end="fit"),
    "fly-gate": lambda: Fly(min_entropy=0.5, window=0),
    "random": lambda: RandomRelaxation(0.5),
    "typical": Typical,
    "lantern": lambda: Lantern(NEIGHBOURS, 30, 0.3),
    "lantern-jsd": lambda: Lantern(NEIGHBOURS, 30, 0.2, "jsd"),
    "lantern++": lambda: Lantern(NEIGHBOURS, 30, 20.0, "multiplicative"),
}


def two_branches(length: int) -> TreePolicy:
    """LVSpec's tree: two chains of `length` under the root's two best tokens."""
    return StaticTree([(first, *(0,) * depth) for first in (0, 1) for depth in range(length)])


TREES = checks.TREES | {"two-branches": lambda: two_branches(5)}
SAMPLED = Sampling(temperature=0.9, top_k=20, top_p=0.9, repetition_penalty=1.3)


def decode(
    family: str, tree: str, rule: RelaxedRule, slots: int, wanted: list[Request], drafter: str = "loose"
) -> dict[str, Completion]:
    """Completions by sample id under one rule."""
    method = Method(checks.make_drafter(drafter, family), TREES[tree](), rule)
    done = checks.run(Engine(toys.target(family), method, slots, 160), wanted)
    for completion in done.values():
        checks.check_telemetry(completion)
    return done


def check_zero(family: str, tree: str, rule: RelaxedRule, slots: int, sampling: Sampling) -> None:
    """At its zero setting, a lossy rule gives the target's own text and counts no relaxed token."""
    wanted = checks.requests(family, 9, sampling)
    done = decode(family, tree, rule, slots, wanted)
    eos_ids = toys.target(family).eos_ids
    for request in wanted:
        assert done[request.sample_id].token_ids == checks.referenced(family, request, eos_ids), request.sample_id
        assert done[request.sample_id].telemetry.num_relaxed_accepts == 0
    accepted = sum(completion.telemetry.num_accepted_draft_tokens for completion in done.values())
    assert accepted > 0, "nothing was ever accepted, so nothing was tested"


def check_honest(family: str, tree: str, rule: RelaxedRule, slots: int, temperature: float) -> tuple[int, int]:
    """Tokens that differ from the target's choice over the emitted text are exactly the relaxed ones, none of them
    special. Returns relaxed and accepted drafts."""
    sampling = Sampling(temperature=temperature)
    wanted = checks.requests(family, 12, sampling)
    done = decode(family, tree, rule, slots, wanted)
    special = toys.target(family).special_ids
    for request in wanted:
        completion = done[request.sample_id]
        odd = [
            (token, choice)
            for token, choice in zip(completion.token_ids, own_choices(family, request, completion), strict=True)
            if token != choice
        ]
        assert len(odd) == completion.telemetry.num_relaxed_accepts, (request.sample_id, odd)
        assert not [pair for pair in odd if special & set(pair)], odd
    telemetries = [completion.telemetry for completion in done.values()]
    return sum(telemetry.num_relaxed_accepts for telemetry in telemetries), sum(
        telemetry.num_accepted_draft_tokens for telemetry in telemetries
    )


@torch.inference_mode()
def own_choices(family: str, request: Request, completion: Completion) -> list[int]:
    """The target's choice at each place of an emitted text, by transformers' forward over the whole text."""
    model = toys.oracle(family)
    prompt: Any = model(**toys.front_end(family).encode(request.prompt, request.images, request.videos), use_cache=True)
    text = torch.tensor([completion.token_ids[:-1]], dtype=torch.long)
    scores = prompt.logits[0, -1:]
    if text.shape[1]:
        rest: Any = model(input_ids=text, **cache_of(model, prompt), use_cache=True)
        scores = torch.cat([scores, rest.logits[0]])
    if request.sampling.temperature > 0:
        key = torch.tensor([key_of(request.seed, request.sample_id, request.replica)])
        positions = torch.arange(scores.shape[0])
        noise = Noise(key, torch.zeros(1, dtype=torch.long)).gumbel(Stream.TOKEN, positions, scores.shape[1])
        scores = scores / request.sampling.temperature + noise[0]
    choices: list[int] = scores.argmax(dim=-1).tolist()
    return choices


def check_independence(family: str, tree: str, make: Callable[[], RelaxedRule], sampling: Sampling) -> None:
    """A sample's text and acceptance do not depend on batch size, order or slot."""
    wanted = checks.requests(family, 8, sampling)
    outputs = []
    for slots, order in ((1, wanted), (3, wanted[::-1]), (8, wanted[4:] + wanted[:4])):
        done = decode(family, tree, make(), slots, list(order))
        outputs.append(
            {
                key: (
                    completion.token_ids,
                    completion.telemetry.acceptance_histogram,
                    completion.telemetry.num_relaxed_accepts,
                )
                for key, completion in done.items()
            }
        )
    assert outputs[0] == outputs[1] == outputs[2]
