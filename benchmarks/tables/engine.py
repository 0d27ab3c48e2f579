"""Rows of `benchmarks.engine` and `benchmarks.peers`: speeds, possible speed-ups, time outside forwards, goals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence

from benchmarks.harness.markdown import Results, goals_table, inflated, left_out, percent, table
from benchmarks.harness.verdict import relative_speeds, spread
from benchmarks.tables.specs import Function

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
GENERATE, ASSISTED = "transformers", "transformers, drafter"
VLLM, VLLM_DRAFTS, VLLM_NGRAMS = "vLLM", "vLLM, drafter", "vLLM, n-grams"
OWN, OWN_DRAFTS = "draftfleet", "draftfleet, drafter"
GOALS: tuple[tuple[str, int, str, tuple[str, ...], float], ...] = (
    *((f"plain decoding, batch {batch}", batch, OWN, (GENERATE,), 1.0) for batch in (1, 8, 32)),
    *((f"plain decoding, batch {batch}", batch, OWN, (VLLM,), 1.0) for batch in (1, 8, 32)),
    ("speculation, batch 1", 1, OWN_DRAFTS, (ASSISTED,), 1.0),
    ("speculation, batch 8", 8, OWN_DRAFTS, (VLLM_DRAFTS, VLLM_NGRAMS), 2.0),
    ("speculation, batch 32", 32, OWN_DRAFTS, (VLLM, VLLM_DRAFTS, VLLM_NGRAMS), 1.0),
)
"""Goals beside other engines: description, batch size, row, rows of the rivals, and the ratio of speeds to reach."""


# --- this engine alone ---------------------------------------------------------------------------------------------


def cells_of(results: Results) -> dict[tuple[int, int], dict[str, Results]]:
    """Return (most new tokens, batch) → the rows of all methods, sorted by length, then by batch."""
    cells: dict[tuple[int, int], dict[str, Results]] = {}
    for row in sorted(results["rows"], key=lambda row: (row["max_new_tokens"], row["batch"])):
        cells.setdefault((row["max_new_tokens"], row["batch"]), {})[row["mode"]] = row
    return cells


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
    shares = [spent / total for spent, total in zip(row["step_forwards_s"], decoding_s(row), strict=True)]
    return 1.0 - float(statistics.median(shares))


def without_forward(row: Results) -> float:
    """Return the share of the wall time in which no forward runs (device idle time), the median of the rounds."""
    times = zip(row["step_forwards_s"], row["prompt_forwards_s"], row["seconds"], strict=True)
    return 1.0 - float(statistics.median((steps + prompts) / total for steps, prompts, total in times))


def parts_of_pass(row: Results) -> tuple[float, ...]:
    """Return the shares of the wall time of all passes, in the order of `PARTS`."""
    phases, total = {name: sum(values) for name, values in row["phases_s"].items()}, sum(row["seconds"])
    named = (phases["encode_s"] + phases["prefill_s"], *(phases[f"{n}_s"] for n in ("draft", "verify", "commit")))
    return (*(part / total for part in named), max(0.0, 1.0 - sum(named) / total))


def survival(row: Results, gamma: int) -> list[float]:
    """Return the shares of the steps that accept at least 1, 2, … γ drafts."""
    counts = row["acceptance_histogram"]
    return [sum(counts[depth:]) / sum(counts) for depth in range(1, gamma + 1)]


def _interval(interval: Sequence[float] | None) -> str:
    if interval is None:
        return "withheld"
    mean, low, high = (100 * value for value in interval)
    return f"{mean:+.1f} % ({low:+.1f} to {high:+.1f})"


def _length(row: Results) -> str:
    return "" if row["acceptance_length"] is None else f"{row['acceptance_length']:.2f}"


def _speeds(results: Results) -> Iterator[Results]:
    for modes in cells_of(results).values():
        for mode in MODES:
            row, drafts = modes[mode], mode != "plain"
            yield row | {
                "length": _length(row) if drafts else "",
                "longer": _interval(slower_by(row, modes["plain"])) if drafts else "",
                "idle": without_forward(row),
                "parts": [percent(part, 1) for part in parts_of_pass(row)],
            }


def _steps(results: Results) -> Iterator[Results]:
    """Yield decoding steps of chains: possible and measured speed-up, and the time outside forwards."""
    gamma = results["gamma"]
    for modes in cells_of(results).values():
        chain = modes["chain"]
        possible, reached = bound(chain, gamma), speed_up(chain, modes["plain"])
        yield chain | {
            "ms": [f"{statistics.median(chain['forwards_ms'][name]):.2f} ms" for name in FORWARDS],
            "tau": tokens_per_step(chain),
            "possible": possible,
            "reached": reached,
            "of_it": None if reached is None else reached / possible,
            "beyond": beyond_forwards(chain),
            "kept": [percent(share) for share in survival(chain, gamma)],
        }


def _positions(results: Results) -> str:
    titles = " | ".join(f"draft {depth}" for depth in range(1, results["gamma"] + 1))
    rows = [(row["max_new_tokens"], row["batch"], *row["kept"]) for row in _steps(results)]
    return table(f"new tokens, at most | batch | {titles}", rows)


def _engine_setting(results: Results) -> str:
    """Describe the models, the grid and the machine in one paragraph."""
    repeats = {row["batch"]: len(row["seconds"]) for row in results["rows"]}
    passes = ", ".join(f"{number} at batch {batch}" for batch, number in sorted(repeats.items()))
    missing = left_out((lack, f"batch {batch} with {length} tokens") for batch, length, lack in results["left_out"])
    return (
        f"{inflated(results)}, γ = {results['gamma']}, ends where the target ends. Medians of passes with the lowest "
        f"and the highest, {passes}; intervals of 95 % over the rounds. {results['machine']}. torch "
        f"{results['torch']}.{missing}"
    )


def claims(results: Results) -> list[tuple[str, bool | None, str]]:
    """Check the goals; return (text, whether reached or None if speeds are withheld or rounds too few, numbers) of
    each."""
    findings: list[tuple[str, bool | None, str]] = []
    for (length, batch), modes in cells_of(results).items():
        plain, chain, where = modes["plain"], modes["chain"], f"batch {batch}, at most {length} tokens"
        if batch in BOUND_BATCHES:
            possible, reached = bound(chain, results["gamma"]), speed_up(chain, plain)
            holds = None if reached is None else reached >= OF_BOUND * possible
            numbers = "withheld" if reached is None else f"{reached:.2f} of {possible:.2f}, {reached / possible:.2f}"
            findings.append((f"a chain reaches {OF_BOUND:g} of τ / (γ·c + v): {where}", holds, numbers))
        longer = slower_by(modes["controlled"], plain)
        enough = len(plain["seconds"]) >= MIN_ROUNDS
        holds = None if longer is None or not enough else longer[2] <= MAX_LONGER
        numbers = _interval(longer) + ("" if enough else f", fewer than {MIN_ROUNDS} rounds")
        text = f"with the controller at most {percent(MAX_LONGER)} longer than plainly: {where}"
        findings.append((text, holds, numbers))
        beyond = beyond_forwards(chain)
        text = f"trees, accepting and committing take at most {percent(MAX_BEYOND)} of a chain's steps: {where}"
        findings.append((text, beyond <= MAX_BEYOND, percent(beyond, 1)))
        graphs = sum(sum(row["num_new_graphs"]) for row in modes.values())
        findings.append((f"nothing is compiled in timed passes: {where}", graphs == 0, f"{graphs} graphs"))
    return sorted(findings, key=lambda finding: finding[0].partition(":")[0])


# --- beside other engines ------------------------------------------------------------------------------------------


def _speed(row: Results) -> float:
    return row["tokens_per_s"]["median"] if row["tokens_per_s"] else -1.0


def best_rows(results: Results) -> list[Results]:
    """Return the fastest variant of each row and batch size; one with a withheld speed only if no other has a speed."""
    best: dict[tuple[int, str], Results] = {}
    for row in results["rows"]:
        key = row["batch"], row["row"]
        if key not in best or _speed(row) > _speed(best[key]):
            best[key] = row
    return list(best.values())


def _peers(results: Results) -> Iterator[Results]:
    for row in best_rows(results):
        name = f"{row['row']} ({row['variant']})" if row["variant"] else row["row"]
        yield row | {"engine": name, "length": _length(row)}


def ratio(row: Results, other: Results) -> dict[str, float] | None:
    """Return samples per second of `row` over those of `other`, round by round; None if either is withheld."""
    if row["samples_per_s"] is None or other["samples_per_s"] is None:
        return None
    return spread([theirs / ours for ours, theirs in zip(row["seconds"], other["seconds"], strict=True)])


def _goals(results: Results, is_rival: Callable[[str], bool] = lambda _: True) -> Iterator[Results]:
    """Yield the goals that were measured: samples per second over the fastest rival in the same rounds."""
    best = {(row["batch"], row["row"]): row for row in best_rows(results)}
    for what, batch, name, others, wanted in GOALS:
        rivals = [best[batch, other] for other in others if (batch, other) in best and is_rival(other)]
        if (batch, name) in best and rivals:
            rival = max(rivals, key=_speed)
            over = ratio(best[batch, name], rival)
            reached = "not known" if over is None else "yes" if over["median"] >= wanted else "**no**"
            yield {"what": what, "rival": rival["row"], "over": over, "wanted": wanted, "reached": reached}


def _peers_line(results: Results) -> str:
    """Render the goals against vLLM in one sentence."""
    by_workload: dict[str, list[str]] = {}
    for goal in _goals(results, lambda other: other.startswith(VLLM)):
        if goal["over"] is not None:
            what, batch = goal["what"].split(", ")
            missed = "" if goal["reached"] == "yes" else f", below the goal of {goal['wanted']:g}"
            by_workload.setdefault(what, []).append(f"{goal['over']['median']:.2f} ({batch}{missed})")
    parts = (f"{what} {', '.join(ratios)}" for what, ratios in by_workload.items())
    return f"Speed over vLLM's fastest variant, by requests: {'; '.join(parts)}."


def _peers_setting(results: Results) -> str:
    """Describe the models, prompts and machine in one paragraph."""
    rows = results["rows"]
    requests = ", ".join(f"{count} at batch {b}" for b, count in {r["batch"]: r["num_requests"] for r in rows}.items())
    passes = ", ".join(f"{num} at batch {b}" for b, num in {r["batch"]: len(r["seconds"]) for r in rows}.items())
    versions = dict.fromkeys(tuple(sorted(packages.items())) for packages in results["versions"].values())
    libraries = "; ".join(", ".join(f"{name} {number}" for name, number in packages) for packages in versions)
    launches = "one launch" if results["launches"] == 1 else f"{results['launches']} launches"
    return (
        f"{inflated(results)}, γ = {results['gamma']}, at most {results['max_new_tokens']} new tokens. "
        f"Requests: {requests}. Medians of passes, the peers in turn, with the lowest and the highest: {passes}, in "
        f"{launches}. {results['machine']}. {libraries}."
    )


def _real_peers_line(results: Results) -> str:
    """Render this engine's fastest row over the fastest of the others, by batch size."""
    parts = []
    rows = [row for row in best_rows(results["peers"]) if row["samples_per_s"] is not None]
    for batch in sorted({row["batch"] for row in rows}):
        here = [row for row in rows if row["batch"] == batch]
        engine, other = (
            max(
                (row for row in here if row["row"].startswith(OWN) == is_own),
                key=lambda row: float(row["samples_per_s"]["median"]),
            )
            for is_own in (True, False)
        )
        over = ratio(engine, other)
        assert over is not None
        parts.append(f"{over['median']:.2f} at batch {batch} ({engine['row']} over {other['row']})")
    return f"Requests per second of this engine's fastest row over the fastest other one: {', '.join(parts)}."


FUNCTIONS: dict[str, Function] = {
    "engine_speeds": _speeds,
    "engine_setting": _engine_setting,
    "engine_steps": _steps,
    "engine_positions": _positions,
    "engine_claims": lambda results: goals_table(claims(results)),
    "peers": _peers,
    "peers_goals": _goals,
    "peers_line": _peers_line,
    "peers_setting": _peers_setting,
    "real_peers_line": _real_peers_line,
}
