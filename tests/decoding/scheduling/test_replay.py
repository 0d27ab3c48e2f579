"""Tests that replayed steps equal launched ones for every method; fake graphs replay addresses, as CUDA's do."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from decoding import Engine, Method, Sampling
from decoding.acceptance import Exact
from decoding.contexts import Full
from decoding.drafters import ModelDrafter
from decoding.scheduling import replay
from decoding.scheduling.replay import Recording, StepRunner
from decoding.scheduling.slots import SlotTable
from decoding.trees import StaticTree, branching_paths
from models.backends.base import REFERENCE
from models.backends.cuda.backend import CudaBackend
from models.backends.rows import SlotRows
from tests import toys
from tests.conformance import checks, images
from tests.conformance.catch_up import MIXED
from tests.conformance.erratic import Erratic, unsettled
from tests.conformance.methods import FAST, METHODS
from tests.covering import tiers
from tests.models.backends.cuda.test_graphs import TapeRecorder, captured
from tests.models.plain_tree_kernel import plain


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


NUM_SLOTS = 5
SAMPLED = Sampling(temperature=0.9, top_k=20, top_p=0.95)
MODES = {"greedy": Sampling(), "sampled": SAMPLED}
CASES = [(name, families[0]) for name, (_, families) in METHODS.items()] + [("sd-tree", "qwen2_5_vl")]


def decode(
    name: str,
    family: str,
    sampling: Sampling,
    settle: Callable[[Method], Method] = lambda method: method,
    count: int = 9,
) -> tuple[dict[str, Any], StepRunner]:
    """What each request gave, and the runner of the engine's steps."""
    engine = Engine(toys.target(family), settle(METHODS[name][0](family)), NUM_SLOTS, 160)
    wanted, done = checks.requests(family, count, sampling, longest=40), {}
    for first in range(0, len(wanted), 6):
        # Slots become empty in between, in different orders; three active slots run with a spare one.
        done |= checks.run(engine, wanted[first : first + 6])
    results = {
        key: (
            completion.token_ids,
            round(completion.mean_logprob, 4),
            completion.telemetry.acceptance_histogram,
            completion.telemetry.drafter_forwards,
        )
        for key, completion in done.items()
    }
    return results, engine._runner


@tiers("name, family, mode", CASES, list(MODES), strength=1, fast=FAST)
def test_replayed_steps_equal_launched_ones(
    name: str, family: str, mode: str, backend: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "NUM_LAUNCHED", 1)
    got, runner = decode(name, family, MODES[mode])
    assert runner.num_recordings > 1
    assert runner.recorder is not None, "a recording failed"
    monkeypatch.setattr(replay, "MAX_RECORDINGS", 0)
    expected, runner = decode(name, family, MODES[mode])
    assert runner.num_recordings == 0
    assert got == expected
    # Steps of the number of rows and levels that they need: no spare slots, and fewer forwards of the drafter.
    monkeypatch.setattr(backend, "step_recorder", lambda _: None)
    exact, _ = decode(name, family, MODES[mode])
    assert {key: values[:3] for key, values in got.items()} == {key: values[:3] for key, values in exact.items()}


PROCESSED = Sampling(
    repetition_penalty=1.4,
    no_repeat_ngram_size=2,
    bad_words_ids=((9, 11), (5,)),
    min_new_tokens=9,
    suppress_tokens=tuple(range(20, 40)),
    forced_eos_token_id=(2,),
)


@pytest.mark.parametrize(
    ("name", "sampling"),
    [
        ("sd-chain", Sampling(repetition_penalty=1.2)),
        ("sd-chain", Sampling(temperature=0.9, repetition_penalty=1.2)),
        *((name, PROCESSED) for name in ("sd-chain", "dynamic", "lookup")),
    ],
)
def test_steps_with_processors_are_replayed(
    name: str, sampling: Sampling, backend: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "NUM_LAUNCHED", 1)
    got, runner = decode(name, "llama", sampling)
    assert runner.num_recordings > 1
    assert runner.recorder is not None, "a recording failed"
    monkeypatch.setattr(replay, "MAX_RECORDINGS", 0)
    assert decode(name, "llama", sampling)[0] == got


def with_pauses(method: Method) -> Method:
    """The method with steps without drafts, alone and several in a row."""
    return unsettled(method, pattern=MIXED)


