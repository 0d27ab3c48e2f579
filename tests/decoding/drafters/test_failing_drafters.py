"""Tests that a row whose drafter returns NaN loses only its drafts, with every drafter, tree and acceptance rule."""

from __future__ import annotations

import math

import pytest
import torch

from decoding import Engine, Method, Request, Sampling
from decoding.acceptance import Exact, Rejection
from decoding.drafters.guarded import Guarded, guarded
from decoding.errors import DrafterError
from decoding.trees import Chain
from models.inputs.processing import PromptError
from tests import toys
from tests.conformance import checks
from tests.conformance.methods import METHODS
from tests.decoding.failing_drafter import FailingDrafter

pytestmark = pytest.mark.slow

SAMPLED = Sampling(temperature=0.9, top_k=20, top_p=0.95, repetition_penalty=1.2)


def every_other(request: Request) -> bool:
    return int(request.sample_id.rpartition("-")[2]) % 2 == 0


def run(method: Method, family: str, sampling: Sampling) -> dict[str, tuple[tuple[int, ...], bool]]:
    """Tokens and whether the row was degraded, by id; six samples in four slots."""
    engine = Engine(toys.target(family), method, 4, 96)
    if isinstance(method.drafter, FailingDrafter):
        method.drafter.engine = engine
    done = checks.run(engine, checks.requests(family, 6, sampling))
    return {sample_id: (completion.token_ids, completion.telemetry.degraded) for sample_id, completion in done.items()}


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("name", "family", "value", "from_level"),
    [
        ("sd-chain", "llava", NAN, 0),
        ("sd-chain", "llama", NAN, 1),
        ("sd-tree", "llama", INF, 0),
        ("tabed", "llava", NAN, 0),
        ("tabed-tree", "qwen2_5_vl", NAN, 0),
        ("tabed-inverse", "llava", NAN, 0),
        ("tabed+dynamic", "llava", NAN, 1),
        ("sage", "llava", NAN, 1),
        ("sage-online", "llama", NAN, 0),
        ("dynamic", "llama", NAN, 1),
        ("dynamic", "llama", INF, 0),
        ("eagle", "llama", NAN, 0),
        ("medusa", "llama", NAN, 1),
        ("lookup", "llama", INF, 0),
        ("fly-zero", "llama", NAN, 0),
    ],
)
def test_rows_whose_drafter_returns_nan_get_the_text_of_plain_decoding(
    name: str, family: str, value: float, from_level: int
) -> None:
    make, _ = METHODS[name]
    for sampling in (Sampling(), SAMPLED):
        plain = run(METHODS["plain"][0](family), family, sampling)
        method = make(family)
        sick = FailingDrafter(method.drafter, every_other, value, from_level)
        done = run(Method(sick, method.tree, method.acceptance), family, sampling)
        assert {sample_id: tokens for sample_id, (tokens, _) in done.items()} == {
            sample_id: tokens for sample_id, (tokens, _) in plain.items()
        }
        assert {sample_id for sample_id, (_, degraded) in done.items() if degraded} == sick.struck
        if from_level == 0:
            assert sick.struck == {"sample-0", "sample-2", "sample-4"}


def test_no_row_of_a_sound_drafter_is_degraded() -> None:
    for name, (make, families) in METHODS.items():
        done = run(make(families[0]), families[0], Sampling())
        assert not any(degraded for _, degraded in done.values()), name


def test_rejection_of_nan_drafts_takes_the_targets_choice() -> None:
    method = METHODS["sd-chain"][0]("llama")
    sick = FailingDrafter(method.drafter, every_other, math.nan)
    plain = run(METHODS["plain"][0]("llama"), "llama", Sampling())
    done = run(Method(sick, method.tree, Rejection()), "llama", Sampling())
    assert {sample_id: tokens for sample_id, (tokens, _) in done.items()} == {
        sample_id: tokens for sample_id, (tokens, _) in plain.items()
    }
    sampled = run(
        Method(FailingDrafter(checks.make_drafter("right", "llama"), every_other, math.nan), method.tree, Rejection()),
        "llama",
        SAMPLED,
    )
    assert {sample_id for sample_id, (_, degraded) in sampled.items() if degraded} == sick.struck


@pytest.mark.parametrize("where", ["admit", "draft", "commit", "finished"])
def test_an_error_in_a_guarded_drafter_is_marked_as_the_drafters(where: str) -> None:
    sick = FailingDrafter(checks.make_drafter("right", "llama"), every_other, raises_in=where)
    method = guarded(Method(sick, Chain(4), Exact()))
    assert isinstance(method.drafter, Guarded)
    engine = Engine(toys.target("llama"), method, 4, 96)
    sick.engine = engine
    with pytest.raises(DrafterError, match="the drafter failed: IndexError: index 7 is out of range"):
        list(engine.run(checks.requests("llama", 3)))


@pytest.mark.parametrize(
    "error", [PromptError, torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError)]
)
def test_refusals_and_faults_of_the_device_are_not_the_drafters(error: type[Exception]) -> None:
    sick = FailingDrafter(checks.make_drafter("right", "llama"), every_other, error=error)
    engine = Engine(toys.target("llama"), guarded(Method(sick, Chain(4), Exact())), 4, 96)
    sick.engine = engine
    with pytest.raises(error):
        list(engine.run(checks.requests("llama", 3)))


def test_plain_decoding_has_no_guarded_drafter() -> None:
    method = METHODS["plain"][0]("llama")
    assert guarded(method) is method
