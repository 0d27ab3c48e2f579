"""Prefetched prompts: in order, equal ones once, within bounds, dropped when no request needs them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decoding import Request
from decoding.scheduling.admission import MAX_UNKNOWN, PromptPrefetcher
from models.backends.base import SideStream
from models.inputs.packing import PackedInputs, pack
from models.inputs.prefix import Prefix
from models.inputs.processing import PromptError
from models.inputs.prompt_prefetch import Encode, PreparedPrompt, Prompt, PromptThread


class Patient(PromptThread):
    """Prepares prompts on request, in the calling thread."""

    def __init__(self) -> None:
        self._stream = SideStream()
        self._queue = deque()

    def start(self, encode: Encode) -> None:
        self.encode = encode

    def work(self, number: int = 1000) -> None:
        some, rest = list(self._queue)[:number], list(self._queue)[number:]
        self._queue = deque(some)
        if some:
            self._prepare(self.encode)
        self._queue = deque(rest)


def lanes(num_tokens: int) -> list[Prefix]:
    ids = torch.arange(num_tokens)
    return [Prefix(ids, torch.zeros(num_tokens, 1), ids, ids < 0)]


class ToOrder:
    """Prompts with the number of tokens given in the text, and a record of those prepared."""

    def __init__(self, max_tokens: int) -> None:
        self.thread = Patient()
        self.made: list[str] = []
        self.prefetcher = PromptPrefetcher(self.thread, self.make, max_tokens)

    def make(self, prompts: Iterable[Prompt]) -> Iterator[PreparedPrompt | PromptError]:
        for prompt in prompts:
            self.made.append(prompt.prompt)
            is_bad = prompt.prompt == "bad"
            yield PromptError("no words") if is_bad else PreparedPrompt(lanes(int(prompt.prompt.split()[0])), 0)

    def take(self, request: Request) -> PreparedPrompt:
        prompt = self.prefetcher.take(request)
        assert isinstance(prompt, PreparedPrompt)
        return prompt


def rows(prompts: Iterable[str]) -> list[Request]:
    return [Request(str(index), prompt) for index, prompt in enumerate(prompts)]


def test_equal_prompts_are_prepared_once_in_the_order_of_their_requests() -> None:
    setup = ToOrder(100)
    wanted = rows(["3 a", "3 b", "3 a", "3 c", "3 b"])
    setup.prefetcher.prefetch(wanted)
    setup.thread.work()
    assert setup.made == ["3 a", "3 b", "3 c"]
    prompts = [setup.take(request) for request in wanted]
    assert prompts[0] is prompts[2]
    assert prompts[1] is prompts[4]
    assert setup.made == ["3 a", "3 b", "3 c"]


def test_prompts_are_submitted_by_their_tokens_and_few_while_no_length_is_known() -> None:
    setup = ToOrder(100)
    wanted = rows(f"4 {index}" for index in range(80))
    setup.prefetcher.prefetch(wanted)
    assert len(setup.thread._queue) == MAX_UNKNOWN
    setup.thread.work(1)
    setup.take(wanted[0])
    # The first is taken; of the others, seven are pending, and each counts four tokens from now on.
    setup.prefetcher.prefetch(wanted[1:])
    assert len(setup.thread._queue) == 25
    setup.thread.work()
    for _ in range(3):
        setup.prefetcher.prefetch(wanted[1:])
    assert not setup.thread._queue
    assert len(setup.made) == 26
    # Five more are taken, so five are submitted.
    setup.prefetcher.prefetch(wanted[6:])
    assert len(setup.thread._queue) == 5


def test_prompts_that_turn_out_long_cancel_those_behind_them() -> None:
    setup = ToOrder(100)
    wanted = rows(["4 a", *(f"60 {index}" for index in range(40))])
    setup.prefetcher.prefetch(wanted[:1])
    setup.thread.work()
    setup.take(wanted[0])
    setup.prefetcher.prefetch(wanted[1:])
    assert len(setup.thread._queue) == 25
    setup.thread.work(3)
    setup.prefetcher.prefetch(wanted[1:])
    setup.thread.work()
    assert len(setup.made) == 4


def test_the_length_of_a_processed_prompt_is_known_before_it_is_encoded() -> None:
    setup = ToOrder(100)
    ids = pack(torch.zeros(1, 30, dtype=torch.long))
    wanted = [replace(request, inputs=PackedInputs({"input_ids": ids})) for request in rows(["30", "a", "b", "c", "d"])]
    wanted = [replace(request, prompt=f"30 {request.prompt}") for request in wanted]
    setup.prefetcher.prefetch(wanted)
    assert len(setup.thread._queue) == 4


def test_a_refused_prompt_takes_no_capacity_and_is_returned_at_every_take() -> None:
    setup = ToOrder(10)
    wanted = rows(["bad", "3 a"])
    setup.prefetcher.prefetch(wanted)
    setup.thread.work()
    for _ in range(2):
        refused = setup.prefetcher.take(wanted[0])
        assert isinstance(refused, PromptError)
        assert str(refused) == "no words"
    assert setup.take(wanted[1]).lanes[0].length == 3
    setup.prefetcher.prefetch([*wanted, *rows(["3 b"])])
    assert len(setup.thread._queue) == 1


def test_an_error_that_is_no_refusal_is_raised_for_the_prompts_of_its_batch_and_not_for_later_ones() -> None:
    thread = Patient()

    def make(prompts: Iterable[Prompt]) -> Iterator[PreparedPrompt | PromptError]:
        for prompt in prompts:
            if prompt.prompt == "broken":
                raise RuntimeError("a kernel failed")
            yield PreparedPrompt(lanes(3), 0)

    prefetcher = PromptPrefetcher(thread, make, 100)
    wanted = rows(["a", "broken", "b"])
    prefetcher.prefetch(wanted)
    thread.work()
    for request in (wanted[0], wanted[2]):
        assert isinstance(prefetcher.take(request), PreparedPrompt)
    with pytest.raises(RuntimeError, match="a kernel failed"):
        prefetcher.take(wanted[1])


def test_prompts_that_are_no_longer_expected_are_neither_prepared_nor_kept() -> None:
    setup = ToOrder(100)
    wanted = rows(["3 a", "3 b", "3 c"])
    setup.prefetcher.prefetch(wanted)
    setup.thread.work(1)
    setup.prefetcher.prefetch([wanted[2]])
    setup.thread.work()
    assert setup.made == ["3 a", "3 c"]
    assert list(setup.prefetcher._prompts.values()) == [setup.prefetcher._by_request[id(wanted[2])][1]]
    setup.prefetcher.prefetch([])
    assert not setup.prefetcher._prompts
    assert not setup.prefetcher._by_request


def test_the_pixels_of_an_expected_request_are_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = ToOrder(100)
    wanted = rows(["3 a", "3 b"])
    hashed: list[str] = []
    content = Prompt.content.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(Prompt, "content", property(lambda prompt: hashed.append(prompt.prompt) or content(prompt)))
    for _ in range(9):
        setup.prefetcher.prefetch(wanted)
    setup.thread.work()
    setup.prefetcher.take(wanted[0])
    assert len(hashed) <= 4


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=20),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(0, 6)), max_size=30),
)
def test_every_request_gets_its_own_prompt_in_any_order_of_operations(
    lengths: list[int], turns: list[tuple[int, int, int]]
) -> None:
    setup = ToOrder(12)
    waiting = deque(rows(f"{length} x" for length in lengths))
    for num_made, num_taken, num_expected in turns:
        setup.prefetcher.prefetch(list(waiting)[:num_expected])
        assert sum(coming.num_columns is None for coming in setup.prefetcher._prompts.values()) <= 12
        setup.thread.work(num_made)
        for _ in range(min(num_taken, len(waiting))):
            request = waiting.popleft()
            if setup.prefetcher._find(request) is None:
                setup.prefetcher._submit(request)
            setup.thread.work()
            assert setup.take(request).lanes[0].length == int(request.prompt.split()[0])


class Noted(SideStream):
    """Records its calls, and hands tensors over as a device's stream does."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.is_reached = False

    def use(self) -> Any:
        self.events.append("used")
        return nullcontext()

    def record_event(self) -> Any:
        self.events.append("marked")
        return "mark"

    def is_complete(self, mark: Any) -> bool:
        return mark == "mark" and self.is_reached

    def hand_over(self, mark: Any, tensors: Any) -> None:
        self.events.append((mark, [tensor.data_ptr() for tensor in tensors]))


