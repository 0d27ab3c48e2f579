"""Recovery after out-of-memory and drafter errors does not change the tokens of any row."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import decoding.errors
from actors.serving.recovery import RecoveringEngine
from decoding import Engine, Method, Sampling
from decoding.acceptance import Exact
from decoding.drafters import NoDrafter
from decoding.drafters.guarded import guarded
from decoding.trees import Chain
from decoding.types import Completion, Request
from models.kv.lanes import LaneModel, SlotBatch
from tests import toys
from tests.actors.fakes import FakeEngine, FakePair, complete, text_of
from tests.conformance import checks
from tests.decoding.failing_drafter import FailingDrafter


@pytest.fixture(autouse=True, scope="module")
def no_collection() -> Iterator[None]:
    """Skips garbage collection, which takes a second in a test process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("actors.serving.recovery.release_memory", lambda: None)
        yield


TORCH_MESSAGE = "CUDA out of memory. Tried to allocate 2.00 GiB"


class SmallMemory(FakeEngine):
    """Has room for `room` rows; one with the word HUGE counts `huge` times. Its drafter fails on the word SICK."""

    def __init__(self, slots: int, room: int, huge: int, error_text: str) -> None:
        super().__init__(slots)
        self.room, self.huge, self.error_text = room, huge, error_text
        self.is_plain = False

    def step(self) -> list[Completion]:
        coming = list(self.waiting)[: self.slots - len(self.active)]
        rows = [*(request for request, _ in self.active.values()), *coming]
        if sum(self.huge if "HUGE" in request.prompt else 1 for request in rows) > self.room:
            raise torch.OutOfMemoryError(self.error_text)
        if not self.is_plain and any("SICK" in request.prompt for request in rows):
            raise decoding.errors.DrafterError("the drafter failed: IndexError")
        return super().step()


class Maker:
    """Builds these engines and records them."""

    def __init__(self, room: int, huge: int = 1, fits: int = 1000, error_text: str = TORCH_MESSAGE) -> None:
        self.room, self.huge, self.fits, self.error_text = room, huge, fits, error_text
        self.slots: list[int] = []
        self.num_plain = 0

    def make(self, slots: int) -> SmallMemory:
        self.slots.append(slots)
        if slots > self.fits:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return SmallMemory(slots, self.room, self.huge, self.error_text)

    def plain(self) -> SmallMemory:
        self.num_plain += 1
        engine = SmallMemory(1, self.room, self.huge, self.error_text)
        engine.is_plain = True
        return engine


def run(engine: RecoveringEngine, requests: list[Request], max_steps: int = 2000) -> dict[str, Completion]:
    for request in requests:
        engine.submit(request)
    done: list[Completion] = []
    for _ in range(max_steps):
        if not engine.has_work:
            break
        done += engine.step()
    assert not engine.has_work, "the engine comes to no end"
    completions = {completion.sample_id: completion for completion in done}
    assert len(completions) == len(done) == len(requests)
    return completions


def request(index: int, word: str = "fine") -> Request:
    return Request(f"s{index}", f"{index} {word}")


@pytest.mark.parametrize("error_text", [TORCH_MESSAGE, ""])
def test_slots_are_halved_until_the_rows_fit_and_every_row_is_run(error_text: str) -> None:
    maker = Maker(room=3, error_text=error_text)
    engine = RecoveringEngine(maker.make, maker.plain, 16)
    completions = run(engine, [request(index) for index in range(40)])
    assert {completion.sample_id: completion.text for completion in completions.values()} == {
        f"s{index}": text_of(request(index)) for index in range(40)
    }
    assert maker.slots == [16, 8, 4, 2]
    assert (engine.num_slots, engine.num_free_slots, engine.num_waiting) == (2, 2, 0)


def test_an_engine_whose_own_memory_does_not_fit_is_made_smaller() -> None:
    maker = Maker(room=100, fits=4)
    engine = RecoveringEngine(maker.make, maker.plain, 16)
    assert maker.slots == [16, 8, 4]
    assert len(run(engine, [request(index) for index in range(9)])) == 9
    with pytest.raises(torch.OutOfMemoryError):
        RecoveringEngine(Maker(room=1, fits=0).make, maker.plain, 8)


def test_a_row_that_does_not_fit_alone_is_an_error_and_the_slots_return() -> None:
    maker = Maker(room=8, huge=9)
    engine = RecoveringEngine(maker.make, maker.plain, 8)
    completions = run(engine, [request(index, "HUGE" if index in (2, 19) else "fine") for index in range(30)])
    failed = {name: completion.error.code for name, completion in completions.items() if completion.error is not None}
    assert failed == dict.fromkeys(("s2", "s19"), "out_of_memory")
    assert engine.num_slots == 8
    error = completions["s2"].error
    assert error is not None
    assert "Tried to allocate 2.00 GiB" in error.message
    assert completions["s3"].text == text_of(request(3))


