"""Renders the tables of `benchmarks.engine`: speeds, possible speed-ups, time outside forwards, goals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from benchmarks.harness.markdown import GIB, Results, equality, figure, goals_table, inflated, left_out, percent, table
from benchmarks.harness.verdict import relative_speeds

T_975 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Student's t at 97.5 % by number of repeats."""
MODES = ("plain", "chain", "controlled")
PARTS = ("prompts", "drafts", "verifying", "committing", "between")
"""Phases of a pass; "between" is the time outside the phases."""
FORWARDS = ("target 1", "target γ+1", "drafter 2", "drafter 1")
OF_BOUND, BOUND_BATCHES = 0.9, (1, 8)
MAX_LONGER, MIN_ROUNDS = 0.05, 5
MAX_BEYOND = 0.05
"""The goals on a CPU; see `claims`."""
PLACE = "new tokens, at most | batch"


def cells_of(results: Results) -> dict[tuple[int, int], dict[str, Results]]:
    """Return (most new tokens, batch) → the rows of all methods, sorted by length, then by batch."""
    found: dict[tuple[int, int], dict[str, Results]] = {}
    for row in sorted(results["rows"], key=lambda row: (row["max_new_tokens"], row["batch"])):
        found.setdefault((row["max_new_tokens"], row["batch"]), {})[row["mode"]] = row
    return found


def decoding_s(row: Results) -> list[float]:
    """Return the seconds that each pass spends in decoding steps, without prefills."""
    phases = row["phases_s"]
    return [sum(each) for each in zip(phases["draft_s"], phases["verify_s"], phases["commit_s"], strict=True)]


def tokens_per_step(row: Results) -> float:
    """Return τ: tokens per row and step, the bonus token included, over all passes."""
    # The first token of every request comes from its prefill.
    tokens = sum(row["num_tokens"]) - row["num_requests"] * len(row["num_tokens"])
    return float(tokens / sum(row["num_slot_steps"]))


def bound(chain: Results, gamma: int) -> float:
    """Return the possible speed-up τ / (γ · c + v), the median over rounds; c and v are the times of a drafter's and a
    verifying forward relative to a plain forward."""
    times = zip(*(chain["forwards_ms"][name] for name in FORWARDS), strict=True)
    plain_steps = [once / (first + (gamma - 1) * other + verifying) for once, verifying, first, other in times]
    return tokens_per_step(chain) * float(statistics.median(plain_steps))


def speed_up(row: Results, plain: Results) -> float | None:
    """Return tokens per second of decoding steps over plain decoding's, the median of the rounds; None if a speed is
    withheld."""
    if row["tokens_per_s"] is None or plain["tokens_per_s"] is None:
        return None
    return relative_speeds(row | {"seconds": decoding_s(row)}, plain | {"seconds": decoding_s(plain)})


def slower_by(row: Results, plain: Results) -> tuple[float, float, float] | None:
    """Return the relative extra time over plain decoding: mean over the rounds and its 95 % interval; None if
    withheld."""
    if row["tokens_per_s"] is None or plain["tokens_per_s"] is None:
        return None
    ratios = [spent / plain_s - 1.0 for spent, plain_s in zip(row["seconds"], plain["seconds"], strict=True)]
    mean = statistics.mean(ratios)
    half = T_975[len(ratios)] * statistics.stdev(ratios) / math.sqrt(len(ratios))
    return mean, mean - half, mean + half


def beyond_forwards(row: Results) -> float:
    """Return the share of the steps' time outside forwards, the median of the rounds."""
    shares = [spent / whole for spent, whole in zip(row["step_forwards_s"], decoding_s(row), strict=True)]
    return 1.0 - float(statistics.median(shares))


def without_forward(row: Results) -> float:
    """Return the share of the wall time in which no forward runs (device idle time), the median of the rounds."""
    times = zip(row["step_forwards_s"], row["prompt_forwards_s"], row["seconds"], strict=True)
    return 1.0 - float(statistics.median((steps + prompts) / whole for steps, prompts, whole in times))


def parts_of_pass(row: Results) -> tuple[float, ...]:
    """Return the shares of the wall time of all passes, in the order of `PARTS`."""
    phases, whole = {name: sum(values) for name, values in row["phases_s"].items()}, sum(row["seconds"])
    named = (phases["encode_s"] + phases["prefill_s"], *(phases[f"{n}_s"] for n in ("draft", "verify", "commit")))
    return (*(part / whole for part in named), max(0.0, 1.0 - sum(named) / whole))


def survival(row: Results, gamma: int) -> list[float]:
    """Return the shares of the steps that accept at least 1, 2, … γ drafts."""
    counts = row["acceptance_histogram"]
    return [sum(counts[place:]) / sum(counts) for place in range(1, gamma + 1)]


def _interval(found: Sequence[float] | None) -> str:
    if found is None:
        return "withheld"
    mean, low, high = (100 * value for value in found)
    return f"{mean:+.1f} % ({low:+.1f} to {high:+.1f})"


