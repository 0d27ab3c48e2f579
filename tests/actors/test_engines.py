"""Engines of a job's method, and the method columns of rows after a trial."""

from __future__ import annotations

import asyncio
from collections import Counter

import pyarrow as pa

from actors.auto.trial import MethodTrial, make_engine
from actors.generate import Generate
from actors.results import Stamp, TrialResult
from actors.serving.engine_thread import Waits
from actors.serving.recovery import RecoveringEngine
from configs.method import MethodConfig
from configs.schema import CaptionJobConfig
from decoding.types import Request
from pipeline.rows.schemas import result_schema
from tests.actors.fakes import FakeEngine, FakePair, decoded_table, fake_job, text_of

AUTO = {
    "auto": {
        "candidates": [
            {"name": "chain", "drafter": {"kind": "model"}},
            {"name": "lookup", "drafter": {"kind": "lookup"}},
        ],
        "max_rounds": 1,
    }
}


class ChoosingPair(FakePair):
    """Records the method of every engine."""

    def __init__(self) -> None:
        super().__init__()
        self.labels: list[str] = []

    def engine(self, slots: int, choice: MethodConfig | None = None) -> FakeEngine:
        self.labels.append("" if choice is None else choice.label)
        return super().engine(slots)


def job(**sections: object) -> CaptionJobConfig:
    return fake_job(method=AUTO, pool={"slots": 4, "batch_rows": 8, "torch_threads": 1}, **sections)


def test_every_row_names_the_method_that_decoded_it_and_the_drafter_only_where_it_drafted() -> None:
    pair, reports = ChoosingPair(), list[tuple[str, Waits]]()
    actor = Generate(
        job(),
        result_schema(),
        Stamp("job-1", 1, "f00d"),
        lambda config, threads: pair,
        report_waits=lambda who, waits: reports.append((who, waits)),
    )
    tables = [decoded_table([{"id": f"s{batch}-{row}", "text": "x"} for row in range(40)]) for batch in range(3)]
    tables.append(decoded_table([{"id": "bad", "error": "broken_image"}, {"id": "no", "text": "REFUSE"}]))

    async def all_at_once() -> list[pa.Table]:
        async def decode(table: pa.Table) -> pa.Table:
            [result] = [result async for result in actor(table)]
            return result

        return await asyncio.gather(*map(decode, tables))

    *results, failed = asyncio.run(all_at_once())
    rows = [row for table in results for row in table.to_pylist()]
    assert [row["sample_id"] for row in rows] == [f"s{batch}-{row}" for batch in range(3) for row in range(40)]
    assert {row["generated_text"] for row in rows} == {text_of(Request("a", "user: x"))}
    assert {row["method"]: row["drafter_id"] for row in rows} == {
        "plain": "",
        "chain": "fake/drafter",
        "lookup": "",
    }
    assert {row["verify_mode"] for row in rows} == {"lossless"}
    assert min(Counter(row["method"] for row in rows).values()) >= 16
    assert [(row["method"], row["drafter_id"]) for row in failed.to_pylist()] == [("auto", "")] * 2
    assert pair.labels[:3] == ["plain", "chain", "lookup"]
    [choice] = reports[-1][1].choices
    assert choice.method in pair.labels


def test_a_job_of_one_method_has_an_engine_that_recovers_and_asks_for_no_method() -> None:
    asked: list[tuple[int, ...]] = []

    def make(*arguments: int) -> FakeEngine:
        asked.append(arguments)
        return FakeEngine(arguments[0])

    assert isinstance(make_engine(fake_job().method, 3, make, lambda: FakeEngine(1)), RecoveringEngine)
    assert asked == [(3,)]
    trial = make_engine(job().method, 3, make, lambda: FakeEngine(1))
    assert isinstance(trial, MethodTrial)
    assert {name: candidate.drafts for name, candidate in trial._candidates.items()} == {
        "plain": False,
        "chain": True,
        "lookup": True,
    }


def test_unfinished_rows_are_reported_in_every_state() -> None:
    engine = RecoveringEngine(FakeEngine, lambda: FakeEngine(1), 2)
    requests = [Request(f"s{index}", "x") for index in range(6)]
    for request in requests:
        engine.submit(request)
    done = {completion.sample_id for _ in range(2) for completion in engine.step()}
    assert {request.sample_id for request in engine.queue.unfinished} == {f"s{index}" for index in range(6)} - done
    while engine.has_work:
        engine.step()
    assert engine.queue.unfinished == []


def test_choices_of_several_engines_add_up() -> None:
    first, second = (Waits(1.0, 2.0, 3.0, (TrialResult(name, "first rows", 1, 1, 1.0, ()),)) for name in ("a", "b"))
    total = sum((first, second), Waits())
    assert (total.idle_s, total.queued_s, total.total_s) == (2.0, 4.0, 6.0)
    assert [choice.method for choice in total.choices] == ["a", "b"]
