"""The table of `benchmarks.synthetic`: what steps cost over long visual contexts. Every figure in it is synthetic."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.peer_tables import figure

Place = tuple[int, int]


def expected_tokens(rate: float, gamma: int) -> float:
    """Tokens of one step when each of γ drafts is taken at this rate: 1 + α + … + α^γ (Leviathan et al. 2023)."""
    return sum(rate**place for place in range(gamma + 1))


def tokens_per_step(row: dict[str, Any]) -> float:
    """Of one row, over all rounds."""
    return float(sum(row["synthetic_tokens"]) / (row["batch"] * sum(row["num_steps"])))


def speed_up(row: dict[str, Any], plain: dict[str, Any]) -> float:
    """Tokens per second over those of plain decoding in the same round, the median."""
    return statistics.median(
        mine / own * theirs / their
        for mine, own, their, theirs in zip(
            row["synthetic_tokens"], row["seconds"], plain["synthetic_tokens"], plain["seconds"], strict=True
        )
    )


def synthetic_table(results: dict[str, Any]) -> str:
    """A row for each contender."""
    plain: dict[Place, dict[str, Any]] = {
        (row["num_columns"], row["batch"]): row for row in results["synthetic_rows"] if row["gamma"] == 0
    }
    lines = [
        "| visual columns (synthetic) | batch | γ | drafter reads | forced α | tokens per step: expected, drawn "
        "| a step, synthetic | tokens/s, synthetic | over plain, synthetic |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in results["synthetic_rows"]:
        step_ms = [1000 * spent / steps for spent, steps in zip(row["seconds"], row["num_steps"], strict=True)]
        cell = {"median": statistics.median(step_ms), "low": min(step_ms), "high": max(step_ms)}
        how = ["plain", "", "", "1"]
        if row["gamma"]:
            drawn = f"{expected_tokens(row['rate'], row['gamma']):.2f}, {tokens_per_step(row):.2f}"
            how = [str(row["gamma"]), row["drafter_reads"], f"{row['rate']:g}", drawn]
        over = speed_up(row, plain[row["num_columns"], row["batch"]])
        lines.append(
            f"| {row['num_columns']:,} | {row['batch']} | {' | '.join(how)} | {figure(cell, 1)} ms "
            f"| {figure(row['synthetic_tokens_per_s'], 1)} | {over:.2f} |"
        )
    return "\n".join(lines)


def synthetic_setting(results: dict[str, Any]) -> str:
    """One paragraph on what was run."""
    left_out = "".join(
        f" Left out for lack of {lacking}: {columns:,} columns at batch {batch}."
        for columns, batch, lacking in results["left_out"]
    )
    return (
        f"Synthetic: {results['synthetic']}. `text_target` inflated to {results['target_shape']}, drafter "
        f"`text_drafter` inflated to {results['drafter_shape']}, {results['dtype']}, {results['threads']} threads; "
        f"seeds of the draws {', '.join(map(str, results['seeds']))}. Medians of {len(results['seeds'])} rounds, the "
        f"contenders in turn, with the lowest and the highest. {results['machine']}. torch {results['torch']}."
        f"{left_out}"
    )


TABLES = {"synthetic": synthetic_table, "synthetic_setting": synthetic_setting}
