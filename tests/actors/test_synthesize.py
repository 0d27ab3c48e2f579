"""The image actor on a fake engine: replicas, order, conditions, row errors, one encoding per prompt."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from actors.results import Stamp
from actors.synthesize import Synthesize
from decoding.types import Request
from pipeline.rows.schemas import ERROR_CODES
from pipeline.synthesis.rows import coded_schema
from tests.actors.image_fakes import FakeImagePair, codes_of, image_job, prepared_table

STAMP = Stamp(job_id="job-1", attempt=3, config_fingerprint="f00d")
KEEP = (pa.field("mine", pa.int32()),)


def make_actor(pair: FakeImagePair, num_images: int = 1, keep: tuple[pa.Field, ...] = (), **more: Any) -> Synthesize:
    job = image_job(sampling={"num_images_per_prompt": num_images}, **more)
    return Synthesize(job, coded_schema(keep), STAMP, load=lambda config, num_threads: pair)


def run(actor: Synthesize, *tables: pa.Table) -> list[pa.Table]:
    """Call the actor with all tables at once; one result per table."""

    async def call(table: pa.Table) -> list[pa.Table]:
        return [result async for result in actor(table)]

    async def together() -> list[list[pa.Table]]:
        return await asyncio.gather(*(call(table) for table in tables))

    results = asyncio.run(together())
    assert [len(rows) for rows in results] == [1] * len(results)
    return [rows[0] for rows in results]


def prompts(count: int, start: int = 0) -> list[dict[str, Any]]:
    return [{"id": f"p{index}", "prompt": f"word number {index}"} for index in range(start, start + count)]


def test_every_prompt_gives_its_images_side_by_side_in_input_order() -> None:
    [result] = run(make_actor(FakeImagePair(), num_images=3), prepared_table(prompts(10)))
    assert result.column("sample_id").to_pylist() == [
        f"p{index}#{replica}" for index in range(10) for replica in range(3)
    ]
    assert result.column("prompt_id").to_pylist() == [f"p{index}" for index in range(10) for _ in range(3)]
    assert result.column("replica").to_pylist() == [0, 1, 2] * 10
    assert result.column("prompt").to_pylist() == [f"word number {index}" for index in range(10) for _ in range(3)]


def test_an_image_is_drawn_with_its_own_key_and_the_condition_of_its_prompt() -> None:
    rows = [
        {"id": "a", "prompt": "four", "seed": 11},
        {"id": "b", "label": 9, "seed": 2**62},
        {"id": "c", "features": [[1.5], [2.5], [3.0]]},
    ]
    [result] = run(make_actor(FakeImagePair(), num_images=2), prepared_table(rows))
    drawn = result.column("codes").to_pylist()
    expected = [
        codes_of(Request(f"{row['id']}#{replica}", "", seed=row.get("seed", 7), replica=replica, condition=outcome))
        for row, outcome in zip(rows, (4, 9, 7))
        for replica in (0, 1)
    ]
    assert drawn == [list(codes) for codes in expected]
    assert len({tuple(codes) for codes in drawn}) == 6


def test_a_prompt_is_encoded_once_and_never_on_the_loop_that_serves_the_batches() -> None:
    pair = FakeImagePair()
    run(make_actor(pair, num_images=5), prepared_table(prompts(4)), prepared_table(prompts(4, 4)))
    assert sorted(pair.encoded) == sorted(row["prompt"] for row in prompts(8))
    assert threading.get_ident() not in pair.threads


def test_ready_conditions_need_no_encoding() -> None:
    pair = FakeImagePair()
    run(make_actor(pair), prepared_table([{"id": "a", "label": 0}, {"id": "b", "features": [[1.0]], "prompt": "told"}]))
    assert pair.encoded == []


def test_sampling_of_a_row_reaches_the_engine() -> None:
    pair = FakeImagePair()
    actor = make_actor(pair)
    seen: list[Request] = []
    submit = pair.engines[0].submit
    pair.engines[0].submit = lambda request: (seen.append(request), submit(request))[1]  # type: ignore[method-assign]
    row = {"id": "a", "prompt": "x", "temperature": 0.5, "top_k": 3, "top_p": 0.25, "guidance_scale": 6.0}
    run(actor, prepared_table([row]))
    [request] = seen
    result = request.sampling
    assert (result.temperature, result.top_k, result.top_p, result.guidance_scale) == (0.5, 3, 0.25, 6.0)
    assert (result.max_new_tokens, result.guidance_interval) == (4, -1)


def test_a_failed_prompt_becomes_an_error_row_per_image_and_other_rows_are_unchanged() -> None:
    rows = [
        {"id": "a", "prompt": "fine", "mine": 1},
        {"id": "b", "error": "empty_prompt", "seed": None, "mine": 2},
        {"id": "c", "prompt": "REFUSE", "mine": 3},
        {"id": "d", "prompt": "NAN", "mine": 4},
    ]
    [result] = run(make_actor(FakeImagePair(), num_images=2, keep=KEEP), prepared_table(rows, KEEP))
    result_rows = result.to_pylist()
    assert [(row["sample_id"], row["error_type"], row["status"], row["mine"]) for row in result_rows] == [
        ("a#0", "", "success", 1),
        ("a#1", "", "success", 1),
        ("b#0", "empty_prompt", "error", 2),
        ("b#1", "empty_prompt", "error", 2),
        ("c#0", "prompt_too_long", "error", 3),
        ("c#1", "prompt_too_long", "error", 3),
        ("d#0", "non_finite_logits", "error", 4),
        ("d#1", "non_finite_logits", "error", 4),
    ]
    assert {row["error_type"] for row in result_rows} <= {"", *ERROR_CODES}
    assert [row["error_message"] for row in result_rows[2:5:2]] == ["about empty_prompt", "the prompt has 200 tokens"]
    assert [row["codes"] == [] for row in result_rows] == [False] * 2 + [True] * 6
    assert {(row["job_id"], row["attempt"], row["method"], row["target_id"]) for row in result_rows} == {
        ("job-1", 3, "plain", "fake/llamagen")
    }


def test_images_do_not_depend_on_batches_or_their_order() -> None:
    def by_id(*tables: pa.Table) -> dict[str, dict[str, Any]]:
        rows = pa.concat_tables(run(make_actor(FakeImagePair(), num_images=2), *tables)).to_pylist()
        return {row["sample_id"]: {**row, "row_index": None} for row in rows}

    together = by_id(prepared_table(prompts(9)))
    apart = by_id(*(prepared_table(prompts(3, start)[::-1]) for start in (6, 0, 3)))
    assert together == apart


def test_two_batches_with_the_same_ids_do_not_mix_up_their_images() -> None:
    first, second = ({"id": "a", "prompt": prompt} for prompt in ("x", "four"))
    first_row, other = run(make_actor(FakeImagePair()), prepared_table([first]), prepared_table([second]))
    assert (first_row.column("codes")[0].as_py()[3], other.column("codes")[0].as_py()[3]) == (1, 4)


def test_a_text_encoder_that_breaks_ends_the_process_as_a_broken_engine_does(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[BaseException] = []
    monkeypatch.setattr("actors.synthesize.end_process", ended.append)
    pair = FakeImagePair()

    def breaks(prompt: str) -> Any:
        raise RuntimeError("CUDA error")

    pair.encode = breaks  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="CUDA error"):
        run(make_actor(pair), prepared_table(prompts(1)))
    assert [str(error) for error in ended] == ["CUDA error"]


@pytest.mark.parametrize("rows", [[], [{"id": "a", "error": "broken_line"}]])
def test_a_batch_without_anything_to_draw_is_still_one_table(rows: list[dict[str, Any]]) -> None:
    [result] = run(make_actor(FakeImagePair(), num_images=3), prepared_table(rows))
    assert result.schema == coded_schema()
    assert result.num_rows == 3 * len(rows)


def test_progress_counts_images() -> None:
    batches: list[pa.Table] = []
    actor = make_actor(FakeImagePair(), num_images=2)
    actor._report_progress = batches.append
    run(actor, prepared_table([*prompts(2), {"id": "x", "error": "broken_line"}]))
    [table] = batches
    assert (table.num_rows, pc.sum(table["num_generated_tokens"]).as_py()) == (6, 16)
