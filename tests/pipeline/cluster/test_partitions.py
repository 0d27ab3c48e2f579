"""Partitions run in the calling process or as Ray tasks, with equal results in order, bounded in number and retries."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import actors.loading.pair
from configs.load import ConfigError
from configs.pool import JobSectionConfig
from pipeline.cluster import partitions
from pipeline.cluster.partitions import Partition, Workers
from pipeline.manifest import survey
from pipeline.run.plan import make_plan
from tests.jobs.stand_ins import FakePairInfo
from tests.pipeline.attempts import job

JOB = JobSectionConfig(num_cpus=2)
ROOT = Path(__file__).resolve().parents[3]


def parts(count: int) -> list[Partition[int]]:
    return [Partition(number, 10, f"{10 * number}.txt", f"{10 * number + 9}.txt") for number in range(count)]


def no_cluster(job: JobSectionConfig) -> None:
    raise ConnectionError("no cluster\nis there")


def test_partitions_run_lazily_and_in_order_in_the_calling_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitions.ray_session, "session", no_cluster)
    called = []

    def double(number: int) -> int:
        called.append(number)
        return 2 * number

    with Workers(JOB) as workers:
        results = workers.map(double, parts(3), partitions.MIN_RAY_S - 1, "survey")
        assert next(results) == 0
        assert called == [0]
        assert list(results) == [2, 4]


@pytest.mark.parametrize("count", [0, 1])
def test_one_partition_and_work_without_a_job_never_start_ray(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitions.ray_session, "session", no_cluster)
    with Workers(JOB) as workers:
        assert list(workers.map(str, parts(count), 1e9, "survey")) == ["0"] * count
    assert list(partitions.IN_PROCESS.map(str, parts(3), 1e9, "survey")) == ["0", "1", "2"]


def test_progress_names_files_and_their_rate(monkeypatch, capsys) -> None:
    monkeypatch.setattr(partitions, "PROGRESS_INTERVAL_S", 0.0)
    with Workers(JOB) as workers:
        list(workers.map(str, parts(3), 0.0, "survey"))
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" files, ")[0] for line in lines] == [f"survey: {done} of 30" for done in (20, 30)]
    assert "files/s" in lines[0]
    for quiet in (JobSectionConfig(progress=False), JobSectionConfig(log="json")):
        list(Workers(quiet).map(str, parts(3), 0.0, "survey"))
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_ray_tasks_return_what_the_calling_process_returns(tmp_path: Path) -> None:
    """In a process with a Ray of its own, because tasks end their workers."""
    command = [sys.executable, "-m", "tests.pipeline.cluster.ray_partitions", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_cluster_that_cannot_be_reached_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitions.ray_session, "session", no_cluster)
    with (
        Workers(JobSectionConfig(ray_address="auto")) as workers,
        pytest.raises(ConfigError, match=r"^job\.ray_address: auto cannot be reached: no cluster"),
    ):
        list(workers.map(str, parts(3), 1e9, "survey"))


@pytest.mark.parametrize("runs", [False, True])
def test_only_a_job_that_runs_starts_ray_for_its_plan(
    runs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partitions, "MIN_RAY_S", 0.0)
    monkeypatch.setattr(survey, "PARTITION_FILES", 1)
    monkeypatch.setattr(partitions.ray_session, "session", no_cluster)
    monkeypatch.setattr(actors.loading.pair, "check", lambda config: FakePairInfo())
    (tmp_path / "in").mkdir()
    for name in ("a", "b"):
        (tmp_path / "in" / f"{name}.txt").write_text("one\ntwo\n")
    config = job({"kind": "text", "path": str(tmp_path / "in")}, tmp_path / "out")
    if not runs:
        assert make_plan(config, runs=False).manifest.num_samples == 4
        return
    with pytest.raises(ConfigError, match=r"^job\.ray_address: "):
        make_plan(config)


def test_a_wait_for_ray_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    partitions._Progress("survey", 30, True).wait()
    partitions._Progress("survey", 30, False).wait()
    assert capsys.readouterr().err == "survey: 0 of 30 files, waiting for a task or for a free CPU in Ray\n"
