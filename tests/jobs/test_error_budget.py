"""A job that exceeds its error budget prints the reason and the resume command, and has its own exit status."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors.serving.crash_ledger import ErrorBudgetSpent
from configs.load import ConfigError, validate
from configs.schema import CaptionJobConfig
from jobs import caption
from jobs.terminal.command import TOO_MANY_ERRORS
from tests.actors.fakes import fake_job

ROOT = Path(__file__).resolve().parents[2]


def test_a_job_that_its_errors_ended_exits_with_status_3(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = "412 of 1,000 rows failed (41.2 %), more than job.max_error_share (0.1) allows: 412 broken_image"
    plan: Any = SimpleNamespace(
        manifest=SimpleNamespace(num_files=3),
        output=SimpleNamespace(shown=lambda: "somewhere"),
        resources=SimpleNamespace(line=lambda: ""),
        limit=None,
        warning="",
    )

    def ends(plan: Any) -> Any:
        raise ErrorBudgetSpent(result)

    monkeypatch.setattr("jobs.terminal.command.resume.is_complete", lambda plan: False)
    command = replace(caption.COMMAND, make_plan=lambda *_: plan, run=ends)
    status = command.main(["--config", str(ROOT / "configs/jobs/demo_caption.yaml"), "job.max_error_share=0.1"])
    assert status == TOO_MANY_ERRORS == 3
    output = capsys.readouterr().err
    assert f"the job was ended: {result}" in output
    assert "somewhere" in output
    assert "job.max_error_share=0.1" in output, "the resume command"
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [
        ("job", "max_error_share", 1.0),
        ("job", "max_error_share", -0.1),
        ("job", "error_share_min_rows", 0),
        ("pool", "max_step_s", 0.0),
        ("pool", "max_row_s", 0.0),
    ],
)
def test_bounds_without_a_meaning_are_refused(section: str, field: str, value: float) -> None:
    data = {**fake_job().resolved(), section: {field: value}}
    with pytest.raises(ConfigError, match=f"{section}.{field}"):
        validate(CaptionJobConfig, data, "a test")


def test_bounds_on_time_and_errors_do_not_change_what_a_job_is() -> None:
    bounded = fake_job(pool={"max_row_s": 5.0, "max_step_s": 9.0}, job={"max_error_share": 0.5})
    assert bounded.fingerprint({}) == fake_job().fingerprint({})
