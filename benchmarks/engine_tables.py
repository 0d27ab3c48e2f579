"""The tables of `benchmarks.engine`: speeds, what drafts could have brought, and what a step takes beyond forwards."""

from __future__ import annotations

import math
import statistics
from typing import Any

T_975 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Student's t at 97.5 % for so many repeats."""


def decoding_s(row: dict[str, Any]) -> list[float]:
    """Seconds of each pass in steps, without prompts."""
    phases = row["phases_s"]
    return [sum(each) for each in zip(phases["draft_s"], phases["verify_s"], phases["commit_s"], strict=True)]


def tokens_per_step(row: dict[str, Any]) -> float:
    """τ: tokens that a row gets from one step, the target's own included, over all passes."""
    # Every request's first token comes from its prefill.
    made = sum(row["num_tokens"]) - row["num_requests"] * len(row["num_tokens"])
    return float(made / sum(row["num_slot_steps"]))


def bound(row: dict[str, Any], plain: dict[str, Any], gamma: int) -> float:
    """τ / (γ · c + v) from the forwards that were timed beside the passes: c a drafter's forward and v a verifying one,
    each in forwards of the target over one node."""
    once = statistics.median(plain["forwards_ms"]["target 1"])
    kinds = {name: statistics.median(times) for name, times in row["forwards_ms"].items()}
    drafting = kinds["drafter 2"] + (gamma - 1) * kinds["drafter 1"]
    return tokens_per_step(row) * once / (drafting + kinds["target γ+1"])


def speed_up(row: dict[str, Any], plain: dict[str, Any]) -> float:
    """How much faster the steps of a method make tokens than those of plain decoding: the median of the rounds."""
    return statistics.median(
        theirs / ours * mine / their
        for ours, theirs, mine, their in zip(
            decoding_s(row), decoding_s(plain), row["num_tokens"], plain["num_tokens"], strict=True
        )
    )


def slower_by(row: dict[str, Any], plain: dict[str, Any]) -> tuple[float, float, float]:
    """How much longer all requests took than plainly: mean over the rounds and the ends of its 95 % interval."""
    ratios = [mine / theirs - 1.0 for mine, theirs in zip(row["seconds"], plain["seconds"], strict=True)]
    mean = statistics.mean(ratios)
    half = T_975[len(ratios)] * statistics.stdev(ratios) / math.sqrt(len(ratios))
    return mean, mean - half, mean + half


def beyond_forwards(row: dict[str, Any], gamma: int) -> float:
    """Share of a step that is neither the target's forward nor the drafter's."""
    kinds = {name: statistics.median(times) for name, times in row["forwards_ms"].items()}
    step_ms = 1000 * sum(decoding_s(row)) / sum(row["num_steps"])
    forwards = kinds["drafter 2"] + (gamma - 1) * kinds["drafter 1"] + kinds["target γ+1"]
    return 1.0 - float(forwards / step_ms)


def by_batch(results: dict[str, Any]) -> dict[int, dict[str, dict[str, Any]]]:
    """The rows of each batch size, by method."""
    found: dict[int, dict[str, dict[str, Any]]] = {}
    for row in results["rows"]:
        found.setdefault(row["batch"], {})[row["mode"]] = row
    return found


def engine_table(results: dict[str, Any]) -> str:
    """End to end: speeds with their range, equality, and the controller against plain decoding."""
    lines = [
        "| batch | plain, tokens/s | chain, tokens/s | controller, tokens/s | longer than plain, controller "
        "| outputs equal to the target's (plain, chain, controller) | peak memory |",
        "|---|---|---|---|---|---|---|",
    ]
    for batch, rows in by_batch(results).items():
        speeds = [_figure(rows[mode]["tokens_per_s"]) for mode in ("plain", "chain", "controlled")]
        mean, low, high = slower_by(rows["controlled"], rows["plain"])
        equal = ", ".join(_equal(rows[mode]["verdict"]) for mode in ("plain", "chain", "controlled"))
        peak = max(row["peak_bytes"] for row in rows.values()) / 2**30
        lines.append(
            f"| {batch} | {' | '.join(speeds)} | {100 * mean:+.1f} % ({100 * low:+.1f} to {100 * high:+.1f}) "
            f"| {equal} | {peak:.1f} GiB |"
        )
    return "\n".join(lines)


def steps_table(results: dict[str, Any]) -> str:
    """Steps alone: what drafts could bring by the forwards' times, what they bring, and what the rest takes."""
    gamma = results["gamma"]
    lines = [
        "| batch | target, 1 node | target, γ + 1 nodes | drafter, 2 nodes | drafter, 1 node | τ | τ / (γ·c + v) "
        "| measured | of it | beyond forwards |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for batch, rows in by_batch(results).items():
        plain, chain = rows["plain"], rows["chain"]
        once = statistics.median(plain["forwards_ms"]["target 1"])
        kinds = {name: statistics.median(times) for name, times in chain["forwards_ms"].items()}
        possible, reached = bound(chain, plain, gamma), speed_up(chain, plain)
        times = " | ".join(f"{ms:.2f} ms" for ms in (once, kinds["target γ+1"], kinds["drafter 2"], kinds["drafter 1"]))
        lines.append(
            f"| {batch} | {times} | {tokens_per_step(chain):.2f} | {possible:.2f} | {reached:.2f} "
            f"| {100 * reached / possible:.0f} % | {100 * beyond_forwards(chain, gamma):.1f} % |"
        )
    return "\n".join(lines)


def phases_table(results: dict[str, Any]) -> str:
    """Where a pass' time goes, in shares of its phases."""
    lines = ["| batch | method | prompts | drafts | verifying | committing |", "|---|---|---|---|---|---|"]
    for batch, rows in by_batch(results).items():
        for mode, row in rows.items():
            phases = {name: sum(values) for name, values in row["phases_s"].items()}
            whole = sum(phases.values())
            parts = (
                phases["encode_s"] + phases["prefill_s"],
                *(phases[f"{n}_s"] for n in ("draft", "verify", "commit")),
            )
            lines.append(f"| {batch} | {mode} | " + " | ".join(f"{100 * part / whole:.1f} %" for part in parts) + " |")
    return "\n".join(lines)


def positions_table(results: dict[str, Any]) -> str:
    """How often a chain's first i drafts are all accepted."""
    gamma = results["gamma"]
    lines = [
        "| batch | " + " | ".join(f"draft {place}" for place in range(1, gamma + 1)) + " |",
        "|---" * (gamma + 1) + "|",
    ]
    for batch, rows in by_batch(results).items():
        counts = rows["chain"]["acceptance_histogram"]
        shares = [sum(counts[place:]) / sum(counts) for place in range(1, gamma + 1)]
        lines.append(f"| {batch} | " + " | ".join(f"{100 * share:.0f} %" for share in shares) + " |")
    return "\n".join(lines)


def _figure(cell: dict[str, float] | None) -> str:
    return "withheld" if cell is None else f"{cell['median']:.1f} ({cell['low']:.1f}–{cell['high']:.1f})"


def _equal(verdict: dict[str, Any]) -> str:
    share = f"{100 * verdict['num_equal'] / verdict['num_sequences']:.1f} %"
    return share if not verdict["num_different"] else f"{share}, **{verdict['num_different']} beyond rounding**"


TABLES = {
    "engine": engine_table,
    "engine_steps": steps_table,
    "engine_phases": phases_table,
    "engine_positions": positions_table,
}
