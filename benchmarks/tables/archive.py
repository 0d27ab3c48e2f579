"""Tables of benchmarks that were deleted after they had answered their question; their results stay committed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby

from benchmarks.harness.markdown import LENGTH, Results, Table, goals_table, inflated, percent
from benchmarks.harness.verdict import relative_speeds, spread
from benchmarks.tables.real import SPEED

Render = Callable[[Results], str]


@dataclass(frozen=True)
class Archived:
    """A deleted benchmark: the commit that has its code, its command, and the tables of its results."""

    commit: str
    command: str
    tables: Mapping[str, Render]

    def renders(self) -> dict[str, Render]:
        """Return the tables by name, each with commit and command below it."""
        return {name: partial(self._render, make) for name, make in self.tables.items()}

    def _render(self, make: Render, results: Results) -> str:
        return f"{make(results)}\n\nMeasured at commit `{self.commit}` by `{self.command}`, which was deleted since."


def _auto_goals(results: Results) -> str:
    measured, planned, best, within, plain, near = (
        results[f"num_{name}"]
        for name in ("workloads", "planned", "best", "within", "won_by_plain", "gaps_of_5_to_15_percent")
    )
    worst = max(cell["chosen_slowdown"] - 1 for cell in results["workloads"])
    kept = f"the best in {best}, within the interval in {within}, only within the trial's in 0, another in 0"
    choice = "`auto` keeps the method that is best alone, or one within the interval"
    slower = "`auto` keeps none that is more than 5 % slower than the best"
    goals = (
        ("the whole grid was measured", measured == planned, f"{measured} of {planned} workloads"),
        (choice, best + within == measured, kept),
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
            kept = "kept" if any(gain["median"] >= 1.05 for gain in gains.values()) else "deleted"
            yield {"piece": piece + note, **gains, "verdict": total, "result": kept}


def _jobs(results: Results) -> Iterator[Results]:
    """Yield a row per method and setting over the repeats, whose speed is withheld if a text differs."""
    for _, group in groupby(results["rows"], lambda row: (row["method"], row["compile"])):
        rows = list(group)
        whole = all(row["num_equal"] == row["num_rows"] == results["num_scenes"] for row in rows)
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
                **{f"{name}_per_s": spread(speeds) if whole else None for name, speeds in over_time.items()},
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
        for place in ("tasks", "actor"):
            yield {"case": case, "place": place, "limits": limits, "pace": 1000 / runs[place]["row_ms"], **runs[place]}


def _steps(results: Results) -> Iterator[Results]:
    """Yield a row per contender with expected and drawn tokens per step; 1 + α + … + α^γ are expected."""
    plain = {(row["num_columns"], row["batch"]): row for row in results["synthetic_rows"] if row["gamma"] == 0}
    for row in results["synthetic_rows"]:
        how: Results = {"how": "plain", "alpha": "", "tokens": "1"}
        if row["gamma"]:
            expected = sum(row["rate"] ** place for place in range(row["gamma"] + 1))
            drawn = sum(row["synthetic_tokens"]) / (row["batch"] * sum(row["num_steps"]))
            how = {"how": row["gamma"], "alpha": f"{row['rate']:g}", "tokens": f"{expected:.2f}, {drawn:.2f}"}
        step_ms = [1000 * spent / num for spent, num in zip(row["seconds"], row["num_steps"], strict=True)]
        over = relative_speeds(row, plain[row["num_columns"], row["batch"]], "synthetic_tokens")
        yield row | how | {"step_ms": spread(step_ms), "over": over}


def _before(
    part: str, titles: str, cells: str, derive: Callable[[Results], Results] = lambda _: {}, field: str = "case"
) -> Render:
    """Return a table of a part of the old and the new code: one row per case and tree, one value per round."""
    one = Table(titles, cells, derive=derive)

    def rows(results: Results) -> Iterator[Results]:
        found = [row for row in results[part] if field in row]
        cases = list(dict.fromkeys(row["case"] for row in sorted(found, key=lambda row: row["round"])))
        place = {"before": 0, "after": 1}
        found.sort(key=lambda row: (cases.index(row["case"]), place[row["tree"]], row["round"]))
        for (case, tree), group in groupby(found, lambda row: (row["case"], row["tree"])):
            values = zip(*(one.line((), row) for row in group), strict=True)
            yield {"case": case, "tree": tree, "values": " | ".join(map(" · ".join, values))}

    return replace(
        one, titles=f"case |  | {titles}", cells="{case} | {tree} | {values}", rows=rows, derive=lambda _: {}
    )


_HISTORY = " | ".join(
    f"{{blocks[{n}][mean_acceptance_length]:.2f}} ± {{blocks[{n}][acceptance_length_se]:.2f}}" for n in range(4)
)
ARCHIVED: dict[str, Archived] = {
    "auto": Archived(
        "e1495224",
        "python -m benchmarks.auto",
        {
            "auto_claims": _auto_goals,
            "auto": Table(
                "batch | tokens | drafter | c asked | c measured | acceptance length | best alone | ahead by "
                "| `auto` keeps | which is | slower by | trial",
                "{batch} | {length} | {drafter} | {ratio} | {measured_ratio:.2f} | {longest:.2f} | {best} | {gap:.0%} "
                "| {chosen} | {verdict} | {slower:.0%} | {trial[num_rows]} rows, {trial[num_rounds]} rounds",
                "workloads.*",
                lambda row: {"longest": max(row["acceptance_lengths"].values()), "slower": row["chosen_slowdown"] - 1},
            ),
        },
    ),
    "backend_pieces": Archived(
        "ebd5bcb9",
        "python -m benchmarks.backend_pieces",
        {
            "backend_pieces": Table(
                "piece | plain, batch 1 | chain, batch 1 | equal outputs | result",
                "{piece} | {plain:.2f} | {chain:.2f} | {verdict} | {result}",
                _pieces,
            )
        },
    ),
    "exported": Archived(
        "5342f9f0",
        "python -m benchmarks.exported; python -m benchmarks.exported --real",
        {
            "exported_heads": Table(
                "target | engine | acceptance length | steps | outputs equal to the target's",
                "{target} | {engine} | {acceptance_length:.3f} | {num_steps} | {num_equal} of {num_prompts}",
                lambda results: (
                    {"target": target, **row}
                    for target, found in (("shipped text target", results), ("SmolLM2-135M-Instruct", results["real"]))
                    for row in found["rows"]
                ),
            )
        },
    ),
    "learning": Archived(
        "59dba80b",
        "python -m benchmarks.learning; python -m benchmarks.learning --speed",
        {
            "learning_training": Table(
                "rows learned | epochs begun | training | top-1 | top-3 | acceptance length, tree of the training job",
                "{num_taught_rows:,} | {num_epochs} | {minutes:.0f} min | {top1_accuracy:.0%} | {top3_accuracy:.0%} "
                "| {mean_acceptance_length:.2f}",
                lambda results: reversed(results["training"]),
                lambda row: {"minutes": row["seconds"] / 60},
            ),
            "learning": replace(SPEED, rows="speed.*"),
        },
    ),
    "pipeline": Archived(
        "82076a53",
        "python -m benchmarks.pipeline --rows 512",
        {
            "pipeline": Table(
                "method | compiled | rows/s | tokens/s | engine at work | actor without input | acceptance length "
                "| texts equal",
                "{method} | {compile} | {num_rows_per_s:.1f} | {num_tokens_per_s:.1f} | {engine:.0%} "
                "| {actors_waited_share:.0%} | {acceptance_length:.2f} | {num_equal} of {num_texts}",
                _jobs,
            )
        },
    ),
    "processors": Archived(
        "02f83037",
        "python -m benchmarks.processors",
        {
            "processor_costs": Table(
                "image | decode | process | pack | unpack (actor) | cores for 15 images/s | loading | pixels, MB "
                "| packed, MB | floats, MB",
                "{case} | {decode_ms:.1f} | {process_ms:.1f} | {pack_ms:.1f} | {unpack_ms:.1f} | {cores:.2f} "
                "| {loading:.1%} | {pixel:.2f} | {packed:.2f} | {float:.2f}",
                _costs,
            ),
            "processor_waits": Table(
                "image | processor | rows | limit before and after, rows/s | engine's pace, rows/s | rows/s "
                "| rows/s later | engine waited | engine waited later",
                "{case} | {place} | {num_rows:,} | {limits} | {pace:.1f} | {rows_per_s:.1f} | {later_rows_per_s:.1f} "
                "| {actors_waited_share:.1%} | {later_actors_waited_share:.1%}",
                _waits,
            ),
        },
    ),
    "row_budgets": Archived(
        "02f83037",
        "python -m benchmarks.row_budgets --batches 8 32 --rounds 5; "
        "python -m benchmarks.row_budgets --batches 128 --rounds 3",
        {
            "row_budgets": Table(
                "batch | drafts | rounds | acceptance length | verified drafts per row and step | tokens/s "
                "| over plain | over one depth | rows equal to plain",
                f"{{batch}} | {{controller}} | {{rounds}} | {LENGTH} | {{drafts_per_row_step:.2f}} "
                "| {tokens_per_s:.0f} | {over_plain:.2f} | {over_one_depth:.2f} | {num_equal} of {num_prompts}",
            )
        },
    ),
    "scale_before": Archived(
        "f90da496",
        "git worktree add FOLDER 9688187e57; python -m benchmarks.scale.before --tree FOLDER",
        {
            "scale_before_driver": _before(
                "driver",
                "driver CPU, µs per row | ms per batch | GCS, µs per row | raylet, µs per row | rows/s of the job",
                "{cpu_us_per_row[driver]:.0f} | {batch_ms:.1f} | {cpu_us_per_row[gcs_server]:.0f} "
                "| {cpu_us_per_row[raylet]:.0f} | {rows_per_s:,.0f}",
                lambda row: {
                    "batch_ms": row["cpu_us_per_row"]["driver"] * row["batch_rows"] / 1000,
                    "rows_per_s": row["num_rows"] / row["wall_s"],
                },
            ),
            "scale_before_writer": _before(
                "writer",
                "rows/s | MB/s | CPU of writing, µs per row | driver CPU, µs per row",
                "{rows_per_s:,.0f} | {mb_per_s:,.0f} | {task_cpu_us_per_row:.1f} | {driver_cpu_us_per_row:.1f}",
            ),
            "scale_before_ledger": _before(
                "ledger",
                "batches/s | rows/s",
                "{batches_per_s:,.0f} | {rows_per_s:,.0f}",
                lambda row: {"rows_per_s": row["rows"] * row["batches_per_s"]},
            ),
            "scale_before_planner": _before(
                "planner",
                "wall, s | driver CPU, s | s per 10⁶ rows | driver peak, GB | driver bytes per row",
                "{wall_s:.1f} | {driver_cpu_s:.1f} | {per_million:.2f} | {peak_gb:.2f} | {rss_bytes_per_row:.0f}",
                lambda row: {
                    "per_million": 1e6 * row["wall_s"] / row["num_rows"],
                    "peak_gb": row["peak_rss_bytes"] / 1e9,
                },
            ),
            "scale_before_inventory": _before(
                "planner",
                "inventory, s | inventory with one new file, s | files read again",
                "{inventory_s:.2f} | {incremental_inventory_s:.2f} | {num_files_read_again:.0f}",
                field="inventory_s",
            ),
            "scale_before_left_out": lambda results: "\n".join(
                "- {case}: {reason}.".format_map(one) for one in results["not_measured"]
            ),
            "scale_before_commits": lambda results: (
                f"Before: commit `{results['before'][:10]}`. After: commit `{results['after'][:10]}`. "
                f"{results['machine']}."
            ),
        },
    ),
    "scheduling": Archived(
        "73ceb378",
        "python -m benchmarks.scheduling",
        {
            "scheduling": Table(
                "actors | rows per second | share of ideal | sleeps that took too long | without a row",
                "{0} | {rows_per_s:.1f} | {share_of_ideal:.1%} | {late_share:.1%} | {without_row_share:.1%}",
                "cells.*",
            )
        },
    ),
    "structured": Archived(
        "6cbdee17",
        "python -m benchmarks.structured --checkpoint out/real/target --label SmolLM2-135M",
        {
            "structured": Table(
                "pair | schema | method | acceptance length | equal to plain | ended texts that are valid",
                f"{{0}} | {{1}} | {{2}} | {LENGTH} | {{equal_share:.0%}} | {{num_valid}} of {{num_ended}}",
                "pairs.*.cells.*.*",
            ),
            "structured_masks": Table(
                "pair | vocabulary | 32 rows | 32 rows, chains of 5",
                "{0} | {vocab_size:,} | {mask_ms[plain]:.2f} ms | {mask_ms[chain]:.2f} ms",
                "pairs.*",
            ),
        },
    ),
    "suffix_history": Archived(
        "143b01a5",
        "python -m benchmarks.suffix_history",
        {
            "suffix_history": Table(
                "method | rows 1–48 | rows 49–96 | rows 97–144 | rows 145–192 | equal to plain",
                f"{{0}} | {_HISTORY} | {{equal_share:.0%}}",
                "methods.*",
            )
        },
    ),
    "synthetic": Archived(
        "6b1e62f1",
        "python -m benchmarks.synthetic",
        {
            "synthetic_setting": lambda results: (
                f"Synthetic: {results['synthetic']}. {inflated(results)}; seeds of the draws 0, 1. Medians of 2 "
                f"rounds, the contenders in turn, with the lowest and the highest. {results['machine']}. torch "
                f"{results['torch']}."
            ),
            "synthetic": Table(
                "visual columns (synthetic) | batch | γ | drafter reads | forced α | tokens per step: expected, drawn "
                "| a step, synthetic | tokens/s, synthetic | over plain, synthetic",
                "{num_columns:,} | {batch} | {how} | {drafter_reads} | {alpha} | {tokens} | {step_ms:.1f} ms "
                "| {synthetic_tokens_per_s:.1f} | {over:.2f}",
                _steps,
            ),
        },
    ),
}