def engine_table(results: Results) -> str:
    """Render end-to-end speeds with their range, equality of outputs, and the extra time over plain decoding."""
    rows = []
    for place, modes in cells_of(results).items():
        for mode in MODES:
            row, length, longer = modes[mode], "", ""
            if mode != "plain":
                length = "" if row["acceptance_length"] is None else f"{row['acceptance_length']:.2f}"
                longer = _interval(slower_by(row, modes["plain"]))
            speeds = figure(row["samples_per_s"], 2), figure(row["tokens_per_s"], 1)
            memory = f"{row['peak_bytes'] / GIB:.1f} GiB"
            idle = percent(without_forward(row), 1)
            verdict = equality(row["verdict"])
            rows.append((*place, mode, row["num_requests"], *speeds, length, longer, idle, verdict, memory))
    return table(
        f"{PLACE} | method | requests | samples/s | tokens/s | acceptance length | longer than plain "
        "| no forward running | outputs equal to the target's | peak memory",
        rows,
    )


def engine_setting(results: Results) -> str:
    """Describe the models, the grid and the machine in one paragraph."""
    repeats = {row["batch"]: len(row["seconds"]) for row in results["rows"]}
    passes = ", ".join(f"{number} at batch {batch}" for batch, number in sorted(repeats.items()))
    missing = left_out((lack, f"batch {batch} with {length} tokens") for batch, length, lack in results["left_out"])
    return (
        f"{inflated(results)}, γ = {results['gamma']}, ends where the target ends. Medians of passes with the lowest "
        f"and the highest, {passes}; intervals of 95 % over the rounds. {results['machine']}. torch "
        f"{results['torch']}.{missing}"
    )


def steps_table(results: Results) -> str:
    """Render decoding steps alone: possible and measured speed-up, and the time outside forwards."""
    rows = []
    for place, modes in cells_of(results).items():
        chain = modes["chain"]
        possible, reached = bound(chain, results["gamma"]), speed_up(chain, modes["plain"])
        times = [f"{statistics.median(chain['forwards_ms'][name]):.2f} ms" for name in FORWARDS]
        speeds = ("withheld",) * 2 if reached is None else (f"{reached:.2f}", percent(reached / possible))
        beyond = percent(beyond_forwards(chain), 1)
        rows.append((*place, *times, f"{tokens_per_step(chain):.2f}", f"{possible:.2f}", *speeds, beyond))
    return table(
        f"{PLACE} | target, 1 node | target, γ + 1 nodes | drafter, 2 nodes | drafter, 1 node | τ | τ / (γ·c + v) "
        "| measured | of it | beyond forwards",
        rows,
    )


def phases_table(results: Results) -> str:
    """Render the shares of a pass's wall time by phase."""
    rows = [
        (*place, mode, *(percent(part, 1) for part in parts_of_pass(row)))
        for place, modes in cells_of(results).items()
        for mode, row in modes.items()
    ]
    return table(f"{PLACE} | method | {' | '.join(PARTS)}", rows)


def positions_table(results: Results) -> str:
    """Render how often the first i drafts of a chain are all accepted."""
    gamma = results["gamma"]
    rows = [(*place, *map(percent, survival(modes["chain"], gamma))) for place, modes in cells_of(results).items()]
    return table(" | ".join([PLACE, *(f"draft {place}" for place in range(1, gamma + 1))]), rows)


def claims(results: Results) -> list[tuple[str, bool | None, str]]:
    """Check the goals; return (text, whether reached or None if speeds are withheld or rounds too few, numbers) of
    each."""
    found: list[tuple[str, bool | None, str]] = []
    for (length, batch), modes in cells_of(results).items():
        plain, chain, where = modes["plain"], modes["chain"], f"batch {batch}, at most {length} tokens"
        if batch in BOUND_BATCHES:
            possible, reached = bound(chain, results["gamma"]), speed_up(chain, plain)
            holds, numbers = None, "withheld"
            if reached is not None:
                holds = reached >= OF_BOUND * possible
                numbers = f"{reached:.2f} of {possible:.2f}, {reached / possible:.2f}"
            found.append((f"a chain reaches {OF_BOUND:g} of τ / (γ·c + v): {where}", holds, numbers))
        longer = slower_by(modes["controlled"], plain)
        enough = len(plain["seconds"]) >= MIN_ROUNDS
        holds = None if longer is None or not enough else longer[2] <= MAX_LONGER
        numbers = _interval(longer) + ("" if enough else f", fewer than {MIN_ROUNDS} rounds")
        text = f"with the controller at most {percent(MAX_LONGER)} longer than plainly: {where}"
        found.append((text, holds, numbers))
        beyond = beyond_forwards(chain)
        text = f"trees, accepting and committing take at most {percent(MAX_BEYOND)} of a chain's steps: {where}"
        found.append((text, beyond <= MAX_BEYOND, percent(beyond, 1)))
        graphs = sum(sum(row["num_new_graphs"]) for row in modes.values())
        found.append((f"nothing is compiled in timed passes: {where}", graphs == 0, f"{graphs} graphs"))
    return sorted(found, key=lambda one: one[0].partition(":")[0])


def engine_claims_table(results: Results) -> str:
    return goals_table(claims(results))


TABLES = {
    "engine": engine_table,
    "engine_setting": engine_setting,
    "engine_claims": engine_claims_table,
    "engine_steps": steps_table,
    "engine_phases": phases_table,
    "engine_positions": positions_table,
}
