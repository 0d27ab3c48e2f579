"""The tables of `benchmarks.engine`: speeds, what drafts could have brought, steps beyond their forwards, claims."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.peer_tables import GIB, equality, figure

T_975 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Student's t at 97.5 % for so many repeats."""
MODES = ("plain", "chain", "controlled")
PARTS = ("prompts", "drafts", "verifying", "committing", "between")
"""Of a pass' wall time; "between" is what lies between the phases."""
OF_BOUND, BOUND_BATCHES = 0.9, (1, 8)
MAX_LONGER, MIN_ROUNDS = 0.05, 5
MAX_BEYOND = 0.05
"""What was to be shown on a CPU; see `engine_claims_table`."""

Cells = dict[tuple[int, int], dict[str, dict[str, Any]]]


def cells_of(results: dict[str, Any]) -> Cells:
    """(most new tokens, batch) → the rows of all methods, by length, then by batch."""
    found: Cells = {}
    for row in sorted(results["rows"], key=lambda row: (row["max_new_tokens"], row["batch"])):
        found.setdefault((row["max_new_tokens"], row["batch"]), {})[row["mode"]] = row
    return found


def decoding_s(row: dict[str, Any]) -> list[float]:
    """Seconds of each pass in steps, without prompts: neither the target's nor the drafter's."""
    phases = row["phases_s"]
    return [sum(each) for each in zip(phases["draft_s"], phases["verify_s"], phases["commit_s"], strict=True)]


def tokens_per_step(row: dict[str, Any]) -> float:
    """τ: tokens that a row gets from one step, the target's own included, over all passes."""
    # Every request's first token comes from its prefill.
    made = sum(row["num_tokens"]) - row["num_requests"] * len(row["num_tokens"])
    return float(made / sum(row["num_slot_steps"]))


def bound(chain: dict[str, Any], gamma: int) -> float:
    """τ / (γ · c + v) from the forwards that were timed in turn after a chain's passes: c a drafter's forward and v a
    verifying one, each in forwards of the target over one node. The median of the rounds."""
    kinds = chain["forwards_ms"]
    times = zip(*(kinds[name] for name in ("target 1", "target γ+1", "drafter 2", "drafter 1")), strict=True)
    plain_steps = [once / (first + (gamma - 1) * other + verifying) for once, verifying, first, other in times]
    return tokens_per_step(chain) * statistics.median(plain_steps)


def have_speeds(*rows: dict[str, Any]) -> bool:
    """Whether none of these rows has outputs for which its speed is withheld."""
    return all(row["tokens_per_s"] is not None for row in rows)


def speed_up(row: dict[str, Any], plain: dict[str, Any]) -> float | None:
    """How much faster the steps of a method make tokens than those of plain decoding: the median of the rounds; None
    where either has no speed."""
    if not have_speeds(row, plain):
        return None
    return statistics.median(
        theirs / ours * mine / their
        for ours, theirs, mine, their in zip(
            decoding_s(row), decoding_s(plain), row["num_tokens"], plain["num_tokens"], strict=True
        )
    )


def slower_by(row: dict[str, Any], plain: dict[str, Any]) -> tuple[float, float, float] | None:
    """How much longer all requests took than plainly: mean over the rounds and the ends of its 95 % interval; None
    where either has no speed."""
    if not have_speeds(row, plain):
        return None
    ratios = [mine / theirs - 1.0 for mine, theirs in zip(row["seconds"], plain["seconds"], strict=True)]
    mean = statistics.mean(ratios)
    half = T_975[len(ratios)] * statistics.stdev(ratios) / math.sqrt(len(ratios))
    return mean, mean - half, mean + half


def beyond_forwards(row: dict[str, Any]) -> float:
    """Share of the steps' time that is neither the target's forward nor the drafter's, both timed in these steps; the
    median of the rounds."""
    shares = [spent / whole for spent, whole in zip(row["step_forwards_s"], decoding_s(row), strict=True)]
    return 1.0 - statistics.median(shares)


