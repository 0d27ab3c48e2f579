"""The tables of `benchmarks.auto`: what `method.auto` kept beside what was measured, and what was to be shown."""

from __future__ import annotations

from typing import Any

BEST, WITHIN_INTERVAL, WITHIN_TRIAL, ANOTHER = (
    "the best",
    "within the interval",
    "within the trial's interval",
    "another",
)
"""What a trial's choice may turn out to be."""
GAPS = (0.05, 0.15)
"""How far ahead the best is where methods are near each other."""
MIN_WON_BY_PLAIN, MIN_NEAR = 3, 3
MAX_SLOWER = 0.05
"""An interval says little on a machine that changes much; what is kept may be slower than the best by this share."""

COLUMNS = (
    "batch",
    "tokens",
    "drafter",
    "c asked",
    "c measured",
    "acceptance length",
    "best alone",
    "ahead by",
    "`auto` keeps",
    "which is",
    "slower by",
    "trial",
)


def row_of(cell: dict[str, Any]) -> str:
    """One workload as a row of the table."""
    trial = cell["trial"]
    cells = (
        *(str(cell[name]) for name in ("batch", "length", "drafter", "ratio")),
        f"{cell['measured_ratio']:.2f}",
        f"{max(cell['acceptance_lengths'].values()):.2f}",
        cell["best"],
        f"{100 * cell['gap']:.0f} %",
        cell["chosen"],
        cell["verdict"],
        f"{100 * (cell['chosen_slowdown'] - 1):.0f} %",
        f"{trial['num_rows']} rows, {trial['num_rounds']} rounds",
    )
    return f"| {' | '.join(cells)} |"


def auto_table(results: dict[str, Any]) -> str:
    """All workloads."""
    return "\n".join([f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS), *map(row_of, results["workloads"])])


def claims(results: dict[str, Any]) -> list[tuple[str, bool, str]]:
    """What was to be shown, whether it holds, and the figures."""
    measured, planned = results["num_workloads"], results["num_planned"]
    best, within, trial = (results[name] for name in ("num_best", "num_within", "num_within_trial"))
    worst = max((cell["chosen_slowdown"] - 1 for cell in results["workloads"]), default=0.0)
    kept = (
        f"the best in {best}, within the interval in {within}, only within the trial's in {trial}, another in "
        f"{measured - best - within - trial}"
    )
    near = results["num_gaps_of_5_to_15_percent"]
    plain = results["num_won_by_plain"]
    return [
        ("the whole grid was measured", measured == planned, f"{measured} of {planned} workloads"),
        (
            "`auto` keeps the method that is best alone, or one within the interval",
            measured > 0 and best + within == measured,
            kept,
        ),
        (
            f"`auto` keeps none that is more than {100 * MAX_SLOWER:.0f} % slower than the best",
            measured > 0 and worst <= MAX_SLOWER,
            f"at most {100 * worst:.1f} % slower",
        ),
        (f"plain decoding is best in at least {MIN_WON_BY_PLAIN}", plain >= MIN_WON_BY_PLAIN, str(plain)),
        (f"the best is 5 to 15 % ahead in at least {MIN_NEAR}", near >= MIN_NEAR, str(near)),
    ]


def auto_claims_table(results: dict[str, Any]) -> str:
    """The claims, each reached or not."""
    lines = ["| what was to be shown | figures | reached |", "|---|---|---|"]
    lines += [f"| {told} | {numbers} | {'yes' if holds else '**no**'} |" for told, holds, numbers in claims(results)]
    return "\n".join(lines)


TABLES = {"auto": auto_table, "auto_claims": auto_claims_table}
