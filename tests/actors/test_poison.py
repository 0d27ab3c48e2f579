"""Tests that a row that ends its process becomes an error row, and that all other rows are decoded."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from actors.serving.engine_thread import EngineThread, Suspect
from decoding.types import Request
from tests.actors.fakes import FakePair, text_of
from tests.actors.poison import Life

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def request(sample_id: str, word: str = "fine") -> Request:
    return Request(sample_id, f"{sample_id} {word}")


def outcome(batches: Sequence[Sequence[Request]]) -> list[dict[str, str]]:
    """The expected result of every row."""
    return [
        {
            request.sample_id: "engine_died"
            if "POISON" in request.prompt or "LATE" in request.prompt
            else text_of(request)
            for request in batch
        }
        for batch in batches
    ]


@pytest.mark.parametrize("word", ["POISON", "LATE"])
@pytest.mark.parametrize("poison_index", [0, 3, 9])
def test_a_row_that_kills_its_process_is_given_up_after_three_deaths(word: str, poison_index: int) -> None:
    batch = [request(f"s{index}", word if index == poison_index else "fine") for index in range(10)]
    life = Life()
    assert life.run([batch]) == outcome([batch])
    assert life.num_deaths == 3
    assert life.book.num_known() == 1, "only the row that was given up stays known"


def test_at_its_third_death_a_row_runs_alone() -> None:
    batch = [request(f"s{index}", "LATE" if index == 2 else "fine") for index in range(8)]
    life = Life(slots=4)
    life.run([batch])
    assert len(life.engines[0].ids_at_death) > 1
    assert life.engines[2].ids_at_death == ("s2",)


@settings(deadline=None)
@given(
    poison=st.dictionaries(st.integers(0, 11), st.sampled_from(["POISON", "LATE"]), max_size=4),
    slots=st.integers(1, 5),
    cut=st.integers(0, 12),
)
@example(poison={0: "POISON", 1: "POISON"}, slots=4, cut=6)
@example(poison={3: "LATE", 4: "POISON", 8: "LATE"}, slots=2, cut=6)
@example(poison=dict.fromkeys(range(4), "LATE"), slots=5, cut=12)
def test_rows_that_kill_the_process_do_not_change_the_results_of_other_rows(
    poison: dict[int, str], slots: int, cut: int
) -> None:
    rows = [request(f"s{index:02}", poison.get(index, "fine")) for index in range(12)]
    batches = [rows[:cut], rows[cut:]]
    life = Life(slots)
    assert life.run(batches) == outcome(batches)
    assert life.num_deaths <= 1 + 2 * len(poison) if poison else life.num_deaths == 0
    assert life.book.num_known() == len(poison)


def test_a_machine_that_is_preempted_twice_loses_no_row() -> None:
    life = Life()
    batch = [request(f"s{index}") for index in range(9)]
    keys = [request.sample_id for request in batch]
    assert life.book.begin("lost-1", keys) == [0] * 9
    assert life.book.begin("lost-2", keys) == [1] * 9
    life.book.running("lost-2", keys[:4])
    assert life.run([batch]) == outcome([batch])
    assert life.num_deaths == 0
    assert life.book.num_known() == 0


def test_a_row_that_has_run_alone_and_is_done_is_not_blamed_for_the_next_death() -> None:
    """Marks that are not removed would blame the row that ran alone before."""
    batch = [request("a"), request("b"), request("c", "POISON")]
    life = Life()
    life.book.begin("lost-1", ["a", "b", "c"])
    life.book.begin("lost-2", ["a", "b", "c"])
    life.book.running("lost-2", ["a", "b", "c"])
    assert life.run([batch]) == outcome([batch])
    assert life.num_deaths == 1


def test_suspects_run_first_and_twice_suspected_rows_run_alone() -> None:
    pair, marks = FakePair(), []
    engine = pair.engine(3)
    thread = EngineThread(engine, mark=lambda keys: marks.append(list(keys)))
    rows = [request(name) for name in ("a", "b", "c", "d", "e", "f")]
    future = thread.decode(rows, {1: Suspect("B", 1), 2: Suspect("C", 2), 4: Suspect("E", 2), 5: Suspect("F", 1)})
    thread.close()
    assert [completion.sample_id for completion in future.result(timeout=0)] == ["a", "b", "c", "d", "e", "f"]
    together = [set(ids) for ids in engine.active_ids_per_step]
    assert all(ids in ({"c"}, {"e"}) for ids in together if ids & {"c", "e"})
    order = "".join(sample_id for ids in engine.active_ids_per_step for sample_id in ids)
    assert order.index("c") < order.index("e") < order.index("b") < order.index("a")
    assert marks[:3] == [["C"], ["E"], ["B", "F"]]
    assert marks[-1] == []


def test_rows_without_deaths_are_not_recorded_individually() -> None:
    marks: list[object] = []
    thread = EngineThread(FakePair().engine(2), mark=marks.append)
    future = thread.decode([request(f"s{index}") for index in range(9)])
    thread.close()
    assert len(future.result(timeout=0)) == 9
    assert marks == []


def in_a_process(program: str) -> subprocess.CompletedProcess[str]:
    program = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{textwrap.dedent(program)}"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=900, check=False)


@pytest.mark.parametrize("hangs", ["threading.Event().wait()", "ctypes.PyDLL(None).pause()"], ids=["python", "native"])
def test_a_hanging_step_ends_its_process_with_a_stack_trace(hangs: str) -> None:
    """`PyDLL` holds the GIL, so that no Python thread can end the process."""
    done = in_a_process(
        f"""
        import ctypes, threading
        from actors.serving.engine_thread import EngineThread
        from decoding.types import Request
        from tests.actors.fakes import FakeEngine

        class HangingEngine(FakeEngine):
            def step(self):
                if len(self.active_ids_per_step) == 3:
                    {hangs}
                return super().step()

        thread = EngineThread(HangingEngine(1), max_step_s=3.0)
        thread.decode([Request(f"s{{i}}", "x") for i in range(9)]).result()
        print("survived")
        """
    )
    assert done.returncode == 1
    assert "survived" not in done.stdout
    assert "Timeout" in done.stderr
    assert "in step" in done.stderr


def test_an_engine_that_waits_for_rows_is_not_taken_for_hung() -> None:
    done = in_a_process(
        """
        import faulthandler
        armed = []
        faulthandler.dump_traceback_later = lambda *a, **k: armed.append(True)
        faulthandler.cancel_dump_traceback_later = lambda: armed.append(False)
        from actors.serving.engine_thread import EngineThread
        from decoding.types import Request
        from tests.actors.fakes import FakeEngine

        thread = EngineThread(FakeEngine(2), max_step_s=600.0)
        for batch in range(2):
            thread.decode([Request(f"s{i}", "x") for i in range(5)]).result()
        thread.close()
        print(armed)
        """
    )
    assert done.stdout.strip() == str([True, False, True, False])