def without_forward(row: dict[str, Any]) -> float:
    """Share of the wall time in which no forward runs, of prompts or of steps: what a device would idle for; the
    median of the rounds."""
    times = zip(row["step_forwards_s"], row["prompt_forwards_s"], row["seconds"], strict=True)
    return 1.0 - statistics.median((steps + prompts) / whole for steps, prompts, whole in times)


def parts_of_pass(row: dict[str, Any]) -> tuple[float, ...]:
    """Shares of the wall time of all passes, in the order of `PARTS`."""
    phases, whole = {name: sum(values) for name, values in row["phases_s"].items()}, sum(row["seconds"])
    named = (phases["encode_s"] + phases["prefill_s"], *(phases[f"{n}_s"] for n in ("draft", "verify", "commit")))
    return (*(part / whole for part in named), max(0.0, 1.0 - sum(named) / whole))


def survival(row: dict[str, Any], gamma: int) -> list[float]:
    """Shares of the steps that keep at least 1, 2, … γ drafts."""
    counts = row["acceptance_histogram"]
    return [sum(counts[place:]) / sum(counts) for place in range(1, gamma + 1)]


def engine_table(results: dict[str, Any]) -> str:
    """End to end: speeds with their range, equality, and what a method takes longer than plain decoding."""
    lines = [
        "| new tokens, at most | batch | method | requests | samples/s | tokens/s | acceptance length "
        "| longer than plain | no forward running | outputs equal to the target's | peak memory |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (length, batch), rows in cells_of(results).items():
        for mode in MODES:
            row = rows[mode]
            drafts = "" if mode == "plain" or row["acceptance_length"] is None else f"{row['acceptance_length']:.2f}"
            longer = "" if mode == "plain" else _interval(slower_by(row, rows["plain"]))
            lines.append(
                f"| {length} | {batch} | {mode} | {row['num_requests']} | {figure(row['samples_per_s'], 2)} "
                f"| {figure(row['tokens_per_s'], 1)} | {drafts} | {longer} | {100 * without_forward(row):.1f} % "
                f"| {equality(row['verdict'])} | {row['peak_bytes'] / GIB:.1f} GiB |"
            )
    return "\n".join(lines)


def engine_setting(results: dict[str, Any]) -> str:
    """One paragraph on what was run."""
    left_out = "".join(
        f" Left out for lack of {lacking}: batch {batch} with {length} tokens."
        for batch, length, lacking in results["left_out"]
    )
    repeats = {row["batch"]: len(row["seconds"]) for row in results["rows"]}
    passes = ", ".join(f"{number} at batch {batch}" for batch, number in sorted(repeats.items()))
    return (
        f"`text_target` inflated to {results['target_shape']}, drafter `text_drafter` inflated to "
        f"{results['drafter_shape']}, {results['dtype']}, {results['threads']} threads, γ = {results['gamma']}, ends "
        f"where the target ends. Medians of passes with the lowest and the highest, {passes}; intervals of 95 % over "
        f"the rounds. {results['machine']}. torch {results['torch']}.{left_out}"
    )


def steps_table(results: dict[str, Any]) -> str:
    """Steps alone: what drafts could bring by the forwards' times, what they bring, and what the rest takes."""
    gamma = results["gamma"]
    lines = [
        "| new tokens, at most | batch | target, 1 node | target, γ + 1 nodes | drafter, 2 nodes | drafter, 1 node | τ "
        "| τ / (γ·c + v) | measured | of it | beyond forwards |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (length, batch), rows in cells_of(results).items():
        plain, chain = rows["plain"], rows["chain"]
        kinds = {name: statistics.median(times) for name, times in chain["forwards_ms"].items()}
        possible, reached = bound(chain, gamma), speed_up(chain, plain)
        order = ("target 1", "target γ+1", "drafter 2", "drafter 1")
        times = " | ".join(f"{kinds[name]:.2f} ms" for name in order)
        told = "withheld | withheld" if reached is None else f"{reached:.2f} | {100 * reached / possible:.0f} %"
        lines.append(
            f"| {length} | {batch} | {times} | {tokens_per_step(chain):.2f} | {possible:.2f} | {told} "
            f"| {100 * beyond_forwards(chain):.1f} % |"
        )
    return "\n".join(lines)


def phases_table(results: dict[str, Any]) -> str:
    """Where a pass' time goes, in shares of its wall time."""
    lines = [
        f"| new tokens, at most | batch | method | {' | '.join(PARTS)} |",
        "|---" * (3 + len(PARTS)) + "|",
    ]
    for (length, batch), rows in cells_of(results).items():
        for mode, row in rows.items():
            shares = " | ".join(f"{100 * part:.1f} %" for part in parts_of_pass(row))
            lines.append(f"| {length} | {batch} | {mode} | {shares} |")
    return "\n".join(lines)


def positions_table(results: dict[str, Any]) -> str:
    """How often a chain's first i drafts are all accepted."""
    gamma = results["gamma"]
    places = " | ".join(f"draft {place}" for place in range(1, gamma + 1))
    lines = [f"| new tokens, at most | batch | {places} |", "|---" * (gamma + 2) + "|"]
    for (length, batch), rows in cells_of(results).items():
        shares = " | ".join(f"{100 * share:.0f} %" for share in survival(rows["chain"], gamma))
        lines.append(f"| {length} | {batch} | {shares} |")
    return "\n".join(lines)


def claims(results: dict[str, Any]) -> list[dict[str, Any]]:
    """What was to be shown of this engine alone: `claim`, `numbers`, and whether it `holds` (None where that is not
    known, because speeds are withheld or there are too few rounds)."""
    found = []
    for (length, batch), rows in cells_of(results).items():
        plain, chain, where = rows["plain"], rows["chain"], f"batch {batch}, at most {length} tokens"
        if batch in BOUND_BATCHES:
            possible, reached = bound(chain, results["gamma"]), speed_up(chain, plain)
            numbers = "withheld" if reached is None else f"{reached:.2f} of {possible:.2f}, {reached / possible:.2f}"
            holds = None if reached is None else reached >= OF_BOUND * possible
            found.append(_claim(f"a chain reaches {OF_BOUND:g} of τ / (γ·c + v): {where}", holds, numbers))
        longer = slower_by(rows["controlled"], plain)
        enough = len(plain["seconds"]) >= MIN_ROUNDS
        holds = None if longer is None or not enough else longer[2] <= MAX_LONGER
        numbers = _interval(longer) + ("" if enough else f", fewer than {MIN_ROUNDS} rounds")
        limit = f"{100 * MAX_LONGER:.0f} %"
        found.append(_claim(f"with the controller at most {limit} longer than plainly: {where}", holds, numbers))
        beyond = beyond_forwards(chain)
        limit = f"{100 * MAX_BEYOND:.0f} %"
        told = f"trees, accepting and committing take at most {limit} of a chain's steps: {where}"
        found.append(_claim(told, beyond <= MAX_BEYOND, f"{100 * beyond:.1f} %"))
        graphs = sum(sum(row["num_new_graphs"]) for row in rows.values())
        found.append(_claim(f"nothing is compiled in timed passes: {where}", graphs == 0, f"{graphs} graphs"))
    # All of one claim together.
    return sorted(found, key=lambda one: one["claim"].partition(":")[0])


def engine_claims_table(results: dict[str, Any]) -> str:
    """The claims, each reached or not."""
    lines = ["| what was to be shown | figures | reached |", "|---|---|---|"]
    for one in claims(results):
        reached = {True: "yes", False: "**no**", None: "not known"}[one["holds"]]
        lines.append(f"| {one['claim']} | {one['numbers']} | {reached} |")
    return "\n".join(lines)


def _claim(claim: str, holds: bool | None, numbers: str) -> dict[str, Any]:
    return {"claim": claim, "holds": holds, "numbers": numbers}


def _interval(found: Sequence[float] | None) -> str:
    if found is None:
        return "withheld"
    mean, low, high = (100 * value for value in found)
    return f"{mean:+.1f} % ({low:+.1f} to {high:+.1f})"


TABLES = {
    "engine": engine_table,
    "engine_setting": engine_setting,
    "engine_claims": engine_claims_table,
    "engine_steps": steps_table,
    "engine_phases": phases_table,
    "engine_positions": positions_table,
}
