"""Tests passes of the engine benchmark on the small pair: the timed parts, and that outputs equal the target's."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.engine import __main__ as engine
from benchmarks.engine.__main__ import Bench, Cell
from benchmarks.harness import clock as clocks
from benchmarks.harness.clock import DeviceClock
from benchmarks.harness.process import Work
from benchmarks.peers.work import make_reference
from benchmarks.tables import engine as engine_tables
from models.inputs.processing import FrontEnd
from models.kv.lanes import SlotBatch
from models.loading.checkpoints import CheckpointRef, read_config, read_processor
from models.target import Target
from zoo.pair import CHECKPOINTS
from zoo.text import held_out_prompts

pytestmark = pytest.mark.slow

CELL = Cell(batch=2, max_new_tokens=8, num_requests=4, repeats=2)


class Clocked:
    """A fake `LaneModel` whose every call takes a fixed time on a simulated clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.device = torch.device("cpu")
        self.rows = SimpleNamespace(prefix_lengths=[])

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
    seconds = clock.read()
    assert (seconds["prompts"].seconds, seconds["target"].seconds) == (12.0, 7.0), "committing is no forward"


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
