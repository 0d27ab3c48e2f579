"""Tests that replayed steps of models with recurrent layers equal launched ones: states have fixed addresses."""

from __future__ import annotations

import pytest

from decoding import Engine, Method, Sampling
from decoding.acceptance import Exact
from decoding.drafters import NoDrafter
from decoding.scheduling import replay
from decoding.trees import Chain
from models.backends.base import REFERENCE
from models.backends.cuda.backend import CudaBackend
from tests import toys
from tests.conformance import checks
from tests.conformance.recurrent import KINDS
from tests.decoding.scheduling.test_replay import decode, with_pauses
from tests.models.backends.cuda.test_graphs import TapeRecorder, captured
from tests.models.plain_tree_kernel import plain

pytestmark = pytest.mark.slow
SAMPLED = Sampling(temperature=0.9, top_k=20, top_p=0.95)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> CudaBackend:
    """The CUDA backend over CPU tensors; all forwards count as captured."""
    backend = CudaBackend()
    for name in ("copy_to_host", "copy_to_device"):
        monkeypatch.setattr(backend, name, getattr(REFERENCE, name))
    monkeypatch.setattr(backend, "step_recorder", lambda _: TapeRecorder())
    monkeypatch.setattr("models.backends.cuda.backend.kernel_for", lambda *_: plain)
    monkeypatch.setattr("models.kv.lanes.backend_for", lambda _: backend)
    monkeypatch.setattr("models.backends.attention.DecoderRunner.is_captured", True)
    return backend


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", ["plain", "sd-chain", "lookup"])
@pytest.mark.parametrize("family", KINDS)
def test_replayed_steps_equal_launched_ones(
    family: str, name: str, sampling: Sampling, backend: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "NUM_LAUNCHED", 1)
    got, runner = decode(name, family, sampling)
    assert runner.num_recordings > 1
    assert runner.recorder is not None, "a recording failed"
    monkeypatch.setattr(backend, "step_recorder", lambda _: None)
    expected, _ = decode(name, family, sampling)
    assert {key: values[:3] for key, values in got.items()} == {key: values[:3] for key, values in expected.items()}
    if sampling.temperature == 0:
        for request in checks.requests(family, 9, sampling, longest=40):
            assert got[request.sample_id][0] == checks.generated(family, request, toys.target(family).eos_ids)


@pytest.mark.parametrize("family", KINDS)
def test_recordings_are_made_ahead_and_used(family: str, backend: CudaBackend) -> None:
    got, runner = decode("sd-chain", family, Sampling())
    keys = set(runner._recordings)
    assert keys
    for request in checks.requests(family, 9, Sampling(), longest=40):
        assert got[request.sample_id][0] == checks.generated(family, request, toys.target(family).eos_ids)
    assert runner._counts.total() < 6, "steps of recorded sizes are replayed"


@pytest.mark.parametrize("family", KINDS)
def test_steps_without_drafts_are_replayed_between_steps_that_catch_up(
    family: str, backend: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "NUM_LAUNCHED", 1)
    got, runner = decode("sd-chain", family, Sampling(), with_pauses)
    assert runner.num_recordings > 1
    for request in checks.requests(family, 9, Sampling(), longest=40):
        assert got[request.sample_id][0] == checks.generated(family, request, toys.target(family).eos_ids)


@pytest.mark.parametrize("family", KINDS)
def test_forwards_outside_whole_steps_are_launched(family: str) -> None:
    target = toys.target(family)
    run = captured(target)
    target._run = run
    wanted = checks.requests(family, 5)
    engine = Engine(target, Method(NoDrafter(), Chain(1), Exact()), 3, 128)
    done = checks.run(engine, wanted)
    assert run.num_recordings == 0
    for request in wanted:
        assert done[request.sample_id].token_ids == checks.generated(family, request, target.eos_ids)
