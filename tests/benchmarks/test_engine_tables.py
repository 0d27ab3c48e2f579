"""Tests tables and plots of the engine benchmark, from results whose numbers can be computed by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.tables import engine as tables
from benchmarks.tables.parts import PARTS
from benchmarks.tables.plots import plots_of


def render(name: str, figures: dict[str, Any]) -> str:
    return PARTS[name].render(figures)


def row(mode: str, seconds: list[float], steps: int, different: int = 0) -> dict[str, Any]:
    """Two passes of 10 requests and 110 tokens in one slot; a fifth of each goes to drafts, the rest to the target, and
    nine tenths of the steps to forwards."""
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
        "max_new_tokens": 64,
        "mode": mode,
        "seconds": seconds,
        "step_forwards_s": [0.9 * s for s in seconds],
        "prompt_forwards_s": [0.0, 0.0],
        "num_new_graphs": [0, 0],
        "acceptance_length": 3.5,
        "samples_per_s": speed and {name: value / 11 for name, value in speed.items()},
        "num_requests": 10,
        "num_tokens": [110, 110],
        "num_steps": [steps, steps],
        "num_slot_steps": [steps, steps],
        "phases_s": phases,
        "acceptance_histogram": [1, 0, 3],
        "tokens_per_s": speed,
        "peak_bytes": 2**30,
        "verdict": {"num_sequences": 10, "num_equal": 10 - different, "num_different": different},
    }


def results(different: int = 0) -> dict[str, Any]:
    """Plain steps of 20 ms, chains of 2 drafts of 25 ms that bring 4 tokens."""
    alone = {"target 1": 20.0, "target γ+1": 21.0, "drafter 2": 2.0, "drafter 1": 1.0}
    return {
        "gamma": 2,
        "left_out": [[128, 64, "memory"]],
        "rows": [
            row("plain", [2.0, 2.2], 100),
            row("chain", [0.625, 0.6875], 25, different)
            | {"forwards_ms": {name: [ms, ms] for name, ms in alone.items()}},
            row("controlled", [1.0, 1.1], 50),
        ],
    }


def test_the_bound_follows_from_the_forwards_and_the_speed_up_from_the_steps() -> None:
    plain, chain, _ = results()["rows"]
    assert tables.tokens_per_step(plain) == 1.0
    assert tables.tokens_per_step(chain) == 4.0
    # Four tokens for 2 + 1 + 21 ms instead of four times 20.
    assert tables.bound(chain, 2) == pytest.approx(80.0 / 24.0)
    assert tables.speed_up(chain, plain) == pytest.approx(3.2)
    assert "| 3.33 | 3.20 | 96 % | 10.0 % |" in render("engine_steps", results())


def test_a_method_with_other_outputs_is_marked_and_has_no_speed() -> None:
    figures = results(different=3)
    table = render("engine", figures).splitlines()
    assert "| plain | 10 | 5.00 (4.55–5.45) | 55.0 (50.0–60.0) |  |  | 10.0 % | all | 1.0 GiB |" in table[2]
    assert (
        "| chain | 10 | withheld | withheld | 3.50 | withheld | 10.0 % | 70.0 %, **3 beyond rounding** |" in (table[3])
    )
    assert tables.speed_up(figures["rows"][1], figures["rows"][0]) is None
    assert tables.slower_by(figures["rows"][1], figures["rows"][0]) is None
    assert "| 3.33 | withheld | withheld | 10.0 % |" in render("engine_steps", figures)
    speeds = plots_of({"engine": figures})[Path("docs/results/engine_plot.svg")].data
    assert {name: len(curve) for name, curve in speeds.items()} == {
        "plain, ≤ 64 tokens": 1, "chain, ≤ 64 tokens (withheld at 1)": 0, "controlled, ≤ 64 tokens": 1,
    }  # fmt: skip


def test_claims_are_reached_or_not_by_the_figures_and_unknown_without_them() -> None:
    def verdicts(figures: dict[str, Any]) -> dict[str, bool | None]:
        return {" ".join(text.split()[:2]): holds for text, holds, _ in tables.claims(figures)}

    figures = results()
    # Two rounds are too few for an interval, and a tenth of a step beyond the forwards is too much.
    assert verdicts(figures) == {"a chain": True, "with the": None, "trees, accepting": False, "nothing is": True}
    for row in figures["rows"]:
        for name in ("seconds", "num_tokens", "step_forwards_s", "num_slot_steps"):
            row[name] = [row[name][0]] * 5
        row["phases_s"] = {name: [values[0]] * 5 for name, values in row["phases_s"].items()}
    assert verdicts(figures)["with the"] is True
    # A mean of 3 % is not enough where the interval ends at 11 %.
    figures["rows"][2]["seconds"] = [2.0, 2.0, 2.0, 2.0, 2.3]
    assert verdicts(figures)["with the"] is False
    figures["rows"][2]["seconds"] = [2.12] * 5
    figures["rows"][1]["step_forwards_s"] = [0.97 * 0.625] * 5
    figures["rows"][0]["num_new_graphs"] = [0, 1]
    figures["rows"][1]["forwards_ms"]["drafter 1"] = [0.1, 0.1]
    figures["rows"][1]["forwards_ms"]["drafter 2"] = [0.1, 0.1]
    figures["rows"][1]["forwards_ms"]["target γ+1"] = [20.0, 20.0]
    # 4 · 20 / 20.2 ms = 3.96, of which 3.2 are 81 %.
    assert verdicts(figures) == {"a chain": False, "with the": False, "trees, accepting": True, "nothing is": False}
    withheld = results(different=1)
    assert verdicts(withheld)["a chain"] is None
    assert "| withheld | not known |" in render("engine_claims", withheld)