def test_prompts_prepared_on_a_stream_are_synchronised_when_taken() -> None:
    thread = PromptThread(SideStream())
    thread._stream = noted = Noted()
    ids = torch.arange(4)
    lane = Prefix(ids, torch.zeros(4, 2), ids + 1, ids > 2, (torch.ones(1, 2), torch.ones(1, 2)), ids < 1, 1)

    def make(prompts: Iterable[Prompt]) -> Iterator[PreparedPrompt | PromptError]:
        for _ in prompts:
            noted.events.append("made")
            yield PreparedPrompt([lane], 0)

    coming = thread.submit(Prompt("a"))
    thread.start(make)
    assert coming.take().lanes == [lane]
    held = (lane.token_ids, lane.embeds, lane.positions, lane.visual, lane.padding, *lane.deepstack)
    *before, (mark, handed) = noted.events
    assert before == ["used", "made", "marked"]
    assert mark == "mark"
    assert handed == [prefix.data_ptr() for prefix in held if prefix is not None]
    assert len(handed) == 7


def test_a_prompt_is_ready_after_its_device_event_and_a_refusal_at_once() -> None:
    thread = PromptThread(SideStream())
    thread._stream = noted = Noted()
    fine, bad = rows(["fine", "bad"])

    def make(prompts: Iterable[Prompt]) -> Iterator[PreparedPrompt | PromptError]:
        for prompt in prompts:
            yield PromptError("bad") if prompt.prompt == "bad" else PreparedPrompt(lanes(4), 0)

    prefetcher = PromptPrefetcher(thread, make, 100)
    prefetcher.prefetch([fine, bad])
    assert isinstance(prefetcher.take(bad), PromptError)
    # The thread makes one after the other, so both are made.
    assert prefetcher.is_ready(bad)
    assert not prefetcher.is_ready(fine)
    noted.is_reached = True
    assert prefetcher.is_ready(fine)


def test_a_stream_that_fails_fails_the_prompts_and_does_not_stop_the_thread() -> None:
    class Broken(SideStream):
        def use(self) -> Any:
            raise RuntimeError("the device is gone")

    thread = Patient()
    thread._stream = Broken()
    prefetcher = PromptPrefetcher(thread, lambda prompts: iter(()), 100)
    wanted = rows(["a", "b"])
    prefetcher.prefetch(wanted)
    thread.work()
    for request in wanted:
        with pytest.raises(RuntimeError, match="the device is gone"):
            prefetcher.take(request)
