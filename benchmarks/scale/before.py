"""Measures the parts of a job before and after the data plane: the same loads, one after the other in one run.

    git worktree add FOLDER 9688187e57                    # the last commit before it
    python -m benchmarks.scale.before --tree FOLDER       # writes results/scale_before.json; 40 minutes on two cores
    python -m benchmarks.scale.before --tree FOLDER --only writer    # one part; the others are kept

Both trees run `driver`, `writer` and `planner` of this folder, each case in a new process; the older one through
`benchmarks.scale.adapter`. Cases alternate between the trees, for `NUM_ROUNDS` rounds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness.markdown import Results, table
from benchmarks.harness.results import command_line, machine, progress, read_results, results_file, write_results
from benchmarks.scale import adapter, driver, planner, writer

RESULTS = results_file("scale_before")
ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("actors", "configs", "decoding", "files", "jobs", "models", "pipeline", "zoo")
NUM_ROUNDS = 2
CASE_LIMIT_S = 1800


@dataclass(frozen=True)
class Tree:
    """A folder from which cases import all packages; `options` are those of `benchmarks.scale.one_case`."""

    name: str
    folder: Path
    options: tuple[str, ...] = ()

    def run(self, part: str, arguments: Sequence[Any]) -> Any:
        """Run a case in a new process, and return its figures."""
        command = [sys.executable, "-m", "benchmarks.scale.one_case", *self.options, part, json.dumps(arguments)]
        done = subprocess.run(
            command,
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(self.folder)},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=CASE_LIMIT_S,
        )
        found = json.loads(done.stdout.splitlines()[-1])
        progress(self.name, part, arguments, found)
        return found

    def run_job(self, case: driver.Case) -> Results:
        found: Results = self.run("driver", astuple(case))
        return found


def commit_of(folder: Path, *paths: str) -> str:
    """Return the commit of a checkout whose packages are unchanged; with `paths`, the last commit that changed these.

    Raises:
        ValueError: the folder is no checkout, or a file of a package differs from the commit.
    """
    git = ("git", "-C", str(folder))
    found = subprocess.run([*git, "log", "-1", "--format=%H", "--", *paths], capture_output=True, text=True)
    if found.returncode:
        raise ValueError(f"{folder} is no git checkout: {found.stderr.strip()}")
    changed = subprocess.run(
        [*git, "status", "--porcelain", "--", *PACKAGES], capture_output=True, text=True, check=True
    )
    if changed.stdout:
        raise ValueError(f"{folder} has uncommitted changes: {changed.stdout.splitlines()[0].strip()}")
    return found.stdout.strip()


def link_packages(source: Path, folder: Path) -> None:
    """Fill a folder with links to the packages of a checkout, and to the benchmarks of this one."""
    for name in PACKAGES:
        (folder / name).symlink_to(source.resolve() / name)
    (folder / "benchmarks").symlink_to(ROOT / "benchmarks")


def measure_driver(trees: Sequence[Tree]) -> Iterator[Results]:
    for batch_rows in driver.NUM_ROWS:
        for tree in trees:
            found = driver.measure_cell(batch_rows, tree.run_job)
            yield {"case": f"{batch_rows} rows of a batch", "tree": tree.name, **found}


def measure_writer(trees: Sequence[Tree]) -> Iterator[Results]:
    for kind in writer.BLOCKS:
        for num_tasks in writer.NUM_TASKS:
            for tree in trees:
                if num_tasks == 1 or not tree.options:  # the older writer has one task
                    found = tree.run("writer", (kind, num_tasks))
                    yield {"case": f"{kind}, tasks: {num_tasks}", "tree": tree.name, **found}


def measure_ledger(trees: Sequence[Tree]) -> Iterator[Results]:
    for tree in trees:
        for found in tree.run("ledger", ()):
            yield {"case": f"{found['rows']} rows of a batch", "tree": tree.name, **found}


def measure_planner(trees: Sequence[Tree], cases: Sequence[planner.Case] = planner.CASES) -> Iterator[Results]:
    for number, case in enumerate(cases):
        with tempfile.TemporaryDirectory(prefix="planner-") as name:
            for tree in trees:
                folder = Path(name, tree.name if case.prepare is planner.write_output else "source")
                arguments = (number, case.num_files, case.rows_per_file, str(folder))
                if not folder.exists():
                    folder.mkdir()
                    tree.run("prepare", arguments)
                label = f"{case.name}: {case.num_rows:,} rows, {case.num_files:,} files"
                yield {**tree.run("planner", arguments), "case": label, "tree": tree.name}


PARTS: dict[str, Callable[[Sequence[Tree]], Iterator[Results]]] = {
    "driver": measure_driver,
    "writer": measure_writer,
    "ledger": measure_ledger,
    "planner": measure_planner,
}


def figures_of(part: str, trees: Sequence[Tree]) -> Iterator[Results]:
    """Measure one part of both trees for `NUM_ROUNDS` rounds; every second round begins with the other tree."""
    for number in range(NUM_ROUNDS):
        yield from ({"round": number, **one} for one in PARTS[part](trees[:: -1 if number % 2 else 1]))


def not_measured(planned: Sequence[Results]) -> list[dict[str, str]]:
    """Return what has no figure of the older code, and why; the largest case is estimated from a smaller one."""
    goal = planner.GOAL
    reasons = [
        {"case": "writer with 2 and 4 tasks", "reason": "the older writer has one task at a time"},
        {"case": "automatic rows of a batch", "reason": "a setting, 32 by default; 512 had to be set"},
        {"case": "inventory of new files only", "reason": "every inventory reads all files"},
    ]
    for one in planned:
        if one["tree"] == "before" and one["case"].startswith(goal.name):
            factor = goal.num_rows / one["num_rows"]
            minutes, gib = factor * one["wall_s"] / 60, goal.num_rows * one["rss_bytes_per_row"] / 2**30
            estimate = f"not run: {factor:g} times the measured rows, so about {minutes:.0f} minutes and {gib:.1f} GiB"
            label = f"{goal.name}: {goal.num_rows:,} rows, {goal.num_files:,} files"
            return [*reasons, {"case": label, "reason": estimate}]
    return reasons


Column = tuple[str, Callable[[Results], float], str]
"""Title, value of a case, and format of the value."""


def cpu_of(name: str) -> Callable[[Results], float]:
    return lambda one: float(one["cpu_us_per_row"][name])


def value(name: str, factor: float = 1.0) -> Callable[[Results], float]:
    return lambda one: factor * float(one[name])


COLUMNS: dict[str, tuple[Column, ...]] = {
    "driver": (
        ("driver CPU, µs per row", cpu_of("driver"), ".0f"),
        ("ms per batch", lambda one: cpu_of("driver")(one) * one["batch_rows"] / 1000, ".1f"),
        ("GCS, µs per row", cpu_of("gcs_server"), ".0f"),
        ("raylet, µs per row", cpu_of("raylet"), ".0f"),
        ("rows/s of the job", lambda one: one["num_rows"] / one["wall_s"], ",.0f"),
    ),
    "writer": (
        ("rows/s", value("rows_per_s"), ",.0f"),
        ("MB/s", value("mb_per_s"), ",.0f"),
        ("CPU of writing, µs per row", value("task_cpu_us_per_row"), ".1f"),
        ("driver CPU, µs per row", value("driver_cpu_us_per_row"), ".1f"),
    ),
    "ledger": (
        ("batches/s", value("batches_per_s"), ",.0f"),
        ("rows/s", lambda one: one["rows"] * one["batches_per_s"], ",.0f"),
    ),
    "planner": (
        ("wall, s", value("wall_s"), ".1f"),
        ("driver CPU, s", value("driver_cpu_s"), ".1f"),
        ("s per 10⁶ rows", lambda one: 1e6 * one["wall_s"] / one["num_rows"], ".2f"),
        ("driver peak, GB", value("peak_rss_bytes", 1e-9), ".2f"),
        ("driver bytes per row", value("rss_bytes_per_row"), ".0f"),
    ),
    "inventory": (
        ("inventory, s", value("inventory_s"), ".2f"),
        ("inventory with one new file, s", value("incremental_inventory_s"), ".2f"),
        ("files read again", value("num_files_read_again"), ".0f"),
    ),
}


def part_table(part: str, results: Results) -> str:
    """Render one row per case and tree; a cell has the values of all rounds."""
    groups: dict[tuple[str, str], list[Results]] = {}
    for one in sorted(results[part], key=lambda one: one["round"]):
        groups.setdefault((one["case"], one["tree"]), []).append(one)
    cases = list(dict.fromkeys(case for case, _ in groups))
    rows = [
        (
            case,
            tree,
            *(" · ".join(format(read(one), form) for one in groups[case, tree]) for _, read, form in COLUMNS[part]),
        )
        for case in cases
        for tree in ("before", "after")
        if (case, tree) in groups
    ]
    return table(["case", "", *(title for title, _, _ in COLUMNS[part])], rows)


def inventory_table(results: Results) -> str:
    return part_table("inventory", {"inventory": [one for one in results["planner"] if "inventory_s" in one]})


def commits(results: Results) -> str:
    return f"Before: commit `{results['before'][:10]}`. After: commit `{results['after'][:10]}`. {results['machine']}."


def left_out(results: Results) -> str:
    return "\n".join(f"- {one['case']}: {one['reason']}." for one in results["not_measured"])


TABLES: dict[str, Callable[[Results], str]] = {
    "scale_before_commits": commits,
    **{f"scale_before_{part}": partial(part_table, part) for part in PARTS},
    "scale_before_inventory": inventory_table,
    "scale_before_left_out": left_out,
}


def main(arguments: list[str] | None = None) -> int:
    parser = command_line("scale.before", __doc__)
    parser.add_argument("--tree", type=Path, required=True, help=f"a checkout of {adapter.COMMIT}")
    parser.add_argument("--only", choices=PARTS, action="append", help="run one part (may be repeated)")
    options = parser.parse_args(arguments)
    try:
        before, after = commit_of(options.tree), commit_of(ROOT, *PACKAGES)
    except ValueError as error:
        parser.error(str(error))
    if not before.startswith(adapter.COMMIT):
        parser.error(f"--tree: {options.tree} is at {before}; benchmarks.scale.adapter is written for {adapter.COMMIT}")
    found = read_results(RESULTS) if RESULTS.exists() else {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="before-")))
        link_packages(options.tree, folder)
        trees = (Tree("before", folder, ("--adapt",)), Tree("after", ROOT))
        for part in options.only or PARTS:
            found |= {"machine": machine(), "before": before, "after": after, part: []}
            for one in figures_of(part, trees):
                found[part].append(one)
                found["not_measured"] = not_measured(found.get("planner", ()))
                write_results(RESULTS, found)
            print(part_table(part, found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
