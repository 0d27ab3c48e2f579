"""Tests the end of a command whose job is superseded or stopped: one clear message, and a separate exit status."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from configs.load import ConfigError
from configs.schema import CaptionJobConfig
from jobs.caption import results
from jobs.terminal.command import FAILED, REFUSED, Command
from pipeline.output.publishing import Fenced
from tests.pipeline.attempts import job, plan_of


def command(run: Callable[[Any], Any], make_plan: Callable[..., Any] = plan_of) -> Command[Any, Any]:
    return Command(
        name="caption",
        verb="captioning",
        doc="",
        example="",
        model=CaptionJobConfig,
        make_plan=lambda config, limit, _, resume, *__: make_plan(config, resume, limit),
        describe=lambda _: [],
        run=run,
        build=results,
    )


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.txt").write_text("one\ntwo\n")
    config = job({"kind": "text", "path": str(tmp_path / "in")}, tmp_path / "out")
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(config.resolved()))
    return tmp_path / "job.yaml"


def interrupted(number: int, then: type[Exception] | None = None) -> Callable[..., Any]:
    """A job that gets a signal while it runs, and fails of something else because of it."""

    def run(*_: Any) -> Any:
        try:
            os.kill(os.getpid(), number)
        except KeyboardInterrupt:
            if then is not None:
                raise then("Ray went away") from None
            raise

    return run


def test_a_superseded_job_fails_with_one_line(job_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def overtaken(_: Any) -> Any:
        raise Fenced("attempt 2 of out has taken over from attempt 1")

    assert command(overtaken).main(["--config", str(job_file)]) == FAILED
    output = capsys.readouterr().err
    assert output.startswith("the job was ended: attempt 2 of out has taken over from attempt 1")
    assert output.count("\n") == 1


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("then", [None, RuntimeError])
def test_a_stopped_job_has_its_own_status_and_prints_the_resume_command(
    job_file: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    status: int,
    then: Any,
) -> None:
    former = signal.signal(signal.SIGINT, signal.default_int_handler)  # a runner in the background ignores it
    try:
        assert command(interrupted(number, then)).main(["--config", str(job_file)]) == status
    finally:
        signal.signal(signal.SIGINT, former)
    output = capsys.readouterr().err
    assert f"the job was stopped by {signal.Signals(number).name}; finished rows are kept in" in output
    assert f"resume with: python -m jobs.caption --config {job_file}" in output
    assert ("Ray went away" in output) == (then is not None)


def test_a_job_that_is_stopped_while_it_is_planned_has_begun_nothing(
    job_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = command(lambda _: None, interrupted(signal.SIGTERM)).main(["--config", str(job_file)])
    assert (code, capsys.readouterr().err) == (143, "stopped by SIGTERM before the job began\n")
    assert not (job_file.parent / "out").exists()


def test_a_refusal_is_still_a_refusal(job_file: Path) -> None:
    def refuse(*_: Any) -> Any:
        raise ConfigError("source.path: no")

    assert command(lambda _: None, refuse).main(["--config", str(job_file)]) == REFUSED