@settings(deadline=None)
@given(
    words=st.lists(st.sampled_from(["fine", "fine", "HUGE", "SICK"]), min_size=1, max_size=14),
    slots=st.integers(1, 9),
    room=st.integers(1, 9),
    huge=st.integers(1, 12),
)
@example(words=["SICK", "HUGE", "SICK", "fine", "HUGE"], slots=4, room=2, huge=5)
@example(words=["SICK", "SICK", "SICK"], slots=1, room=1, huge=1)
@example(words=["fine", "SICK", "fine", "HUGE"], slots=3, room=2, huge=2)
def test_every_row_has_one_result_whatever_fails(words: list[str], slots: int, room: int, huge: int) -> None:
    maker = Maker(room, huge)
    engine = RecoveringEngine(maker.make, maker.plain, slots)
    completions = run(engine, [request(index, word) for index, word in enumerate(words)])
    for index, word in enumerate(words):
        completion = completions[f"s{index}"]
        if word == "HUGE" and huge > room:
            assert completion.error is not None
            assert completion.error.code == "out_of_memory"
        else:
            assert completion.error is None
            assert completion.text == text_of(request(index, word))
            assert completion.telemetry.degraded == (word == "SICK")


def test_errors_other_than_out_of_memory_and_drafter_errors_propagate() -> None:
    pair = FakePair()
    engine = RecoveringEngine(pair.engine, pair.plain_engine, 2)
    engine.submit(Request("a", "CRASH"))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        engine.step()
    assert complete(request(1)).telemetry.degraded is False


# --- the real engine -----------------------------------------------------------------------------------------------

SAMPLED = Sampling(temperature=0.9, top_k=20, top_p=0.95)


def recovering(sick: FailingDrafter | None = None, slots: int = 6) -> RecoveringEngine:
    def make(slots: int) -> Engine:
        drafter = sick or checks.make_drafter("perturbed", "llava")
        engine = Engine(toys.target("llava"), guarded(Method(drafter, Chain(3), Exact())), slots, 96)
        if sick is not None:
            sick.engine = engine
        return engine

    def plain() -> Engine:
        return Engine(toys.target("llava"), Method(NoDrafter(), Chain(1), Exact()), 1, 96)

    return RecoveringEngine(make, plain, slots)


def undisturbed(requests: list[Request]) -> dict[str, tuple[int, ...]]:
    plain = Engine(toys.target("llava"), Method(NoDrafter(), Chain(1), Exact()), 3, 96)
    return {name: completion.token_ids for name, completion in checks.run(plain, requests).items()}


def tokens_of(completions: dict[str, Completion]) -> dict[str, tuple[int, ...]]:
    assert [completion.error for completion in completions.values() if completion.error] == []
    return {name: completion.token_ids for name, completion in completions.items()}


@pytest.mark.parametrize("where", ["admit", "forward"])
def test_a_device_that_holds_two_rows_gives_the_same_tokens_as_one_that_holds_all(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uses sampling, so that noise must be keyed by the row; interrupted rows start again."""
    requests = checks.requests("llava", 9, SAMPLED)
    expected = undisturbed(requests)
    honest = getattr(LaneModel, where)

    def cramped(self: LaneModel, slots: SlotBatch, *rest: object, **named: object) -> object:
        if len(slots.ids) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return honest(self, slots, *rest, **named)

    monkeypatch.setattr(LaneModel, where, cramped)
    engine = recovering()
    assert tokens_of(run(engine, requests)) == expected
    # Only admission is limited: as slots become free one by one, more rows fit than can be admitted at once.
    assert engine.num_slots in ((1, 3) if where == "forward" else (1, 3, 6))


@pytest.mark.parametrize("where", ["admit", "draft", "commit"])
def test_rows_on_which_the_drafter_raises_are_decoded_without_it(where: str) -> None:
    requests = checks.requests("llava", 8, SAMPLED)
    expected = undisturbed(requests)
    inner = checks.make_drafter("perturbed", "llava")
    sick = FailingDrafter(inner, lambda request: request.sample_id in ("sample-1", "sample-6"), raises_in=where)
    completions = run(recovering(sick, slots=4), requests)
    assert tokens_of(completions) == expected
    degraded = {name for name, completion in completions.items() if completion.telemetry.degraded}
    assert degraded == {"sample-1", "sample-6"}
    assert all(completions[name].telemetry.num_draft_tokens == 0 for name in degraded)
    assert sum(completion.telemetry.num_accepted_draft_tokens for completion in completions.values()) > 0


@pytest.mark.parametrize("where", ["prefixes", "prefill", "draft"])
def test_a_row_whose_drafter_lacks_memory_even_alone_is_decoded_without_it(where: str) -> None:
    requests = checks.requests("llava", 8, SAMPLED)
    expected = undisturbed(requests)
    inner = checks.make_drafter("perturbed", "llava")
    sick = FailingDrafter(
        inner, lambda request: request.sample_id == "sample-3", raises_in=where, error=torch.OutOfMemoryError
    )
    engine = recovering(sick, slots=4)
    completions = run(engine, requests)
    assert tokens_of(completions) == expected
    assert {name for name, completion in completions.items() if completion.telemetry.degraded} == {"sample-3"}
    assert engine.num_slots == 4