@pytest.mark.parametrize("name", ["sd-chain", "eagle", "block", "layer-skip", "lookup", "medusa"])
def test_steps_without_drafts_are_replayed_too(
    name: str, backend: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "NUM_LAUNCHED", 1)
    got, runner = decode(name, "llama", Sampling(ignore_eos=True), with_pauses)
    assert {key[1] for key in runner._recordings} >= {0, METHODS[name][0]("llama").tree.max_levels}
    monkeypatch.setattr(replay, "MAX_RECORDINGS", 0)
    assert decode(name, "llama", Sampling(ignore_eos=True), with_pauses)[0] == got


@tiers("method, mode", list(images.METHODS), list(images.MODES), strength=1)
def test_replayed_images_equal_the_slow_reference(
    method: str, mode: str, backend: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "NUM_LAUNCHED", 1)
    recordings, record = [], StepRunner._record

    def counted(self: StepRunner, *given: Any) -> Any:
        recordings.append(given)
        return record(self, *given)

    monkeypatch.setattr(StepRunner, "_record", counted)
    images.check_equal(method, "class", 3, mode, count=4)
    assert recordings or method == "jacobi-wide"  # whose steps are few


@tiers("name, family, mode", CASES, list(MODES), strength=1, fast=FAST)
def test_all_steps_are_recorded_before_the_first_one(
    name: str, family: str, mode: str, backend: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows enter and end in mid-run. LVSpec reads as many visual states as the batch has, which is part of its key."""
    engine = Engine(toys.target(family), METHODS[name][0](family), NUM_SLOTS, 160)
    requests = checks.requests(family, 12, MODES[mode], longest=40)
    engine._runner.record_ahead(engine.method, [request.sampling for request in requests])
    runner, keys = engine._runner, set(engine._runner._recordings)
    assert 0 < len(keys) <= len(runner._sizes) * len(runner._depths) <= 4 * 3
    checks.run(engine, requests)
    assert set(runner._recordings) == keys or "lvspec" in name


def test_no_row_is_moved_and_spare_slots_do_not_grow(backend: CudaBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of five slots decode with one spare slot, whose lengths stay as they were in target and drafter."""
    monkeypatch.setattr(replay, "NUM_LAUNCHED", 1)
    moves: list[Any] = []
    monkeypatch.setattr(SlotRows, "_swap", lambda *given: moves.append(given))
    method = METHODS["sd-chain"][0]("llama")
    engine = Engine(toys.target("llama"), method, NUM_SLOTS, 160)
    sampling = Sampling(ignore_eos=True, max_new_tokens=64)
    requests = [replace(request, sampling=sampling) for request in checks.requests("llama", 8)]
    checks.run(engine, requests[:5])  # every slot has been used
    caches = [lanes.cache for lanes in (engine._lanes, method.drafter.lanes)]  # type: ignore[attr-defined]
    for request in requests[5:]:
        engine.submit(request)
    engine.step()
    before = [cache.lens.clone() for cache in caches]
    for _ in range(6):
        engine.step()
    assert engine._slots.free == [3, 4]
    for cache, lens in zip(caches, before, strict=True):
        assert (cache.lens[:3] > lens[:3]).all()
        assert cache.lens[3:].equal(lens[3:])
    assert engine._runner.num_recordings > 0
    assert not moves


def test_a_recording_contains_the_forwards_of_captured_decoders(
    backend: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recorded step replays no graph of a decoder: it has the kernels of the forward itself."""
    monkeypatch.setattr(replay, "NUM_LAUNCHED", 2)
    results = []
    for most in (0, 64):
        monkeypatch.setattr(replay, "MAX_RECORDINGS", most)
        target, drafter = toys.target("llava"), toys.perturbed("llava", 0.02)
        runs = [captured(model) for model in (target, drafter)]
        method = Method(ModelDrafter(drafter, [Full()], toys.VOCAB_SIZE), StaticTree(branching_paths([2, 2])), Exact())
        engine = Engine(target, method, 3, 160)
        done = checks.run(engine, checks.requests("llava", 8, longest=32))
        # A step that is recorded whole needs no recordings of its forwards.
        assert [run.num_recordings > 0 for run in runs] == [most == 0] * 2
        assert (engine._runner.num_recordings > 0) == (most > 0)
        results.append({key: completion.token_ids for key, completion in done.items()})
    assert results[0] == results[1]


def break_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pass


def forget_new_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays write to the slots of the recording."""
    monkeypatch.setattr(Recording, "fill", lambda *_: None)


def take_a_slot_that_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The spare slot of a step is one with a request, not a free one."""
    monkeypatch.setattr(SlotTable, "free", property(lambda self: list(range(len(self.progress)))[::-1]))


def forget_missed_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replayed steps without drafts leave the host's number of missed tokens as it was."""
    monkeypatch.setattr(ModelDrafter, "replayed", lambda *_: None)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [break_nothing, forget_new_slots, take_a_slot_that_decodes, forget_missed_tokens])
def test_planted_faults_are_found(
    fault: Callable[[pytest.MonkeyPatch], None], backend: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "NUM_LAUNCHED", 1)
    with monkeypatch.context() as planted:
        planted.setattr(replay, "MAX_RECORDINGS", 0)
        expected, _ = decode("sd-chain", "llava", SAMPLED, with_pauses, 24)
    with monkeypatch.context() as planted:
        fault(planted)
        try:
            got, _ = decode("sd-chain", "llava", SAMPLED, with_pauses, 24)
        except Exception:
            got = {}
    assert (got == expected) == (fault is break_nothing)


def test_a_step_that_cannot_be_recorded_is_launched(
    backend: CudaBackend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Refusing(TapeRecorder):
        def record(self, run: Callable[[], Any]) -> Any:
            super().record(run)
            raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(replay, "NUM_LAUNCHED", 1)
    with monkeypatch.context() as planted:
        planted.setattr(replay, "MAX_RECORDINGS", 0)
        expected, _ = decode("sd-tree", "llava", SAMPLED)
    monkeypatch.setattr(backend, "step_recorder", lambda _: Refusing())
    with caplog.at_level(logging.WARNING):
        got, runner = decode("sd-tree", "llava", SAMPLED)
    assert {key: values[:3] for key, values in got.items()} == {key: values[:3] for key, values in expected.items()}
    assert runner.recorder is None
    assert runner.num_recordings == 0
    assert [record.message for record in caplog.records] == [
        "steps are launched kernel by kernel, which is slower: this method cannot be recorded: "
        "operation not permitted when stream is capturing"
    ]


@pytest.mark.parametrize(
    ("most", "is_recorded"), [(3 * 6 * toys.VOCAB_SIZE - 1, False), (3 * 6 * toys.VOCAB_SIZE, True)]
)
def test_steps_with_many_logits_are_launched(
    most: int, is_recorded: bool, backend: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "MAX_LOGITS", most)
    engine = Engine(toys.target("llama"), METHODS["sd-chain"][0]("llama"), 3, 160)
    for request in checks.requests("llama", 3, longest=32):
        engine.submit(request)
    engine.step()
    engine.step()
    assert ((3, 5) in {key[:2] for key in engine._runner._recordings}) == is_recorded


def test_controllers_do_not_measure_steps_before_the_first_replay(
    backend: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    controllers: list[Erratic] = []
    keys: list[Any] = []
    key_of = StepRunner._key_of

    def watched(method: Method) -> Method:
        method = unsettled(method, pattern=[2])
        assert isinstance(method.controller, Erratic)
        controllers.append(method.controller)
        return method

    def noted(self: StepRunner, *given: Any) -> Any:
        keys.append(key_of(self, *given))
        return keys[-1]

    monkeypatch.setattr(StepRunner, "_key_of", noted)
    monkeypatch.setattr(StepRunner, "record_ahead", lambda *_: None)
    decode("sd-chain", "llama", Sampling(ignore_eos=True), watched)
    are_late = [outcome.is_late for outcome in controllers[0].outcomes]
    seen = [keys[: index + 1].count(key) for index, key in enumerate(keys)]
    assert max(seen) > replay.NUM_LAUNCHED + 2
    # Without a key, a step is as fast as it will be.
    assert are_late == [
        key is not None and number <= replay.NUM_LAUNCHED + 1 for key, number in zip(keys, seen, strict=True)
    ]


def test_numbers_of_keys_and_recordings_have_limits(backend: CudaBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "NUM_LAUNCHED", 1)
    _, runner = decode("sd-chain", "llava", Sampling())
    assert runner.num_recordings > 2
    monkeypatch.setattr(replay, "MAX_RECORDINGS", 2)
    monkeypatch.setattr(replay, "MAX_KEYS", 3)
    _, runner = decode("sd-chain", "llava", Sampling())
    assert runner.num_recordings == 2
    assert len(runner._counts) <= 3
