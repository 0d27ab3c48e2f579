"""Partitions run in the calling process or as Ray tasks, with equal results in order, bounded in number and retries."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest
import ray

import actors.loading.pair
from configs.load import ConfigError
from configs.schema import Job, Prompt
from configs.source import Source
from pipeline.cluster import partitions
from pipeline.cluster.partitions import Partition, Workers
from pipeline.prompts.row_options import PromptOptions
from pipeline.run.plan import make_plan
from pipeline.source import manifest, survey
from tests.jobs.stand_ins import FakePairInfo
from tests.pipeline.attempts import job
from tests.pipeline.sources.shards import write_parquet

JOB = Job(num_cpus=2)


def parts(count: int) -> list[Partition[int]]:
    return [Partition(number, 10, f"{10 * number}.txt", f"{10 * number + 9}.txt") for number in range(count)]


def test_partitions_run_lazily_and_in_order_in_the_calling_process() -> None:
    called = []

    def double(number: int) -> int:
        called.append(number)
        return 2 * number

    with Workers(JOB) as workers:
        results = workers.map(double, parts(3), partitions.MIN_RAY_S - 1, "survey")
        assert next(results) == 0
        assert called == [0]
        assert list(results) == [2, 4]
    assert not ray.is_initialized()


@pytest.mark.parametrize("count", [0, 1])
def test_one_partition_and_work_without_a_job_never_start_ray(count: int) -> None:
    with Workers(JOB) as workers:
        assert list(workers.map(str, parts(count), 1e9, "survey")) == ["0"] * count
    assert list(partitions.IN_PROCESS.map(str, parts(3), 1e9, "survey")) == ["0", "1", "2"]
    assert not ray.is_initialized()


def test_progress_names_files_and_their_rate(monkeypatch, capsys) -> None:
    monkeypatch.setattr(partitions, "PROGRESS_INTERVAL_S", 0.0)
    with Workers(JOB) as workers:
        list(workers.map(str, parts(3), 0.0, "survey"))
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" files, ")[0] for line in lines] == [f"survey: {done} of 30" for done in (20, 30)]
    assert "files/s" in lines[0]
    for quiet in (Job(progress=False), Job(log="json")):
        list(Workers(quiet).map(str, parts(3), 0.0, "survey"))
    assert capsys.readouterr().err == ""


def running(folder: str, number: int) -> int:
    """Count the calls that have begun but whose results are not consumed."""
    Path(folder, str(number)).touch()
    return len(os.listdir(folder))


def failing(number: int) -> int:
    if number == 1:
        raise ConfigError(f"source.path: {number}.txt is bad")
    return number


def dying(folder: str, number: int) -> int:
    if number == 1:
        Path(folder, f"{len(os.listdir(folder))}").touch()
        os._exit(1)
    return number


def write_sources(folder: Path) -> dict[str, Source]:
    """Write sources in two formats, with a file that is cut into ranges, and repeated ids in several files."""
    for number in range(12):
        ids = [f"{number}-{row}" if row % 5 else f"repeated-{row}" for row in range(20)]
        write_parquet(folder / f"parquet/{number:02d}.parquet", {"k": ids, "n": [number] * 20}, row_group_size=7)
        (folder / "jsonl").mkdir(exist_ok=True)
        text = "".join(json.dumps({"k": one, "n": 1}) + "\n\n" for one in ids)
        (folder / f"jsonl/{number:02d}.jsonl").write_text(text * (1 + number % 3))
    (folder / "parquet/05.parquet").write_bytes(b"torn")
    return {kind: Source(kind=kind, path=str(folder / kind), id_column="k") for kind in ("parquet", "jsonl")}


def test_ray_tasks_return_what_the_calling_process_returns(tmp_path: Path, monkeypatch, capsys) -> None:
    sources = write_sources(tmp_path / "in")
    monkeypatch.setattr(survey, "PARTITION_FILES", 2)
    monkeypatch.setattr(survey, "PARTITION_IDS", 25)
    monkeypatch.setattr(survey, "RANGE_BYTES", 300)
    needs = {kind: manifest.needs_of(one, PromptOptions(Prompt(text="{n}")), ("n",)) for kind, one in sources.items()}
    expected = {kind: manifest.freeze_for(one) for kind, one in needs.items()}
    assert expected["jsonl"].files["num_samples"].to_pylist() == [20, 40, 60] * 4
    assert expected["parquet"].files["num_samples"].to_pylist()[5] is None
    repeated = [len(rows) for rows in expected["parquet"].files["repeated_rows"].to_pylist()]
    assert repeated == [0, 4, 4, 4, 4, 0, 4, 4, 4, 4, 4, 4]
    monkeypatch.setattr(partitions, "MIN_RAY_S", 0.0)
    with Workers(JOB) as workers:
        for kind, one in needs.items():
            found = manifest.freeze_for(one, workers)
            assert found.files.equals(expected[kind].files)
            assert found.keep == expected[kind].keep
        assert ray.is_initialized()
        check_errors(workers, tmp_path)
    assert not ray.is_initialized()


def check_errors(workers: Workers, folder: Path) -> None:
    """Check errors and bounds of Ray tasks in the session that is open."""
    with pytest.raises(ConfigError, match=r"^source\.path: 1\.txt is bad$"):
        list(workers.map(failing, parts(3), 1e9, "survey"))
    (folder / "deaths").mkdir()
    died = r"^sink\.path: the inventory of the files 10\.txt to 19\.txt ended its process 4 times \(.*\); remove or"
    with pytest.raises(ConfigError, match=died):
        list(workers.map(partial(dying, str(folder / "deaths")), parts(3), 1e9, "inventory", "sink.path"))
    assert len(os.listdir(folder / "deaths")) == partitions.MAX_RETRIES + 1
    (folder / "calls").mkdir()
    results = workers.map(partial(running, str(folder / "calls")), parts(40), 1e9, "survey")
    in_flight = 4  # two per CPU
    for consumed in range(1, 41):
        assert next(results) <= consumed + in_flight - 1
    table = pa.table({"path": [f"{number:09d}" for number in range(1_000_000)]})
    reference = ray.put(table.slice(3, 2))
    assert ray.experimental.get_object_locations([reference])[reference]["object_size"] < 100_000


def no_cluster(job: Job) -> None:
    raise ConnectionError("no cluster\nis there")


def test_a_cluster_that_cannot_be_reached_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitions.ray_session, "session", no_cluster)
    with (
        Workers(Job(ray_address="auto")) as workers,
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
