"""The comparison with the code before the data plane: both trees are used, alternate, and appear in the tables."""

from __future__ import annotations

import io
import subprocess
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.markdown import Results
from benchmarks.scale import adapter, before, planner
from benchmarks.scale.before import ROOT, Tree

SMALL = [replace(planner.CASES[0], num_files=50)]


def test_a_case_of_this_tree_runs_in_a_new_process() -> None:
    [found] = before.measure_planner([Tree("after", ROOT)], SMALL)
    assert (found["tree"], found["case"]) == ("after", "listed images: 50 rows, 50 files")
    assert found["num_rows"] == 50
    assert found["driver_cpu_s"] > 0


def test_packages_are_those_of_the_tree_and_not_the_installed_ones(tmp_path: Path) -> None:
    source, links = tmp_path / "source", tmp_path / "links"
    for folder in (source, links):
        folder.mkdir()
    for name in before.PACKAGES:
        (source / name).symlink_to(ROOT / name)
    (source / "pipeline").unlink()
    (source / "pipeline").mkdir()
    (source / "pipeline/__init__.py").write_text("raise SystemExit(7)")
    before.link_packages(source, links)
    with pytest.raises(subprocess.CalledProcessError) as failed:
        Tree("before", links).run("planner", (0, 50, 1, str(tmp_path)))
    assert failed.value.returncode == 7


def test_the_older_code_runs_the_cases_through_the_adapter(tmp_path: Path) -> None:
    archive = subprocess.run(["git", "-C", str(ROOT), "archive", adapter.COMMIT, *before.PACKAGES], capture_output=True)
    if archive.returncode:
        pytest.skip(f"the history of this checkout does not contain {adapter.COMMIT}")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as packages:
        packages.extractall(tmp_path / "tree", filter="data")
    (tmp_path / "links").mkdir()
    before.link_packages(tmp_path / "tree", tmp_path / "links")
    tree = Tree("before", tmp_path / "links", ("--adapt",))
    cases = [replace(case, num_files=4, rows_per_file=min(case.rows_per_file, 50)) for case in planner.CASES]
    found = list(before.measure_planner([tree], cases))
    assert [one["num_rows"] for one in found] == [case.num_rows for case in cases]
    assert found[-1]["num_files_read_again"] == 4  # the older inventory has no increments
    job = tree.run("driver", (1, 100, 10_000.0, 32))
    assert (job["batch_rows"], job["num_files"]) == (32, 1)


def test_rounds_alternate_between_the_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    def part(trees: Sequence[Tree]) -> Iterator[Results]:
        yield from ({"tree": tree.name} for tree in trees)

    monkeypatch.setitem(before.PARTS, "ledger", part)
    trees = (Tree("before", ROOT), Tree("after", ROOT))
    found = list(before.figures_of("ledger", trees))
    assert [(one["round"], one["tree"]) for one in found] == [(0, "before"), (0, "after"), (1, "after"), (1, "before")]


def cell(number: int, tree: str, case: str, rate: float) -> dict[str, Any]:
    return {"round": number, "tree": tree, "case": case, "rows": 32, "batches_per_s": rate}


def test_a_table_has_a_row_per_tree_with_the_values_of_all_rounds() -> None:
    cells = [
        cell(1, "after", "a", 2.0),
        cell(0, "after", "a", 1.0),
        cell(0, "before", "a", 3.0),
        cell(0, "after", "b", 4),
    ]
    lines = before.part_table("ledger", {"ledger": cells}).splitlines()
    assert lines[2:] == ["| a | before | 3 | 96 |", "| a | after | 1 · 2 | 32 · 64 |", "| b | after | 4 | 128 |"]


def test_the_reason_for_the_case_that_is_not_run_is_in_proportion_to_the_measured_one() -> None:
    planned = [
        {
            "tree": tree,
            "case": f"{planner.GOAL.name}: rows",
            "num_rows": 10**7,
            "wall_s": wall_s,
            "rss_bytes_per_row": 32,
        }
        for tree, wall_s in (("before", 120.0), ("after", 6.0))
    ]
    reason = before.not_measured(planned)[-1]["reason"]
    assert reason == "not run: 10 times the measured rows, so about 20 minutes and 3.0 GiB"


def test_another_commit_or_changed_packages_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e"]
    with pytest.raises(SystemExit) as ended:
        before.main(["--tree", str(tmp_path)])
    assert ended.value.code == 2
    assert "is no git checkout" in capsys.readouterr().err
    (tmp_path / "pipeline").mkdir()
    (tmp_path / "pipeline/__init__.py").touch()
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *command], check=True)
    assert len(before.commit_of(tmp_path)) == 40
    with pytest.raises(SystemExit) as ended:
        before.main(["--tree", str(tmp_path)])
    assert ended.value.code == 2
    assert f"written for {adapter.COMMIT}" in capsys.readouterr().err
    (tmp_path / "pipeline/__init__.py").write_text("changed = 1")
    with pytest.raises(ValueError, match=r"uncommitted changes: M pipeline/__init__\.py"):
        before.commit_of(tmp_path)
