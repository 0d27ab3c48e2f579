"""Admission of requests: selection, order, size of a group, and encoding of equal prompts once."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from decoding import Engine, Method, Request, Sampling
from decoding.acceptance import Exact
from decoding.drafters import NoDrafter
from decoding.scheduling import admission as scheduling
from decoding.scheduling.admission import MAX_PREFETCHED, MAX_UNKNOWN, NUM_ENCODED_FORWARDS, Admission
from decoding.trees import Chain
from models.backends.base import REFERENCE, SideStream
from models.backends.cache import RaggedCache
from models.backends.rows import SlotRows
from models.contract import TargetModel
from models.inputs.prefix import Prefix
from models.inputs.prompt_prefetch import Encode, PendingPrompt, Prompt, PromptThread
from models.kv.prefill import PromptReader
from tests import toys
from tests.conformance import checks
from tests.decoding.scheduling.test_prompt_prefetch import Patient

SHORT = Sampling(max_new_tokens=3)
OWN_ROWS = SlotRows(RaggedCache(1, 8, 1, torch.device("cpu")), 1, 1, REFERENCE), 0
"""Rows that hold no pages, and scratch positions."""


class CountingTarget(TargetModel):
    """Encodes a prompt of n words as n columns, and records the encoded prompts."""

    def __init__(self) -> None:
        self.encoded: list[str] = []

    def encode_lanes(
        self, prompt: str, images: Any, condition: Any, videos: Any = (), inputs: Any = None
    ) -> list[Prefix]:
        self.encoded.append(prompt)
        ids = torch.arange(len(prompt.split()))
        return [Prefix(ids, torch.zeros(len(ids), 1), ids, ids < 0)]

    def decode(self, token_ids: Any) -> str:
        raise NotImplementedError


def words(count: int) -> str:
    return " ".join(["w"] * count)


@settings(deadline=None)
@given(st.lists(st.integers(1, 120), max_size=30), st.integers(1, 9), st.integers(1, 60))
@example([1, 200, 1, 300, 1], 3, 10)
@example([90, 90, 90], 9, 10)
def test_every_request_is_admitted_once_in_order_and_encoded_prompts_are_bounded(
    lengths: list[int], num_free: int, bound: int
) -> None:
    target = CountingTarget()
    admission = Admission(target, 103, bound, *OWN_ROWS)
    for i, n in enumerate(lengths):
        admission.queue.submit(Request(str(i), words(n), sampling=SHORT))
    taken, refused = [], []
    while admission.queue.num_waiting:
        some = admission.take(num_free)
        assert some.requests or some.refused
        assert len(some.requests) <= num_free
        columns = [lanes[0].length for lanes in {id(lanes): lanes for lanes in some.lanes}.values()]
        assert sum(columns[:-1]) < NUM_ENCODED_FORWARDS * bound
        assert all(n <= 100 for n in columns)
        taken += [
            (request.sample_id, lanes[0].length) for request, lanes in zip(some.requests, some.lanes, strict=True)
        ]
        refused += [request.sample_id for request in some.refused]
    assert taken == [(str(i), n) for i, n in enumerate(lengths) if n <= 100]
    assert refused == [str(i) for i, n in enumerate(lengths) if n > 100]


def test_equal_prompts_are_encoded_once_and_share_their_lanes() -> None:
    target = CountingTarget()
    admission = Admission(target, 100, 50, *OWN_ROWS)
    prompts = ["a b", "c d e", "a b", "a b", "c d e"]
    for i, prompt in enumerate(prompts):
        admission.queue.submit(Request(str(i), prompt, sampling=SHORT, seed=i))
    lanes = admission.take(5).lanes
    assert target.encoded == ["a b", "c d e"]
    assert lanes[0] is lanes[2] is lanes[3]
    assert lanes[1] is lanes[4]
    assert lanes[0] is not lanes[1]


def test_a_bound_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="max_prefill_tokens must be at least 1, not 0"):
        Admission(CountingTarget(), 100, 0, *OWN_ROWS)


def make(slots: int, bound: int, family: str = "llava") -> Engine:
    method = Method(checks.make_drafter("perturbed", family), Chain(4), Exact())
    return Engine(toys.target(family), method, slots, 128, max_prefill_tokens=bound)


@pytest.mark.parametrize("bound", [1, 40, 8192])
def test_outputs_do_not_depend_on_the_bound_and_no_forward_exceeds_it(
    bound: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(5, bound)
    run_whole = PromptReader._run_whole
    sizes = []

    def noted(self: PromptReader, rows: Any, prefixes: Any) -> Any:
        sizes.append((len(prefixes), max(prefix.length for prefix in prefixes)))
        return run_whole(self, rows, prefixes)

    monkeypatch.setattr(PromptReader, "_run_whole", noted)
    wanted = checks.requests("llava", 9)
    done = checks.run(engine, wanted)
    for request in wanted:
        assert done[request.sample_id].token_ids == checks.generated("llava", request, engine.target.eos_ids)
        checks.check_telemetry(done[request.sample_id])
    assert all(number == 1 or number * longest <= bound for number, longest in sizes)
    assert (max(number for number, _ in sizes) > 1) == (bound > 1)
    assert engine.stats.num_admitted == 9


def test_refused_requests_and_requests_that_end_at_once_free_their_slots() -> None:
    fine = checks.requests("llama", 6)
    long = Request("long", " ".join(["w5"] * 200), sampling=SHORT)
    brief = replace(fine[0], sample_id="brief", sampling=Sampling(max_new_tokens=1))
    engine = make(2, 16, "llama")
    done = {
        completion.sample_id: completion
        for completion in engine.run([long, brief, *fine, replace(long, sample_id="longer")])
    }
    assert len(done) == 9
    assert {key for key, completion in done.items() if completion.error} == {"long", "longer"}
    for request in [brief, *fine]:
        assert done[request.sample_id].token_ids == checks.generated("llama", request, engine.target.eos_ids)


def test_of_equal_prompts_only_those_are_refused_whose_output_does_not_fit() -> None:
    prompt = " ".join(["w5"] * 60)
    wanted = [Request(f"{n}", prompt, sampling=Sampling(max_new_tokens=n, ignore_eos=True)) for n in (8, 90, 30)]
    done = {completion.sample_id: completion for completion in make(3, 8192, "llama").run(wanted)}
    assert {key: completion.error is None for key, completion in done.items()} == {"8": True, "90": False, "30": True}
    assert done["30"].token_ids == checks.generated("llama", wanted[2], frozenset())
    assert done["8"].token_ids == done["30"].token_ids[:8]


class Idle(PromptThread):
    """Begins and never makes."""

    def __init__(self) -> None:
        self.num_begun = 0

    def submit(self, prompt: Prompt) -> PendingPrompt:
        self.num_begun += 1
        return PendingPrompt(Future(), SideStream())

    def start(self, encode: Encode) -> None:
        pass


def test_a_step_prefetches_a_bounded_number_of_waiting_requests() -> None:
    target = CountingTarget()
    target.prompt_thread = thread = Idle()
    admission = Admission(target, 100, 50, *OWN_ROWS)
    seeds = (Request(str(seed), "a b", sampling=SHORT, seed=seed) for seed in range(10**9))
    for request in islice(seeds, 10_000):
        admission.queue.submit(request)
    admission.expect(seeds)
    admission.prefetch()
    assert thread.num_begun == 1
    assert admission._prefetcher is not None
    assert len(admission._prefetcher._by_request) == MAX_PREFETCHED
    # None of them is prepared, so no request is admitted, unless no request is running meanwhile.
    assert not admission.take(5, waits=False).requests
    assert admission.queue.num_waiting == 10_000


def llama_engine(thread: PromptThread | None, slots: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Engine, list[int]]:
    """Return an engine with a prompt thread, and the list of the sizes of its prefills."""
    target, sizes = toys.target("llama"), []
    target.prefetch_prompts()
    target.prompt_thread = thread or target.prompt_thread
    engine = Engine(target, Method(NoDrafter(), Chain(1), Exact()), slots, 160)
    prefill = engine._prefill
    monkeypatch.setattr(engine, "_prefill", lambda *given: sizes.append(len(given[1])) or prefill(*given))
    return engine, sizes


def distinct(count: int) -> list[Request]:
    return [
        replace(request, prompt=f"{request.prompt} w{n}") for n, request in enumerate(checks.requests("llama", count))
    ]


def test_free_slots_are_filled_by_one_prefill_while_nothing_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "MAX_WAIT_S", 600.0)
    count = 2 * MAX_UNKNOWN
    engine, sizes = llama_engine(None, count, monkeypatch)
    assert len(list(engine.run(distinct(count)))) == count
    assert sizes == [count]


def test_the_next_prompts_are_encoded_during_a_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "MAX_WAIT_S", 0.0)
    engine, sizes = llama_engine(thread := Patient(), 3 * MAX_UNKNOWN, monkeypatch)
    for request in distinct(3 * MAX_UNKNOWN):
        engine.submit(request)
    engine._admission.prefetch()
    thread.work()
    with torch.inference_mode():
        engine._admit()
    assert sizes == [MAX_UNKNOWN]
    assert len(thread._queue) == 2 * MAX_UNKNOWN


def test_a_refill_counts_prompts_that_are_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "MAX_WAIT_S", 0.0)
    engine, sizes = llama_engine(thread := Patient(), 6, monkeypatch)
    counts = []
    is_due = engine._refill.is_due
    monkeypatch.setattr(engine._refill, "is_due", lambda *given: counts.append(given) or is_due(*given))
    for request in distinct(7):
        engine.submit(request)
    engine._admission.prefetch()
    thread.work(1)
    engine.step()
    engine.step()
    thread.work(3)
    engine.step()
    # Free slots, ready requests, whether a slot decodes.
    assert counts == [(6, 7, False), (5, 0, True), (5, 3, True)]
    assert sizes == [1, 3]
