"""The caption actor on a fake engine: order, refill across batches, row errors, and the end of its process."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from actors.generate import Generate
from actors.results import Stamp
from actors.serving.engine_thread import EngineThread
from decoding.types import Request, Sampling
from pipeline.rows.schemas import ERROR_CODES, result_schema
from tests.actors.fakes import FakeEngine, FakePair, decoded_table, fake_job, num_steps_of

ROOT = Path(__file__).resolve().parents[2]
STAMP = Stamp(job_id="job-1", attempt=3, config_fingerprint="f00d")
KEEP = (pa.field("caption", pa.string()), pa.field("score", pa.int32()))


def make_actor(pair: FakePair, keep: tuple[pa.Field, ...] = (), **pool: Any) -> Generate:
    job = fake_job(pool={"slots": 4, "batch_rows": 8, **pool})
    return Generate(job, result_schema(keep), STAMP, load=lambda config, num_threads: pair)


async def call(actor: Generate, table: pa.Table) -> list[pa.Table]:
    return [result async for result in actor(table)]


def run(actor: Generate, *tables: pa.Table) -> list[pa.Table]:
    """Call the actor with all tables at once; one result per table."""

    async def together() -> list[list[pa.Table]]:
        return await asyncio.gather(*(call(actor, table) for table in tables))

    results = asyncio.run(together())
    assert [len(tables) for tables in results] == [1] * len(results)
    return [tables[0] for tables in results]


def rows(count: int, start: int = 0) -> list[dict[str, Any]]:
    return [{"id": f"s{index}", "grey": index, "text": f"ask {index}"} for index in range(start, start + count)]


def test_rows_come_back_in_input_order_whatever_order_they_finish_in() -> None:
    pair = FakePair()
    [result] = run(make_actor(pair), decoded_table(rows(20)))
    assert len({num_steps_of(f"s{index}") for index in range(20)}) > 2
    assert result.column("sample_id").to_pylist() == [f"s{index}" for index in range(20)]
    assert result.column("generated_text").to_pylist() == [
        f"user: <image> ask {index} / [{18 * index}]" for index in range(20)
    ]


def test_every_column_of_the_result_schema_is_filled_from_row_run_and_completion() -> None:
    [result] = run(make_actor(FakePair(), keep=KEEP), decoded_table([{"id": "a", "text": "x", "score": 7}], KEEP))
    assert result.schema.equals(result_schema(KEEP), check_metadata=True)
    steps = num_steps_of("a")
    row = result.to_pylist()[0]
    telemetry = row.pop("telemetry")
    assert row == {
        "sample_id": "a",
        "source": "shard-0",
        "row_index": 0,
        "clip_index": None,
        "num_clips": None,
        "clip_start_s": None,
        "clip_end_s": None,
        "prompt_index": None,
        "num_prompts": None,
        "job_id": "job-1",
        "attempt": 3,
        "status": "success",
        "error_type": "",
        "error_message": "",
        "finish_reason": "stop",
        "generated_text": "user: x / []",
        "mean_logprob": -0.5,
        "num_input_tokens": 7,
        "num_visual_tokens": 0,
        "num_generated_tokens": 1 + 2 * steps,
        "seed": 0,
        "method": "model+chain+exact",
        "verify_mode": "lossless",
        "target_id": "fake/target",
        "drafter_id": "fake/drafter",
        "config_fingerprint": "f00d",
        "caption": None,
        "score": 7,
    }
    assert telemetry["mean_acceptance_length"] == 2.0
    assert telemetry["draft_acceptance_rate"] == pytest.approx(1 / 3)
    assert telemetry["acceptance_histogram"] == [0, steps, 0, 0]
    assert telemetry["extras"] == '{"note": 1}'


def test_clips_reach_the_engine_with_their_times_and_their_span_reaches_the_result() -> None:
    clip = {"num_frames": 2, "height": 1, "width": 3, "rgb": bytes(range(18)), "timestamps_s": [0.0, 0.25], "fps": 4.0}
    span = {"clip_index": 1, "num_clips": 3, "clip_start_s": 10.0, "clip_end_s": 20.0}
    table = decoded_table([{"id": "a", "videos": [clip], **span}, {"id": "b", "grey": 1}])
    [result] = run(make_actor(FakePair()), table)
    assert result["generated_text"].to_pylist() == [
        "user: <video> Describe. / [] [(153, (0.0, 0.25), 4.0)]",
        "user: <image> Describe. / [18]",
    ]
    first, second = (result.slice(row, 1).select(list(span)).to_pylist()[0] for row in (0, 1))
    assert first == span
    assert second == dict.fromkeys(span)


def test_slots_are_refilled_from_the_next_batch_before_the_first_has_finished() -> None:
    gate = threading.Semaphore(0)
    pair = FakePair(gate)
    actor = make_actor(pair, slots=4)
    batches = [decoded_table(rows(5)), decoded_table(rows(5, start=5)), decoded_table(rows(5, start=10))]

    async def all_in_flight() -> list[list[pa.Table]]:
        handed_over = asyncio.Semaphore(0)
        decode = actor._engine.decode

        def noted(*arguments: Any) -> Any:
            future = decode(*arguments)
            handed_over.release()
            return future

        actor._engine.decode = noted
        calls = [asyncio.ensure_future(call(actor, batch)) for batch in batches]
        for _ in batches:
            await handed_over.acquire()
        gate.release(1000)
        return await asyncio.gather(*calls)

    results = asyncio.run(all_in_flight())
    assert [table.column("sample_id").to_pylist() for [table] in results] == [
        [f"s{index}" for index in range(start, start + 5)] for start in (0, 5, 10)
    ]
    # Batches reach the engine in any order.
    batch_of = {f"s{index}": index // 5 for index in range(15)}
    mixed = [ids for ids in pair.engines[0].active_ids_per_step if len({batch_of[sample_id] for sample_id in ids}) > 1]
    assert mixed, "no step held rows of two batches"
    total_steps = sum(num_steps_of(f"s{index}") for index in range(15))
    idle_slots = 4 * len(pair.engines[0].active_ids_per_step) - total_steps
    assert idle_slots <= 4 * 5, "slots stood empty although rows were waiting"


def test_only_the_engines_own_thread_touches_the_engine() -> None:
    pair = FakePair()
    run(make_actor(pair), decoded_table(rows(6)), decoded_table(rows(6, start=6)))
    assert len(pair.engines[0].threads) == 1
    assert threading.get_ident() not in pair.engines[0].threads


def test_a_result_does_not_depend_on_what_else_is_in_flight() -> None:
    table = decoded_table(rows(7))
    [alone] = run(make_actor(FakePair()), table)
    together = run(make_actor(FakePair(), slots=3), decoded_table(rows(9, start=40)), table)
    assert together[1].equals(alone)


def test_a_row_with_an_error_passes_through_and_is_never_decoded() -> None:
    pair = FakePair()
    table = decoded_table([{"id": "bad", "error": "not_an_image", "score": 1}, {"id": "good", "text": "x"}], KEEP)
    [result] = run(make_actor(pair, keep=KEEP), table)
    bad, good = result.to_pylist()
    assert (bad["sample_id"], bad["status"], bad["error_type"], bad["error_message"], bad["score"]) == (
        "bad",
        "error",
        "not_an_image",
        "about not_an_image",
        1,
    )
    assert (bad["generated_text"], bad["finish_reason"], bad["num_generated_tokens"]) == ("", "error", 0)
    assert bad["telemetry"]["num_spec_steps"] == 0
    assert good["status"] == "success"
    assert {sample for ids in pair.engines[0].active_ids_per_step for sample in ids} == {"good"}


def test_a_conversation_that_the_template_refuses_is_an_error_row_beside_good_ones() -> None:
    [result] = run(make_actor(FakePair()), decoded_table([{"id": "a", "text": "REFUSE"}, {"id": "b", "text": "ok"}]))
    refused, good = result.to_pylist()
    assert (refused["status"], refused["error_type"]) == ("error", "prompt_refused")
    assert "conversation roles must alternate" in refused["error_message"]
    assert good["generated_text"] == "user: ok / []"


def test_an_error_of_the_engine_for_one_row_is_that_rows_own() -> None:
    table = decoded_table([{"id": "a", "text": "TOO LONG"}, {"id": "b", "text": "ENDLESS"}, {"id": "c"}])
    [result] = run(make_actor(FakePair()), table)
    assert result.column("status").to_pylist() == ["error", "truncated", "success"]
    assert result.column("error_type").to_pylist() == ["context_too_long", "", ""]
    assert set(result.column("error_type").to_pylist()) - {""} <= set(ERROR_CODES)


def test_two_rows_with_one_id_each_get_their_own_answer() -> None:
    first = decoded_table([{"id": "same", "text": "one"}, {"id": "same", "text": "two"}])
    second = decoded_table([{"id": "same", "text": "three"}])
    results = run(make_actor(FakePair()), first, second)
    assert results[0].column("generated_text").to_pylist() == ["user: one / []", "user: two / []"]
    assert results[1].column("generated_text").to_pylist() == ["user: three / []"]


def test_an_engine_that_raises_is_given_up_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    died: list[BaseException] = []
    pair = FakePair()
    thread = EngineThread(pair.engine(2), die=died.append)
    future = thread.decode([Request(sample_id="a", prompt="CRASH")])
    thread.close()
    assert [str(error) for error in died] == ["CUDA error: an illegal memory access was encountered"]
    assert not future.done()


def test_a_dead_engine_ends_its_process_with_the_reason() -> None:
    program = f"""
        import asyncio, sys
        sys.path.insert(0, {str(ROOT)!r})
        from tests.actors.test_generate import FakePair, call, decoded_table, make_actor
        table = decoded_table([{{"id": "a", "text": "CRASH"}}])
        asyncio.run(call(make_actor(FakePair()), table))
        print("survived")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 1
    assert "survived" not in done.stdout
    assert "the engine failed and its actor ends" in done.stderr
    assert "illegal memory access" in done.stderr


