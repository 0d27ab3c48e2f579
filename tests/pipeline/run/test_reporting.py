"""The report of an attempt: images in bounded parts, a source that is gone, and failures that do not end the job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from actors.events import Events
from pipeline.manifest.datasource import SpanDatasource
from pipeline.reports.drift import DriftWatch
from pipeline.reports.live import Live
from pipeline.reports.summary import NO_WAITS, Summary
from pipeline.run import plan as planning
from pipeline.run import reporting
from pipeline.run.plan import Plan
from pipeline.run.reporting import ReportWriter
from tests.pipeline.attempts import end, job, make_rows, plan_of, save, start, write_summary
from tests.pipeline.formats.shards import encode

NUM_IMAGES = 5


def finished(tmp_path: Path) -> tuple[Plan, Any, Path]:
    """A job on five images whose rows are published, its publisher and the path of its report."""
    (tmp_path / "in").mkdir()
    for number in range(NUM_IMAGES):
        (tmp_path / f"in/{number}.png").write_bytes(encode((40 * number, 0, 0)))
    plan, begun = start(plan_of(job({"kind": "images", "path": str(tmp_path / "in")}, tmp_path / "out")))
    save(plan, begun, make_rows(plan, begun.publisher.attempt))
    end(plan, begun)
    return plan, begun.publisher, tmp_path / "out/_job/report.html"


def reported(plan: Plan, publisher: Any, path: Path) -> str:
    write_summary(plan, Summary(plan.identity.job_id, "plain", "lossless", 1.0), publisher)
    return path.read_text()


def test_images_are_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, publisher, path = finished(tmp_path)
    sizes: list[int] = []
    read = SpanDatasource.read_rows

    def counted(self: SpanDatasource, rows: Any) -> Any:
        sizes.append(len(rows))
        return read(self, rows)

    monkeypatch.setattr(SpanDatasource, "read_rows", counted)
    monkeypatch.setattr(planning, "PICTURES_AT_ONCE", 2)
    page = reported(plan, publisher, path)
    assert sizes == [2, 2, 1]
    assert page.count("data:image/jpeg") == page.count("<article ") == NUM_IMAGES


def test_no_image_is_read_after_the_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, publisher, path = finished(tmp_path)
    monkeypatch.setattr(reporting, "PICTURES_S", -1.0)
    page = reported(plan, publisher, path)
    assert page.count("data:image/jpeg") == 1
    assert page.count("<article ") == NUM_IMAGES
    assert "were not read within" in page


def test_a_source_that_is_gone_leaves_a_report_of_texts(tmp_path: Path) -> None:
    plan, publisher, path = finished(tmp_path)
    for file in (tmp_path / "in").iterdir():
        file.unlink()
    page = reported(plan, publisher, path)
    assert page.count("<article ") == NUM_IMAGES
    assert page.count("data:image/jpeg") == 0
    assert "text of 3.png#0" in page


def test_a_failure_is_printed_once_and_the_summary_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, publisher, path = finished(tmp_path)

    def fail(report: Any) -> str:
        raise ValueError("no page")

    monkeypatch.setattr(reporting, "render", fail)
    write_summary(plan, Summary(plan.identity.job_id, "plain", "lossless", 1.0), publisher)
    assert not path.exists()
    assert (path.parent / "summary.json").exists()
    writer = ReportWriter(plan, publisher, {}, Events(plan.identity.stamp(1), False))
    live = Live(plan.empty_summary(), DriftWatch())
    for _ in range(3):
        writer.write(lambda: writer.running(live, NO_WAITS))
    assert capsys.readouterr().err.count("cannot be written (no page); the job goes on") == 2, "once per writer"


@pytest.mark.parametrize(
    ("error", "state"), [(RuntimeError("x"), "failed before"), (KeyboardInterrupt(), "stopped before")]
)
def test_the_last_report_of_an_attempt_that_ends_early_says_so(
    tmp_path: Path, error: BaseException, state: str
) -> None:
    plan, publisher, path = finished(tmp_path)
    writer = ReportWriter(plan, publisher, {}, Events(plan.identity.stamp(1), False))
    live = Live(plan.empty_summary(), DriftWatch())
    with pytest.raises(type(error)), reporting.write_reports(writer, lambda: live, lambda: NO_WAITS):
        raise error
    assert f"{state} all rows were done" in path.read_text()
