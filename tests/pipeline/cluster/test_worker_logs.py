"""Which lines of Ray and of workers reach the terminal, and which only the log file."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from actors.events import Events
from actors.results import Stamp
from pipeline.cluster import worker_logs
from pipeline.cluster.worker_logs import Console, open_console
from pipeline.storage.output_dir import OutputDir

TEXT, JSON = (Events(Stamp("job-1", 2, "f"), enabled=enabled) for enabled in (False, True))
DIED = "A worker died or was killed while executing a task. Lease ID: 04 Worker PID: {} Worker exit type: SYSTEM_ERROR"
LOG = "_job/logs/attempt-000002.log"


def worker_lines(*lines: str, pid: int | str = 7) -> dict[str, object]:
    return {"pid": pid, "ip": "10.0.0.1", "actor_name": "MapWorker", "lines": list(lines)}


def test_each_death_is_one_line_and_its_details_are_in_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_console(OutputDir(str(tmp_path)), 2, TEXT) as console:
        for pid in (12, 13):
            console.take(worker_lines(f"\x1b[33m{DIED.format(pid)}\x1b[0m", pid="raylet"))
        console.take(worker_lines("Task x failed. There are 100 retries remaining, so …", pid="raylet"))
        console.take(worker_lines("Traceback (most recent call last):", '  File "x.py", line 1', "KeyError: 3"))
        console.take(worker_lines("draftfleet: out of memory with 4 slots, going on with 2"))
    assert capsys.readouterr().err.splitlines() == [
        f"worker process 12 died; its work is run again (log: {tmp_path / LOG})",
        f"worker process 13 died; its work is run again (log: {tmp_path / LOG})",
        f"out of memory with 4 slots, going on with 2 (log: {tmp_path / LOG})",
    ]
    log = (tmp_path / LOG).read_text()
    assert len(log.splitlines()) == 7
    assert "(raylet) A worker died or was killed" in log
    assert "(MapWorker pid=7, ip=10.0.0.1) KeyError: 3" in log


def test_errors_of_ray_are_shown_once_and_those_of_bookkeeping_are_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    console = Console(tmp_path / "log", "LOG", TEXT)
    logger = logging.getLogger("tests.console")
    for number in range(300):
        text = f"Unhandled error (suppress with …): ray::_StatsActor.update()\n  File {number}"
        console.record(logger.makeRecord("ray", logging.ERROR, "", 0, text, (), None))
        text = f"no node has what actor {number} asks for\nTraceback"
        console.record(logger.makeRecord("ray.data", logging.WARNING, "", 0, text, (), None))
    console.take(worker_lines("The cluster has no memory left", pid="raylet"))
    assert capsys.readouterr().err.splitlines() == [
        "Ray: no node has what actor 0 asks for (log: LOG)",
        "Ray: The cluster has no memory left (log: LOG)",
    ]
    assert (tmp_path / "log").read_text().count("_StatsActor") == 300


def test_in_a_json_log_events_are_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(tmp_path / "log", "LOG", JSON)
    JSON.emit("batch_done", num_rows=3)
    console.take(worker_lines(capsys.readouterr().err))
    assert console.is_empty, "events of workers are for the collectors of their nodes"
    console.take(worker_lines(DIED.format(12), pid="raylet"))
    output = json.loads(capsys.readouterr().err)
    assert (output["event"], output["process"], output["log"]) == ("worker_died", 12, "LOG")


def test_a_job_that_fails_names_the_log_and_a_quiet_one_leaves_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_console(OutputDir(str(tmp_path)), 2, TEXT):
        pass
    assert not (tmp_path / LOG).exists()

    def fail_inside() -> None:
        with open_console(OutputDir(str(tmp_path)), 2, TEXT) as console:
            console.take(worker_lines("a word"))
            raise KeyError

    with pytest.raises(KeyError):
        fail_inside()
    assert "the job ends with an error" in capsys.readouterr().err


def test_the_log_of_an_output_on_a_store_is_uploaded(tmp_path: Path) -> None:
    output = OutputDir("memory://console-test")
    with open_console(output, 2, TEXT) as console:
        console.take(worker_lines("a word"))
    assert output.read_bytes(LOG).endswith(b"(MapWorker pid=7, ip=10.0.0.1) a word\n")


@pytest.mark.parametrize(("room", "is_cut"), [(0, False), (-1, True)])
def test_the_log_has_a_largest_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int, is_cut: bool) -> None:
    console = Console(tmp_path / "log", "LOG", TEXT)
    console.log("first")
    num_bytes = (tmp_path / "log").stat().st_size
    monkeypatch.setattr(worker_logs, "MAX_LOG_BYTES", 2 * num_bytes + room)
    for word in ("other", "third", "last!"):
        console.log(word)
    lines = (tmp_path / "log").read_text().splitlines()
    assert [line.split()[-1] for line in lines] == ["first", *([] if is_cut else ["other"]), "dropped"]


def test_a_log_that_cannot_be_written_is_named_once_and_ends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder").write_text("a file")
    console = Console(tmp_path / "folder/log", "LOG", TEXT)
    for pid in (12, 13):
        console.take(worker_lines(DIED.format(pid), pid="raylet"))
    output = capsys.readouterr().err.splitlines()
    assert ["cannot be written" in line for line in output] == [True, False, False]
    assert console.is_empty


def test_a_log_that_cannot_be_uploaded_ends_no_job(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("read only")

    monkeypatch.setattr(OutputDir, "write_bytes", refuse)
    with open_console(OutputDir("memory://console-refused"), 2, TEXT) as console:
        console.log("a word")
    assert "the log cannot be uploaded" in capsys.readouterr().err
