"""Forced acceptance accepts at the given rate, rows have the expected columns, and every figure is marked synthetic."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from actors.loading.pair import load_target
from benchmarks import synthetic
from benchmarks.harness import engines
from benchmarks.harness.long_context import Filled, Forced, time_steps
from benchmarks.harness.verdict import relative_speeds
from benchmarks.synthetic import Contender, Size, expected_tokens, synthetic_setting, synthetic_table, tokens_per_step
from configs.schema import Checkpoint
from decoding import Engine
from models.target import Target
from zoo.pair import CHECKPOINTS

SIZE = Size(columns=(40,), batches=(2,), gammas=(3,), rates=(0.0, 1.0), num_steps=3, num_rounds=2)


def load(name: str) -> Target:
    return load_target(Checkpoint(path=str(CHECKPOINTS / name), dtype="float32", device="cpu"), name)


@pytest.fixture(scope="module")
def pair() -> tuple[Target, Target]:
    return load("text_target"), load("text_drafter")


@pytest.fixture(scope="module")
def rows(pair: tuple[Target, Target]) -> list[dict[str, Any]]:
    return synthetic.measure_cell(*pair, SIZE, 40, 2)


def engine_over(pair: tuple[Target, Target], one: Contender, num_columns: int) -> tuple[Engine, Filled, Filled]:
    target, drafter = (Filled(model, num_columns, 2, 256) for model in pair)
    method = one.method(target, {one.drafter_reads: drafter})
    return Engine(target, method, 2, 200), target, drafter  # type: ignore[arg-type]


def test_plain_decoding_and_every_rate_with_every_drafter_are_measured(rows: list[dict[str, Any]]) -> None:
    found = [(row["gamma"], row["rate"], row["drafter_reads"]) for row in rows]
    reads = ("all columns", "the text alone")
    assert found == [(0, 0.0, ""), *((3, rate, seen) for rate in (0.0, 1.0) for seen in reads)]
    assert all(row["num_steps"] == [3, 3] for row in rows)
    assert all(row["synthetic"] is True for row in rows)


def test_a_rate_of_one_takes_all_drafts_and_a_rate_of_nought_takes_none(rows: list[dict[str, Any]]) -> None:
    found = {(row["gamma"], row["rate"]): row["synthetic_tokens"] for row in rows}
    assert found == {(0, 0.0): [6, 6], (3, 0.0): [6, 6], (3, 1.0): [24, 24]}


def test_drafts_are_accepted_at_about_the_given_rate_for_every_drafter(
    pair: tuple[Target, Target],
) -> None:
    size = replace(SIZE, rates=(0.7,), num_steps=20)
    results = []
    for columns in (0, 40):
        for seed in (0, 1):
            engine, *_ = engine_over(pair, Contender(3, 0.7, "all columns"), columns)
            results.append(time_steps(engine, synthetic.requests(2, size, seed), 20)[1:])
    assert results[:2] == results[2:], "the draws are the seed's, whatever is read"
    assert results[0] != results[1], "another seed has other draws"
    mean = sum(tokens for _, tokens in results[:2]) / (2 * 2 * 20)
    assert mean == pytest.approx(expected_tokens(0.7, 3), rel=0.15)


def test_rows_hold_the_random_columns_beside_their_prompts_and_steps_read_them(pair: tuple[Target, Target]) -> None:
    one = Contender(3, 0.5, "all columns")
    asked = synthetic.requests(2, SIZE, 0)
    engine, target, drafter = engine_over(pair, one, 40)
    prompts = [pair[0].encode(request.prompt, ()).length for request in asked]
    for request in asked:
        engine.submit(request)
    engine.step()
    made = [len(progress.token_ids) - 1 for progress in engine._slots.progress if progress is not None]
    lens = target.lanes(2, 1, 100).cache.lens.tolist()
    assert lens == [prompt + 40 + tokens for prompt, tokens in zip(prompts, made, strict=True)]
    # Windows follow from the lengths known on the host.
    assert target.lanes(2, 1, 100)._prefix_lengths == [prompt + 40 for prompt in prompts]
    assert min(drafter.lanes(2, 1, 100).cache.lens.tolist()) >= min(prompts) + 40
    for memory in target.lanes(2, 1, 100).cache.keys:
        assert memory is not None
        column = memory[0, :, prompts[0] + 39]
        assert torch.isfinite(memory).all()
        assert float(column.abs().max()) > 0.0, "the last of them is no empty memory"
    # The output of plain steps depends on the columns.
    with_columns, without = (
        _first_tokens(engine_over(pair, Contender(), columns)[0], synthetic.requests(2, SIZE, 0)) for columns in (40, 0)
    )
    assert with_columns != without


def _first_tokens(engine: Engine, asked: list[Any]) -> list[list[int]]:
    time_steps(engine, asked, 3)
    return [one.token_ids for one in engine._slots.progress if one is not None]


def test_a_second_engine_over_the_same_memory_begins_anew(pair: tuple[Target, Target]) -> None:
    target = Filled(pair[0], 40, 2, 256)
    results = []
    for _ in range(2):
        engine = Engine(target, synthetic.plain_method(), 2, 200)  # type: ignore[arg-type]
        results.append(_first_tokens(engine, synthetic.requests(2, SIZE, 0)))
    assert [len(tokens) for tokens in results[0]] == [5, 5]
    assert results[0] == results[1]


def test_a_memory_that_is_too_small_and_rows_that_end_are_refused(pair: tuple[Target, Target]) -> None:
    with pytest.raises(ValueError, match="3 slots of 100 columns do not fit"):
        Filled(pair[0], 40, 2, 256).lanes(3, 1, 100)
    with pytest.raises(ValueError, match="2 slots of 300 columns do not fit"):
        Filled(pair[0], 40, 2, 256).lanes(2, 1, 300)
    engine, *_ = engine_over(pair, Contender(3, 1.0, "all columns"), 0)
    with pytest.raises(RuntimeError, match="row-0 ended while steps were timed: no room left"):
        time_steps(engine, synthetic.requests(2, SIZE, 0), 100)


@pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan")])
def test_a_rate_that_is_no_probability_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        Forced(rate)


def test_forced_acceptance_is_not_lossless_and_no_job_can_choose_it() -> None:
    from actors.loading import method

    assert not Forced(0.5).lossless
    assert all("forced" not in kind for kind in method.ACCEPTANCES)


def test_the_table_has_every_row_and_marks_every_speed_as_synthetic(rows: list[dict[str, Any]]) -> None:
    results = {
        **{"synthetic": "acceptance is forced", "synthetic_rows": rows, "left_out": [(25_000, 4, "memory")]},
        **{"target_shape": "0.3B", "drafter_shape": "d", "dtype": "f", "threads": 2, "seeds": [0, 1], "machine": "m"},
        "torch": "2",
    }
    lines = synthetic_table(results).splitlines()
    assert len(lines) == 2 + len(rows)
    assert {line.count("|") for line in lines} == {10}
    assert [cell.strip() for cell in lines[0].split("|")[7:10]] == [
        "a step, synthetic", "tokens/s, synthetic", "over plain, synthetic",
    ]  # fmt: skip
    assert lines[2].startswith("| 40 | 2 | plain |  |  | 1 |")
    assert lines[2].endswith("| 1.00 |")
    assert lines[-1].startswith("| 40 | 2 | 3 | the text alone | 1 | 4.00, 4.00 |")
    assert synthetic_setting(results).startswith("Synthetic: acceptance is forced.")
    assert "Left out for lack of memory: 25,000 columns at batch 4." in synthetic_setting(results)


def test_the_speed_up_is_that_of_tokens_per_second_in_the_same_rounds() -> None:
    row = {"batch": 2, "synthetic_tokens": [20, 30], "seconds": [1.0, 1.0], "num_steps": [5, 5]}
    plain = {"batch": 2, "synthetic_tokens": [10, 10], "seconds": [1.0, 2.0], "num_steps": [5, 5]}
    assert relative_speeds(row, plain, "synthetic_tokens") == pytest.approx((2.0 + 6.0) / 2)
    assert tokens_per_step(row) == 2.5
    assert expected_tokens(0.5, 3) == 1.875
    assert expected_tokens(1.0, 5) == 6.0


def test_what_does_not_fit_into_memory_is_left_out_and_named(
    pair: tuple[Target, Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(synthetic, "measure_cell", lambda *place: asked.append(place[3:]) or [])
    monkeypatch.setattr(engines, "free_bytes", lambda: 2**28)
    assert synthetic.measure(synthetic.FULL, *pair)[1] == [(25_000, 1, "memory"), (25_000, 4, "memory")]
    assert asked == [(2_000, 1), (2_000, 4)]
    monkeypatch.setattr(synthetic, "MAX_S", -1.0)
    assert {lacking for *_, lacking in synthetic.measure(synthetic.FULL, *pair)[1]} == {"time"}
