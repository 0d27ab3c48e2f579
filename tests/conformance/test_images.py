"""Image models: guided lanes, conditions of different lengths, trees cut at the end of the image."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import decoding.scheduling.replay as replay
from decoding import Engine, Method, Request, Sampling
from decoding.acceptance import Exact, Rejection
from decoding.contracts import Acceptance
from decoding.step import run_step
from decoding.trees import Chain, DynamicTree
from tests.conformance import checks
from tests.conformance import images as contract
from tests.covering import tiers
from tests.toys import images


@tiers("method, kind, slots, mode", list(contract.METHODS), images.KINDS, [1, 4, 9], list(contract.MODES))
def test_every_image_equals_the_slow_reference(method: str, kind: str, slots: int, mode: str) -> None:
    contract.check_equal(method, kind, slots, mode)


@pytest.mark.parametrize("kind", images.KINDS)
def test_all_drafts_of_an_exact_drafter_are_accepted_to_the_last_code(kind: str) -> None:
    """The drafter is the target: a chain of 5 accepts all drafts, and the image has exactly its codes."""
    target = images.target(kind)
    engine = Engine(target, Method(images.smaller(target, kind, noise=0.0), Chain(5), Exact()), 4, 64)
    wanted = images.requests(kind, 5, contract.MODES["sampled-guided"])
    done = checks.run(engine, wanted)
    reference = contract.expected(kind, wanted, "sampled-guided")
    for request in wanted:
        telemetry = done[request.sample_id].telemetry
        assert done[request.sample_id].token_ids == reference[request.sample_id]
        # One code from the prefill, six from each of two steps, three from the last: sixteen.
        assert telemetry.num_spec_steps == 3
        assert telemetry.num_accepted_draft_tokens == telemetry.num_draft_tokens == 12


def test_the_drafter_stops_being_guided_with_its_target() -> None:
    """The drafter is the target, so every draft is accepted, also beyond the guidance interval."""
    sampling = replace(contract.MODES["sampled-interval"], guidance_interval=4)
    target = images.target("text")
    engine = Engine(target, Method(images.smaller(target, "text", noise=0.0), Chain(4), Exact()), 3, 64)
    for completion in checks.run(engine, images.requests("text", 4, sampling)).values():
        assert completion.telemetry.num_accepted_draft_tokens == completion.telemetry.num_draft_tokens == 12


def test_drafts_of_a_disturbed_copy_are_accepted_partly() -> None:
    """Ensures that the tests above accept paths of trees."""
    length = contract.check_equal("sd-tree", "text", 4, "sampled-guided")
    assert 1.2 < length < 3.8


def test_guidance_changes_the_image() -> None:
    kind = "text"
    without = contract.expected(kind, images.requests(kind, 4, contract.MODES["greedy"]), "greedy")
    guided = contract.expected(kind, images.requests(kind, 4, contract.MODES["greedy-guided"]), "greedy-guided")
    assert without["image-0"] != guided["image-0"]
    assert without["image-1"] == guided["image-1"], "the second sample's own scale is 1"


def test_an_unsupported_request_fails_and_other_requests_are_decoded() -> None:
    target = images.target("text")
    engine = Engine(target, Method(images.eagle(target), Chain(3), Exact()), 2, 64)
    good = images.requests("text", 2, contract.MODES["greedy"])
    nan = np.full((2, images.CONDITION_DIM), np.nan, dtype=np.float32)
    bad = {
        "no text encoder": replace(good[0], sample_id="text", prompt="a red star", condition=None),
        "do not fit": replace(good[0], sample_id="shape", condition=np.zeros((2, 5), dtype=np.float32)),
        "the model takes 1 to 7": replace(good[0], sample_id="long", condition=np.zeros((8, 12), dtype=np.float32)),
        "0 features": replace(good[0], sample_id="empty", condition=np.zeros((0, 12), dtype=np.float32)),
        "not finite": replace(good[0], sample_id="nan", condition=nan),
        "needs a prompt or features": replace(good[0], sample_id="label", condition=3),
        "an output of this model has 16 tokens": replace(
            good[0], sample_id="tokens", sampling=Sampling(max_new_tokens=17)
        ),
        "image(s)": replace(good[0], sample_id="image", images=(np.zeros((4, 4, 3), dtype=np.uint8),)),
    }
    done = {c.sample_id: c for c in engine.run([*bad.values(), *good])}
    for words, request in bad.items():
        error = done[request.sample_id].error
        assert error is not None, request.sample_id
        assert words in error.message, error.message
    reference = contract.expected("text", good, "greedy")
    assert {r.sample_id: done[r.sample_id].token_ids for r in good} == reference


@pytest.mark.parametrize("label", [-1, 5, 6, True, None])
def test_a_class_that_does_not_exist_is_refused(label: object) -> None:
    target = images.target("class")
    engine = Engine(target, Method(images.eagle(target), Chain(3), Exact()), 1, 64)
    asked = Request("x", "", (), Sampling(max_new_tokens=16), condition=label)  # type: ignore[arg-type]
    (done,) = engine.run([asked])
    assert done.error is not None
    assert "0 to 4" in done.error.message


def test_guidance_without_a_second_lane_is_refused() -> None:
    target = images.target("text", guided=False)
    engine = Engine(target, Method(images.eagle(target), Chain(3), Exact()), 1, 64)
    (done,) = engine.run(images.requests("text", 1, contract.MODES["greedy-guided"]))
    assert done.error is not None
    assert "unconditional lane" in done.error.message


def test_a_scale_of_one_on_two_lanes_equals_one_lane() -> None:
    wanted = images.requests("text", 4, Sampling(temperature=0.7, top_k=9))
    results = []
    for guided in (True, False):
        target = images.target("text", guided)
        done = checks.run(Engine(target, Method(images.eagle(target), Chain(3), Exact()), 4, 64), wanted)
        results.append({name: c.token_ids for name, c in done.items()})
    assert results[0] == results[1]


LIMIT = 2.1
"""Chi-square per degree of freedom; at 20 to 26 degrees the right distribution exceeds it once in a thousand runs."""


@pytest.mark.slow_cases("rejection")
@pytest.mark.parametrize("rule", [Exact(), Rejection()], ids=["exact", "rejection"])
def test_the_codes_keep_the_targets_distribution_under_guidance_and_top_k(rule: Acceptance) -> None:
    assert contract.joint_of_three_codes(lambda of: Method(images.eagle(of), DynamicTree(3, 1, 8), rule)) < LIMIT


@pytest.mark.slow
def test_an_independent_drafter_keeps_the_targets_distribution_under_guidance() -> None:
    chained = contract.joint_of_three_codes(lambda of: Method(images.smaller(of, "small", 0.1), Chain(3), Rejection()))
    assert chained < LIMIT


class NoLook(TorchDispatchMode):
    """Raises on operations that read a number or a count from the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        asks = name in ("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2")
        if name in ("index", "index_put_", "index_put"):
            asks = any(index is not None and index.dtype == torch.bool for index in args[1])
        if asks:
            raise RuntimeError(f"a step asks the device: {name}")
        return func(*args, **(kwargs or {}))


@pytest.mark.slow_cases(
    "jacobi+lantern-zero", "jacobi-above", "jacobi-wide", "layer-skip-tree", "eagle3", "medusa", "sd-dynamic", "suffix"
)
@pytest.mark.parametrize("method", list(contract.METHODS))
def test_a_guided_step_does_not_synchronise_with_the_device(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = []

    def watched(*asked: Any) -> Any:
        with NoLook():
            counted.append(run_step(*asked))
        return counted[-1]

    monkeypatch.setattr(replay, "run_step", watched)
    contract.check_equal(method, "text", 3, "sampled-interval", count=4)
    assert counted


def test_the_check_finds_a_synchronisation_with_the_device() -> None:
    values = torch.arange(3)
    for look in (
        lambda: int(values[1]),
        lambda: values[values > 1],
        lambda: bool(values.any()),
    ):
        with pytest.raises(RuntimeError, match="asks the device"), NoLook():
            look()
