"""Checks of drafters that are off for some steps. Tests run them, and planted faults must make them fail.

The oracle is the drafter's model over prompt, text and drafts in one forward.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from decoding import Engine, Method, Request, Sampling
from decoding.acceptance import Exact
from decoding.contracts import VerificationOutput
from decoding.drafters import ModelDrafter
from decoding.trees import Chain
from tests import toys
from tests.conformance import checks, heads
from tests.conformance.erratic import unsettled

LONG = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3]
MIXED = [0, 2, 0, 0, 4, 1, 0, 0, 0]


def long_requests() -> list[Request]:
    return checks.requests("llama", 5, Sampling(ignore_eos=True), longest=44)


def unsettled_engine(pattern: list[int], family: str = "llama") -> tuple[Engine, ModelDrafter]:
    drafter = checks.make_drafter("perturbed", family)
    assert isinstance(drafter, ModelDrafter)
    return Engine(toys.target(family), unsettled(Method(drafter, Chain(4), Exact()), pattern=pattern), 3, 128), drafter


@torch.no_grad()
def check_chains(pattern: list[int]) -> int:
    """Every draft is the drafter's choice after prompt, text and the drafts before it, in one forward."""
    engine, drafter = unsettled_engine(pattern)
    model: Any = drafter.model
    decoder = copy.deepcopy(model.decoder)
    decoder.set_attn_implementation("sdpa")
    counted = [0]

    def look(verification: VerificationOutput) -> None:
        for row, slot in enumerate(verification.slots.ids):
            progress = engine._slots.progress[slot]
            assert progress is not None
            prompt = toys.front_end("llama").encode(progress.request.prompt, ())["input_ids"][0].tolist()
            valid = verification.tree.valid[row].tolist()
            drafts = verification.tree.tokens[row][1 : sum(valid)].tolist()
            if not drafts:
                continue
            text = [*prompt, *progress.token_ids, *drafts]
            result = model.head(decoder(input_ids=torch.tensor([text]), use_cache=False).last_hidden_state[0])
            best = result[-len(drafts) - 1 : -1].topk(2)
            for draft, tokens, values in zip(drafts, best.indices.tolist(), best.values, strict=True):
                if float(values[0] - values[1]) > 1e-3:  # closer than rounding
                    assert draft == tokens[0], (progress.request.sample_id, len(progress.token_ids), pattern)
                    counted[0] += 1

    engine.method = replace(engine.method, acceptance=heads.Watcher(look))
    checks.run(engine, long_requests())
    return counted[0]


def late_engine(monkeypatch: pytest.MonkeyPatch, pattern: list[int], until_drafted: bool = True) -> None:
    """Gives engines of the heads' checks this pattern; their steps repeat until there are drafts."""
    make = heads.make_engine

    def unsettled_heads(kind: str, family: str, tree: str, slots: int, rule: Any = None) -> Engine:
        made = make(kind, family, tree, slots, rule)
        engine = Engine(made.target, unsettled(made.method, pattern=pattern), slots, 128)
        step = engine.step

        def step_on() -> list[Any]:
            controller: Any = engine.method.controller
            done = step()
            while engine.has_work and not controller.outcomes[-1].levels:
                done += step()
            return done

        if until_drafted:
            monkeypatch.setattr(engine, "step", step_on)
        return engine

    monkeypatch.setattr(heads, "make_engine", unsettled_heads)
