"""The tables of the engine's benchmark, from results whose figures can be worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import engine_tables as tables
from benchmarks import pipeline_tables


def row(mode: str, seconds: list[float], steps: int, forwards: dict[str, float], different: int = 0) -> dict[str, Any]:
    """Two passes of 10 requests and 110 tokens in one slot; a fifth of each goes to drafts, the rest to the target."""
    speed = None if different else {"median": 55.0, "low": 50.0, "high": 60.0}
    phases = {
        "encode_s": [0.0, 0.0],
        "prefill_s": [0.0, 0.0],
        "draft_s": [0.2 * s for s in seconds],
        "verify_s": [0.8 * s for s in seconds],
        "commit_s": [0.0, 0.0],
    }
    return {
        "batch": 1,
        "mode": mode,
        "seconds": seconds,
        "num_requests": 10,
        "num_tokens": [110, 110],
        "num_steps": [steps, steps],
        "num_slot_steps": [steps, steps],
        "phases_s": phases,
        "forwards_ms": {name: [ms, ms] for name, ms in forwards.items()},
        "acceptance_histogram": [1, 0, 3],
        "tokens_per_s": speed,
        "peak_bytes": 2**30,
        "verdict": {"num_sequences": 10, "num_equal": 10 - different, "num_different": different},
    }


def results(different: int = 0) -> dict[str, Any]:
    """Plain steps of 20 ms, chains of 2 drafts of 25 ms that bring 4 tokens."""
    target = {"target 1": 20.0, "target γ+1": 21.0}
    drafter = {"drafter 2": 2.0, "drafter 1": 1.0}
    return {
        "gamma": 2,
        "rows": [
            row("plain", [2.0, 2.2], 100, target),
            row("chain", [0.625, 0.6875], 25, target | drafter, different),
            row("controlled", [1.0, 1.1], 50, target | drafter),
        ],
    }


def test_the_bound_follows_from_the_forwards_and_the_speed_up_from_the_steps() -> None:
    plain, chain, _ = results()["rows"]
    assert tables.tokens_per_step(plain) == 1.0
    assert tables.tokens_per_step(chain) == 4.0
    # Four tokens for 2 + 1 + 21 ms instead of four times 20.
    assert tables.bound(chain, plain, 2) == pytest.approx(80.0 / 24.0)
    assert tables.speed_up(chain, plain) == pytest.approx(3.2)
    mean_step_ms = 1000 * (0.625 + 0.6875) / 50
    assert tables.beyond_forwards(chain, 2) == pytest.approx(1.0 - 24.0 / mean_step_ms)
    assert "| 3.33 | 3.20 | 96 % |" in tables.steps_table(results())


def test_the_interval_of_the_controller_is_students() -> None:
    plain, _, controlled = results()["rows"]
    assert tables.slower_by(controlled, plain) == pytest.approx((-0.5, -0.5, -0.5))
    controlled["seconds"] = [2.0, 2.42]
    mean, low, high = tables.slower_by(controlled, plain)
    assert mean == pytest.approx(0.05)
    assert high - mean == pytest.approx(12.706 * 0.05)
    assert mean - low == pytest.approx(high - mean)


def test_a_method_with_other_outputs_has_no_speed_and_says_so() -> None:
    table = tables.engine_table(results(different=3))
    assert "| 55.0 (50.0–60.0) | withheld | 55.0 (50.0–60.0) |" in table
    assert "100.0 %, 70.0 %, **3 beyond rounding**, 100.0 %" in table


def test_shares_of_phases_and_of_positions() -> None:
    assert "| 1 | chain | 0.0 % | 20.0 % | 80.0 % | 0.0 % |" in tables.phases_table(results())
    assert "| 1 | 75 % | 75 % |" in tables.positions_table(results())


def test_a_job_with_other_texts_than_plain_decodings_has_no_speed() -> None:
    cell = {
        "num_rows": 100,
        "wall_s": 10.0,
        "engine_s": 8.0,
        "num_tokens": 5000,
        "acceptance_length": 3.0,
        "actors_waited_share": 0.1,
        "method": "chain",
        "compile": "never",
        "num_equal": 100,
    }
    told = pipeline_tables.pipeline_table({"rows": [cell, {**cell, "wall_s": 20.0}]})
    assert "| chain | never | 7.5 | 375.0 | 60 % | 10 % | 3.00 | 200 of 200 |" in told
    other = pipeline_tables.pipeline_table({"rows": [cell, {**cell, "num_equal": 99}]})
    assert "| chain | never | withheld | withheld | 80 % | 10 % | 3.00 | 199 of 200 |" in other
