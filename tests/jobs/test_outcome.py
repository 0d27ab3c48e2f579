"""Exit statuses of finished jobs: a job whose rows failed is no success, also when it is started again."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from configs.pool import JobSectionConfig
from configs.schema import CaptionJobConfig
from jobs.caption import results
from jobs.terminal import exit_status
from jobs.terminal.command import Command
from jobs.terminal.exit_status import DONE, NO_RESULT, TOO_MANY_ERRORS
from pipeline.reports.summary import Summary, count
from pipeline.run.plan import Plan
from tests.pipeline import attempts

Fails = Callable[[str], bool]


def command(fails: Fails) -> Command[Any, Any]:
    """A job whose graph is a loop in this process; `fails` names the rows with errors of the engine."""

    def run(plan: Plan) -> Summary:
        plan, begun = attempts.start(plan)
        attempts.save(plan, begun, attempts.make_rows(plan, begun.publisher.attempt, fails))
        attempts.end(plan, begun)
        done = count(plan.output, plan.empty_summary(1.0))
        attempts.write_summary(plan, done, begun.publisher)
        return done

    return Command(
        name="caption",
        verb="captioning",
        doc="",
        example="",
        model=CaptionJobConfig,
        make_plan=lambda config, limit, _, resume, shard, __: attempts.plan_of(config, resume, limit, shard=shard),
        describe=lambda _: [],
        run=run,
        build=results,
    )


def job_file(folder: Path, num_rows: int, **job: Any) -> Path:
    source = folder / "in/a.txt"
    source.parent.mkdir(exist_ok=True)
    source.write_text("".join(f"line {number}\n" for number in range(num_rows)))
    config = attempts.job({"kind": "text", "path": str(source.parent)}, folder / "out")
    data = config.resolved()
    data["job"] = {"progress": False, **job}
    (folder / "job.yaml").write_text(yaml.safe_dump(data))
    return folder / "job.yaml"


def all_but(num_good: int) -> Fails:
    """Failures of all rows but the first ones."""
    return lambda sample_id: int(sample_id.rpartition("#")[2]) >= num_good


def summary_of(folder: Path) -> dict[str, Any]:
    totals: dict[str, Any] = json.loads((folder / "out/_job/summary.json").read_text())
    return totals


@pytest.mark.parametrize(
    ("num_rows", "num_good", "job", "status"),
    [
        (1, 0, {}, NO_RESULT),
        (3, 0, {}, NO_RESULT),
        (3, 1, {}, DONE),
        (25, 0, {"max_error_share": None}, NO_RESULT),
        (25, 12, {}, TOO_MANY_ERRORS),
        (25, 13, {}, DONE),
        (25, 1, {"max_error_share": None}, DONE),
        (25, 24, {"max_error_share": 0.0}, TOO_MANY_ERRORS),
        (19, 1, {"max_error_share": 0.0}, DONE),
    ],
)
def test_the_status_of_a_job_is_that_of_its_rows_also_if_nothing_is_missing(
    num_rows: int, num_good: int, job: dict[str, Any], status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--config", str(job_file(tmp_path, num_rows, **job))]
    for message in (f"rows          {num_rows}", "nothing is missing in"):
        assert command(all_but(num_good)).main(arguments) == status
        output = capsys.readouterr()
        assert message.split()[0] in output.out
        failures = [line for line in output.err.splitlines() if line.startswith("the job failed: ")]
        assert len(failures) == (status != DONE)
        assert all(f"engine_died ({num_rows - num_good})" in line and "about engine_died" in line for line in failures)
    verdict = summary_of(tmp_path)["verdict"]
    assert verdict["outcome"] == {DONE: "done", NO_RESULT: "no_result", TOO_MANY_ERRORS: "too_many_errors"}[status]
    page = (tmp_path / "out/_job/report.html").read_text()
    assert ('<span class="badge bad">failed</span>' in page) == (status != DONE)
    assert ('<span class="badge ok">done</span>' in page) == (status == DONE)
    assert ("most often with <bdi>" in page or "most often with engine_died" in page) == (status != DONE)


def test_rows_that_succeed_when_they_are_retried_make_the_job_a_success(tmp_path: Path) -> None:
    arguments = ["--config", str(job_file(tmp_path, 24))]
    assert command(all_but(0)).main(arguments) == NO_RESULT
    assert command(all_but(8)).main([*arguments, "--retry-errors"]) == TOO_MANY_ERRORS
    assert command(all_but(24)).main([*arguments, "--retry-errors"]) == DONE
    assert command(all_but(0)).main(arguments) == DONE


def test_a_limit_and_a_shard_are_judged_by_the_rows_that_they_have(tmp_path: Path) -> None:
    arguments = ["--config", str(job_file(tmp_path, 40))]
    assert command(all_but(4)).main([*arguments, "--limit", "4"]) == DONE
    assert command(all_but(4)).main(arguments) == TOO_MANY_ERRORS
    sharded = [*arguments, f"sink.path={tmp_path}/shards"]
    fails: Fails = lambda sample_id: int(sample_id.rpartition("#")[2]) < 20  # noqa: E731
    statuses = [command(fails).main([*sharded, "--shard", f"{number}/2"]) for number in (0, 1)]
    assert statuses == [NO_RESULT, DONE]


def test_a_source_that_turns_out_to_be_empty_is_no_failure(tmp_path: Path) -> None:
    """The number of rows of a compressed file is known when it is read."""
    (tmp_path / "in").mkdir()
    tarfile.open(tmp_path / "in/a.tar.gz", "w:gz").close()
    config = attempts.job({"kind": "webdataset", "path": str(tmp_path / "in")}, tmp_path / "out")
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(config.resolved()))
    assert command(all_but(0)).main(["--config", str(tmp_path / "job.yaml")]) == DONE
    assert summary_of(tmp_path)["num_samples"] == 0


def test_an_output_of_a_job_without_a_limit_resumes_under_the_new_default(tmp_path: Path) -> None:
    assert JobSectionConfig().max_error_share == 0.5
    by_default = ["--config", str(job_file(tmp_path, 30))]
    arguments = [*by_default, "job.max_error_share=null"]
    assert command(all_but(5)).main(arguments) == DONE
    totals = summary_of(tmp_path)
    del totals["verdict"], totals["error_examples"]  # as older versions wrote it
    (tmp_path / "out/_job/summary.json").write_text(json.dumps(totals))
    assert command(all_but(5)).main(by_default) == TOO_MANY_ERRORS
    assert command(all_but(30)).main([*arguments, "--retry-errors"]) == DONE


@pytest.mark.parametrize(
    "damage", ["{", "[]", '{"attempt": 1}', '{"attempt": 1, "num_samples": 2, "errors_by_type": 3}']
)
def test_a_damaged_summary_is_written_again_or_counted_again(damage: str, tmp_path: Path) -> None:
    arguments = ["--config", str(job_file(tmp_path, 3))]
    assert command(all_but(0)).main(arguments) == NO_RESULT
    (tmp_path / "out/_job/summary.json").write_text(damage)
    assert command(all_but(0)).main(arguments) == NO_RESULT
    assert json.loads((tmp_path / "out/_job/summary.json").read_text())["attempt"] == (1 if "attempt" in damage else 2)


def test_every_status_has_its_number() -> None:
    numbers = ("DONE", "FAILED", "REFUSED", "TOO_MANY_ERRORS", "TOO_LOSSY", "NO_RESULT")
    assert [getattr(exit_status, name) for name in numbers] == [0, 1, 2, 3, 4, 5]
    assert exit_status.in_help(exit_status.AUDITED_JOB).startswith(
        "Exit status: 0 done, 1 failed, 2 refused, 3 too many"
    )
