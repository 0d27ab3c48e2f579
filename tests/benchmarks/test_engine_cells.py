"""Tests passes of the engine benchmark on the small pair: the timed parts, and that outputs equal the target's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.engine import __main__ as engine
from benchmarks.engine import slices as forward_clock
from benchmarks.engine.__main__ import Bench, Cell
from benchmarks.harness import clock as clocks
from benchmarks.harness.clock import DeviceClock
from benchmarks.harness.process import Work
from benchmarks.peers.work import make_reference
from benchmarks.tables import engine as engine_tables
from benchmarks.tables.parts import PARTS
from models.inputs.processing import FrontEnd
from models.kv.lanes import SlotBatch
from models.loading.checkpoints import CheckpointRef, read_config, read_processor
from models.target import Target
from zoo.pair import CHECKPOINTS
from zoo.text.samples import held_out_prompts

pytestmark = pytest.mark.slow

CELL = Cell(batch=2, max_new_tokens=8, num_requests=4, repeats=2)


class Clocked:
    """A fake `LaneModel` whose every call takes a fixed time on a simulated clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.device = torch.device("cpu")
        self._prefix_lengths: list[int] = []

    def admit(self, *_: object) -> None:
        self.now += 5.0

    def forward(self, *_: object) -> None:
        self.now += 3.0

    def logits(self, *_: object) -> None:
        self.now += 1.0

    def commit(self, *_: object) -> None:
        self.now += 7.0


def test_an_output_layer_counts_with_the_prompt_or_the_step_that_it_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    lanes: Any = Clocked()
    monkeypatch.setattr(clocks.time, "perf_counter", lambda: lanes.now)
    monkeypatch.setattr(clocks, "bytes_of_weights", lambda _: 0)
    monkeypatch.setattr(clocks, "bytes_of_column", lambda _: 0)
    clock = DeviceClock([lanes])
    slots, tokens = SlotBatch(torch.zeros(0), (), ()), torch.zeros(0)
    for call in ("admit", "logits", "forward", "logits", "commit", "forward", "admit", "logits"):
        getattr(lanes, call)(slots, tokens)
    found = clock.read()
    assert (found["prompts"].seconds, found["target"].seconds) == (12.0, 7.0), "committing is no forward"


@pytest.fixture(scope="module")
def bench() -> Bench:
    ref = CheckpointRef(str(CHECKPOINTS / "text_target"))
    texts = held_out_prompts(CELL.num_requests, 0)
    front_end = FrontEnd(read_processor(ref, read_config(ref)))
    ids = [front_end.encode(text, ())["input_ids"][0].tolist() for text in texts]
    folders = (str(CHECKPOINTS / "text_target"), str(CHECKPOINTS / "text_drafter"))
    with pytest.MonkeyPatch.context() as patch:
        # Compiling takes longer than all the rest.
        patch.setattr(Target, "compile", lambda *_: False)
        return Bench(Work(*folders, "float32", 1, 3, 2, 192, 16, False, texts, ids))


@pytest.fixture(scope="module")
def rows(bench: Bench) -> list[dict[str, Any]]:
    reference = make_reference(replace(bench.work, max_new_tokens=CELL.max_new_tokens))
    return engine.measure_cell(bench, CELL, reference)


def test_memory_is_that_of_three_engines_whose_rows_are_as_long_as_the_cells_outputs_need(bench: Bench) -> None:
    # 192 columns are enough for 16 new tokens; three layers with four heads of 64 in four bytes, K and V.
    assert bench.memory_bytes(CELL) == 3 * 2 * (192 - 8) * 3 * 4 * 64 * 4 * 2
    engines = [bench.engine(mode, CELL)[0] for mode in engine_tables.MODES]
    assert [one.max_context_tokens for one in engines] == [184] * 3


def test_every_method_gives_the_targets_own_outputs_and_has_a_speed(rows: list[dict[str, Any]]) -> None:
    assert [row["mode"] for row in rows] == list(engine_tables.MODES)
    for row in rows:
        assert (row["batch"], row["max_new_tokens"], row["num_requests"]) == (2, 8, 4)
        assert row["num_tokens"] == [32, 32]
        assert row["verdict"]["num_equal"] == row["verdict"]["num_sequences"] == 8
        assert row["tokens_per_s"] is not None
        assert row["num_new_graphs"] == [0, 0]


def test_forwards_are_part_of_the_steps_they_are_in_and_steps_part_of_the_pass(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        for forwards, steps, whole in zip(
            row["step_forwards_s"], engine_tables.decoding_s(row), row["seconds"], strict=True
        ):
            assert 0.0 < forwards < steps < whole
        for prompts, phase in zip(row["prompt_forwards_s"], row["phases_s"]["prefill_s"], strict=True):
            assert 0.0 < prompts < phase
        assert 0.0 < engine_tables.beyond_forwards(row) < 1.0
        assert sum(engine_tables.parts_of_pass(row)) == pytest.approx(1.0)


def test_forwards_alone_are_timed_after_each_round(rows: list[dict[str, Any]]) -> None:
    plain, chain, _ = rows
    assert "forwards_ms" not in plain
    assert set(chain["forwards_ms"]) == {"target 1", "target γ+1", "drafter 2", "drafter 1"}
    assert all(len(rounds) == 2 and min(rounds) > 0.0 for rounds in chain["forwards_ms"].values())
    assert engine_tables.tokens_per_step(plain) == 1.0
    # γ is 3, and a step gives the target's token beside what it kept of them.
    assert 1.0 < engine_tables.tokens_per_step(chain) <= 4.0
    kept = sum(place * count for place, count in enumerate(chain["acceptance_histogram"]))
    assert chain["acceptance_length"] == pytest.approx(1.0 + kept / sum(chain["acceptance_histogram"]))


def test_a_method_without_a_speed_leaves_its_claims_unknown(rows: list[dict[str, Any]]) -> None:
    changed = [{**row} for row in rows]
    changed[1] = {**changed[1], "tokens_per_s": None, "samples_per_s": None}
    found = {"gamma": 3, "rows": changed, "left_out": []}
    assert "| 8 | 2 | chain | 4 | withheld | withheld |" in PARTS["engine"].render(found)
    assert [holds for text, holds, _ in engine_tables.claims(found) if text.startswith("with the")] == [None]


def test_forwards_of_all_kinds_take_turns_and_slow_ones_end_after_the_fewest(monkeypatch: pytest.MonkeyPatch) -> None:
    clock: Any = Clocked()
    asked: list[tuple[int, int, int]] = []

    def forward(_: Any, batch: int, num_nodes: int, length: int) -> float:
        asked.append((num_nodes, batch, length))
        clock.now += 0.4
        return float(num_nodes * len(asked))

    monkeypatch.setattr(forward_clock.time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(forward_clock, "_time_forward", forward)
    kinds = {"one": (clock, 1), "six": (clock, 6)}
    # The third turn ends after 2.4 s, the first within which that is enough.
    assert forward_clock.time_forwards(kinds, 4, 90) == {"one": 3.0, "six": 24.0}
    assert asked == [(1, 4, 90), (6, 4, 90)] * 3
    clock.now, asked[:] = 0.0, []
    monkeypatch.setattr(forward_clock, "ENOUGH_S", 1000.0)
    forward_clock.time_forwards(kinds, 4, 90)
    assert len(asked) == 2 * forward_clock.MAX_FORWARDS
