"""Plain requests are decoded beside the others by an engine of their own, and audited rows are a random share."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.serving.audited import AuditedEngine, is_audited, split_slots
from actors.serving.recovery import RecoveringEngine
from decoding.types import Completion, Request
from tests.actors.fakes import FakeEngine, text_of


class Named(FakeEngine):
    """A fake engine that writes its name into texts."""

    def __init__(self, name: str, slots: int) -> None:
        super().__init__(slots)
        self.name = name

    def step(self) -> list[Completion]:
        return [replace(completion, text=f"{self.name}: {completion.text}") for completion in super().step()]


@given(st.integers(1, 512), st.floats(1e-6, 1.0))
def test_slots_are_split_without_more_memory_and_none_is_left_without(slots: int, share: float) -> None:
    main, plain = split_slots(slots, share)
    assert main >= 1
    assert plain >= 1
    assert main + plain == max(2, slots)


@pytest.mark.parametrize("share", [0.02, 0.5])
def test_every_row_is_audited_with_the_probability_of_the_share(share: float) -> None:
    num_rows = 20_000
    chosen = [{number for number in range(num_rows) if is_audited(share, seed, f"row-{number}")} for seed in (0, 1)]
    deviation = math.sqrt(num_rows * share * (1 - share))
    for audited_ids in chosen:
        assert abs(len(audited_ids) - share * num_rows) < 4 * deviation
    expected = share**2 * num_rows
    assert abs(len(chosen[0] & chosen[1]) - expected) < 4 * math.sqrt(expected) + 1, "seeds choose independently"
    assert all(is_audited(1.0, 0, f"row-{number}") for number in range(100))


def test_every_request_is_decoded_once_by_its_engine() -> None:
    made: list[Named] = []

    def make(name: str, slots: int) -> Named:
        made.append(Named(name, slots))
        return made[-1]

    own = RecoveringEngine(lambda slots: make("own", slots), lambda: make("spare", 1), 3)
    engine = AuditedEngine(own, lambda slots: make("plain", slots), 2)
    requests = [Request(f"r{number}", f"p{number}", plain=number % 3 == 0) for number in range(12)]
    for request in requests:
        engine.submit(request)
    assert engine.num_waiting == 12
    done: dict[str, str] = {}
    for _ in range(200):
        for completion in engine.step():
            assert completion.sample_id not in done
            done[completion.sample_id] = completion.text
        if not engine.has_work:
            break
    assert not engine.has_work
    assert engine.num_waiting == 0
    assert done == {
        request.sample_id: f"{'plain' if request.plain else 'own'}: {text_of(request)}" for request in requests
    }
    assert {engine.name: engine.slots for engine in made} == {"own": 3, "plain": 2}
