"""Prefetched prompts: in order, equal ones once, within bounds, dropped when no request needs them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decoding import Request
from decoding.scheduling.admission import MAX_PENDING, PromptPrefetcher, content_of
from models.backends.base import SideStream
from models.inputs.prefix import Prefix
from models.inputs.prompt_prefetch import PendingPrompt, PreparedPrompt, PromptThread

CPU = torch.device("cpu")


class Patient(PromptThread):
    """Prepares prompts on request, in the calling thread."""

    def __init__(self) -> None:
        self.queue: deque[tuple[Future[Any], Callable[[], PreparedPrompt]]] = deque()

    def submit(self, make: Callable[[], PreparedPrompt]) -> PendingPrompt:
        future: Future[Any] = Future()
        self.queue.append((future, make))
        return PendingPrompt(future, SideStream())

    def work(self, number: int = 1000) -> None:
        for _ in range(min(number, len(self.queue))):
            future, make = self.queue.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result((make(), None))
                except Exception as error:
                    future.set_exception(error)


class ToOrder:
    """Prompts with the number of columns given in the text, and a record of those prepared."""

    def __init__(self, max_columns: int) -> None:
        self.thread = Patient()
        self.made: list[str] = []
        self.looked: list[str] = []
        self.prefetcher = PromptPrefetcher(self.thread, self.make, self.content, max_columns)

    def make(self, request: Request) -> PreparedPrompt:
        self.made.append(request.prompt)
        ids = torch.arange(int(request.prompt.split()[0]))
        return PreparedPrompt([Prefix(ids, torch.zeros(len(ids), 1), ids, ids < 0)], 0)

    def content(self, request: Request) -> Any:
        self.looked.append(request.sample_id)
        return content_of(request)


def rows(prompts: Iterable[str]) -> list[Request]:
    return [Request(str(index), prompt) for index, prompt in enumerate(prompts)]


def test_equal_prompts_are_prepared_once_in_the_order_of_their_requests() -> None:
    setup = ToOrder(100)
    wanted = rows(["3 a", "3 b", "3 a", "3 c", "3 b"])
    setup.prefetcher.prefetch(wanted)
    setup.thread.work()
    assert setup.made == ["3 a", "3 b", "3 c"]
    prompts = [setup.prefetcher.take(request) for request in wanted]
    assert prompts[0] is prompts[2]
    assert prompts[1] is prompts[4]
    assert setup.made == ["3 a", "3 b", "3 c"]


def test_the_numbers_of_prepared_and_pending_prompts_are_bounded() -> None:
    setup = ToOrder(10)
    wanted = rows(f"4 {index}" for index in range(40))
    setup.prefetcher.prefetch(wanted)
    assert len(setup.thread.queue) == MAX_PENDING
    setup.thread.work(1)
    setup.prefetcher.prefetch(wanted)
    assert len(setup.thread.queue) == MAX_PENDING
    setup.thread.work()
    for _ in range(3):
        setup.prefetcher.prefetch(wanted)
    assert not setup.thread.queue
    assert len(setup.made) == 1 + MAX_PENDING
    # The first three are admitted: of the others, ten columns still lie made.
    setup.prefetcher.prefetch(wanted[3:])
    assert not setup.thread.queue
    setup.prefetcher.prefetch(wanted[8:])
    assert len(setup.thread.queue) == MAX_PENDING


def test_a_refused_prompt_takes_no_capacity_and_raises_at_every_take() -> None:
    setup = ToOrder(10)
    wanted = rows(["bad", "3 a"])
    setup.prefetcher.prefetch(wanted)
    setup.thread.work()
    for _ in range(2):
        with pytest.raises(ValueError, match="invalid literal"):
            setup.prefetcher.take(wanted[0])
    assert setup.prefetcher.take(wanted[1]).lanes[0].length == 3
    setup.prefetcher.prefetch([*wanted, *rows(["3 b"])])
    assert len(setup.thread.queue) == 1


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


def test_the_pixels_of_an_expected_request_are_hashed_once() -> None:
    setup = ToOrder(100)
    wanted = rows(["3 a", "3 b"])
    setup.prefetcher.prefetch(wanted)
    num_looks = len(setup.looked)
    for _ in range(9):
        setup.prefetcher.prefetch(wanted)
    setup.thread.work()
    setup.prefetcher.take(wanted[0])
    assert len(setup.looked) == num_looks <= 4


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
        assert sum(coming.num_columns is None for coming in setup.prefetcher._prompts.values()) <= MAX_PENDING
        setup.thread.work(num_made)
        for _ in range(min(num_taken, len(waiting))):
            request = waiting.popleft()
            if setup.prefetcher._find(request) is None:
                setup.prefetcher._submit(request)
            setup.thread.work()
            assert setup.prefetcher.take(request).lanes[0].length == int(request.prompt.split()[0])


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

    def make() -> PreparedPrompt:
        noted.events.append("made")
        return PreparedPrompt([lane], 0)

    coming = thread.submit(make)
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
    ids = torch.arange(4)
    fine, bad = rows(["fine", "bad"])

    def make(request: Request) -> PreparedPrompt:
        if request is bad:
            raise ValueError("bad")
        return PreparedPrompt([Prefix(ids, torch.zeros(4, 2), ids, ids < 0)], 0)

    prefetcher = PromptPrefetcher(thread, make, content_of, 100)
    prefetcher.prefetch([fine, bad])
    with pytest.raises(ValueError, match="bad"):
        prefetcher.take(bad)
    # The thread makes one after the other, so both are made.
    assert prefetcher.is_ready(bad)
    assert not prefetcher.is_ready(fine)
    noted.is_reached = True
    assert prefetcher.is_ready(fine)