def test_progress_is_counted_once_per_batch() -> None:
    batches: list[pa.Table] = []
    pair = FakePair()
    job = fake_job()
    actor = Generate(job, result_schema(), STAMP, load=lambda config, threads: pair, report_progress=batches.append)
    run(actor, decoded_table([{"id": "a"}, {"id": "b", "error": "broken_image"}]))
    steps = num_steps_of("a")
    [table] = batches
    assert table["num_generated_tokens"].to_pylist() == [1 + 2 * steps, 0]
    assert table["error_type"].to_pylist() == ["", "broken_image"]


class WatchedPair(FakePair):
    """Records every request of its engine."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: dict[str, Request] = {}

    def engine(self, slots: int) -> FakeEngine:
        engine = super().engine(slots)
        submit = engine.submit

        def watched(request: Request) -> None:
            self.requests[request.sample_id] = request
            submit(request)

        engine.submit = watched  # type: ignore[method-assign]
        return engine


def test_a_row_with_a_seed_and_sampling_of_its_own_is_drawn_with_them() -> None:
    pair = WatchedPair()
    own = json.dumps({"seed": 7, "temperature": 0.5, "max_new_tokens": 3})
    table = decoded_table([{"id": "a", "sampling": own}, {"id": "b"}, {"id": "c", "error": "broken_image"}])
    [result] = run(make_actor(pair), table)
    assert (pair.requests["a"].seed, pair.requests["b"].seed) == (7, 0)
    assert pair.requests["a"].sampling == Sampling(max_new_tokens=3, temperature=0.5)
    assert pair.requests["b"].sampling == Sampling(max_new_tokens=256)
    assert result.column("seed").to_pylist() == [7, 0, 0]
