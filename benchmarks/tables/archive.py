"""Rows of archived tables that are computed from several results."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import groupby

from benchmarks.harness.markdown import Results, goals_table, percent
from benchmarks.harness.verdict import relative_speeds, spread
from benchmarks.tables.specs import Function


def _auto_goals(results: Results) -> str:
    measured, planned, best, within, plain, near = (
        results[f"num_{name}"]
        for name in ("workloads", "planned", "best", "within", "won_by_plain", "gaps_of_5_to_15_percent")
    )
    worst = max(cell["chosen_slowdown"] - 1 for cell in results["workloads"])
    summary = f"the best in {best}, within the interval in {within}, only within the trial's in 0, another in 0"
    choice = "`auto` keeps the method that is best alone, or one within the interval"
    slower = "`auto` keeps none that is more than 5 % slower than the best"
    goals = (
        ("the whole grid was measured", measured == planned, f"{measured} of {planned} workloads"),
        (choice, best + within == measured, summary),
        (slower, worst <= 0.05, f"at most {percent(worst, 1)} slower"),
        ("plain decoding is best in at least 3", plain >= 3, str(plain)),
        ("the best is 5 to 15 % ahead in at least 3", near >= 3, str(near)),
    )
    return goals_table(goals)


def _pieces(results: Results) -> Iterator[Results]:
    """Yield the gain of each piece by cell, of deleted pieces too, which were measured in one process."""
    measured = [(cell["batch"], cell["mode"]) for cell in results["cells"]]
    deleted = [cell for cell in results["deleted"]["cells"] if (cell["batch"], cell["mode"]) in measured]
    for cells, note in ((results["cells"], ""), (deleted, " (in one process)")):
        for piece in (name for name in cells[0]["pieces"] if name != "complete"):
            rows = {cell["mode"]: cell["pieces"][piece] for cell in cells}
            gains = {mode: spread(row["complete_over_without"]) for mode, row in rows.items()}
            total = {
                name: sum(row["verdict"][name] for row in rows.values()) for name in ("num_sequences", "num_equal")
            }
            outcome = "kept" if any(gain["median"] >= 1.05 for gain in gains.values()) else "deleted"
            yield {"piece": piece + note, **gains, "verdict": total, "result": outcome}


def _jobs(results: Results) -> Iterator[Results]:
    """Yield a row per method and setting over the repeats, whose speed is withheld if a text differs."""
    for _, group in groupby(results["rows"], lambda row: (row["method"], row["compile"])):
        rows = list(group)
        is_complete = all(row["num_equal"] == row["num_rows"] == results["num_scenes"] for row in rows)
        over_time = {name: [row[name] / row["wall_s"] for row in rows] for name in ("num_rows", "num_tokens")}
        medians = {
            name: statistics.median(row[name] for row in rows) for name in ("actors_waited_share", "acceptance_length")
        }
        yield (
            rows[0]
            | medians
            | {
                "engine": statistics.median(row["engine_s"] / row["wall_s"] for row in rows),
                "num_equal": sum(row["num_equal"] for row in rows),
                "num_texts": results["num_scenes"] * len(rows),
                **{f"{name}_per_s": spread(speeds) if is_complete else None for name, speeds in over_time.items()},
            }
        )


def _costs(results: Results) -> Iterator[Results]:
    """Yield the cost of each image size, with the cores for 15 images per second and the share of loading."""
    loading = results["costs"]["loading"]
    for case, cost in results["costs"]["cases"].items():
        task_ms = sum(cost[f"{step}_ms"] for step in ("decode", "process", "pack"))
        calls_s = loading["max_calls"] * loading["batch_rows"] * task_ms / 1000
        share = loading["load_cpu_s"] / (loading["load_cpu_s"] + calls_s)
        sizes = {name: cost[f"{name}_bytes"] / 1e6 for name in ("pixel", "packed", "float")}
        yield {"case": case, "cores": 15 * task_ms / 1000, "loading": share, **cost, **sizes}


def _waits(results: Results) -> Iterator[Results]:
    for case, runs in results["waits"]["cases"].items():
        limits = " and ".join(f"{runs[name]['later_rows_per_s']:.1f}" for name in ("limit, tasks", "limit after"))
        for stage in ("tasks", "actor"):
            yield {"case": case, "place": stage, "limits": limits, "pace": 1000 / runs[stage]["row_ms"], **runs[stage]}


def _steps(results: Results) -> Iterator[Results]:
    """Yield a row per contender with expected and drawn tokens per step; 1 + α + … + α^γ are expected."""
    plain = {(row["num_columns"], row["batch"]): row for row in results["synthetic_rows"] if row["gamma"] == 0}
    for row in results["synthetic_rows"]:
        how: Results = {"how": "plain", "alpha": "", "tokens": "1"}
        if row["gamma"]:
            expected = sum(row["rate"] ** depth for depth in range(row["gamma"] + 1))
            drawn = sum(row["synthetic_tokens"]) / (row["batch"] * sum(row["num_steps"]))
            how = {"how": row["gamma"], "alpha": f"{row['rate']:g}", "tokens": f"{expected:.2f}, {drawn:.2f}"}
        step_ms = [1000 * spent / num for spent, num in zip(row["seconds"], row["num_steps"], strict=True)]
        over = relative_speeds(row, plain[row["num_columns"], row["batch"]], "synthetic_tokens")
        yield row | how | {"step_ms": spread(step_ms), "over": over}


def _exported(results: Results) -> Iterator[Results]:
    for target, measured in (("shipped text target", results), ("SmolLM2-135M-Instruct", results["real"])):
        yield from ({"target": target, **row} for row in measured["rows"])


def _workloads(results: Results) -> Iterator[Results]:
    for row in results["workloads"]:
        yield row | {"longest": max(row["acceptance_lengths"].values()), "slower": row["chosen_slowdown"] - 1}


def _driver(row: Results) -> Results:
    spent = {name: row["cpu_us_per_row"][process] for name, process in _PROCESSES.items()}
    return spent | {
        "batch_ms": spent["driver_us"] * row["batch_rows"] / 1000,
        "rows_per_s": row["num_rows"] / row["wall_s"],
    }


_PROCESSES = {"driver_us": "driver", "gcs_us": "gcs_server", "raylet_us": "raylet"}


def _before(
    results: Results, part: str, derive: Callable[[Results], Results] = lambda _: {}, field: str = "case"
) -> Iterator[Results]:
    """Yield a row per case and code, the old before the new, whose figures are lists with a value per round."""
    rows = [row | derive(row) for row in results[part] if field in row]
    cases = list(dict.fromkeys(row["case"] for row in sorted(rows, key=lambda row: row["round"])))
    trees = ("before", "after")
    rows.sort(key=lambda row: (cases.index(row["case"]), trees.index(row["tree"]), row["round"]))
    for (case, tree), group in groupby(rows, lambda row: (row["case"], row["tree"])):
        rounds = list(group)
        yield {name: [row[name] for row in rounds] for name in rounds[0]} | {"case": case, "tree": tree}


def _left_out(results: Results) -> str:
    return "\n".join("- {case}: {reason}.".format_map(entry) for entry in results["not_measured"])


def _learned(results: Results) -> Iterable[Results]:
    return reversed(results["training"])


FUNCTIONS: dict[str, Function] = {
    "auto_claims": _auto_goals,
    "workloads": _workloads,
    "pieces": _pieces,
    "exported": _exported,
    "learned": _learned,
    "jobs": _jobs,
    "processor_costs": _costs,
    "processor_waits": _waits,
    "steps": _steps,
    "driver_before": partial(_before, part="driver", derive=_driver),
    "writer_before": partial(_before, part="writer"),
    "ledger_before": partial(
        _before, part="ledger", derive=lambda row: {"rows_per_s": row["rows"] * row["batches_per_s"]}
    ),
    "planner_before": partial(
        _before, part="planner", derive=lambda row: {"per_million": 1e6 * row["wall_s"] / row["num_rows"]}
    ),
    "inventory_before": partial(_before, part="planner", field="inventory_s"),
    "left_out_before": _left_out,
}
