"""Job submission to a fake cluster: refusals before any upload, and the content of a submission."""

from __future__ import annotations

import shlex
import zipfile
from pathlib import Path
from typing import Any

import pytest

import pipeline.cluster.jobs
from configs.load import ConfigError
from files.installation import version
from jobs import submit
from pipeline.cluster import code_archive
from pipeline.cluster.jobs import dashboard_url
from pipeline.cluster.provenance import REVISION_VARIABLE, code_revision
from pipeline.cluster.signals import CLUSTER_WAIT_S

CAPTION = ["--config", "configs/jobs/zoo_caption.yaml", "source.path=/data", "sink.path=/out"]
TRAINING = ["--config", "configs/jobs/train_llamagen_eagle.yaml", "output.path=/head"]
ADDRESS = ["--address", "http://head:8265"]
OWN_VARIABLES = {REVISION_VARIABLE: code_revision(), submit.STOP_WAIT_VARIABLE: str(CLUSTER_WAIT_S)}


class Job:
    """As Ray's client describes a submission."""

    def __init__(self, submission_id: str, status: str, exit_status: int | None = None) -> None:
        self.submission_id, self.status, self.driver_exit_code = submission_id, status, exit_status
        self.message, self.entrypoint, self.start_time, self.end_time = "", "python", 1000, 3000


class Client:
    """A fake of Ray's `JobSubmissionClient`."""

    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {}
        self.submitted: list[dict[str, Any]] = []
        self.archives: list[list[str]] = []
        self.chunks = ["captioning 4 files\n", "done\n"]
        self.num_cuts = 0
        self.ends_as = ("SUCCEEDED", 0)

    def list_jobs(self) -> list[Job]:
        return [*self.jobs.values(), Job(submission_id=None, status="RUNNING")]  # type: ignore[arg-type]

    def get_job_info(self, submission_id: str) -> Job:
        if submission_id not in self.jobs:
            raise RuntimeError(f"Request failed with status code 404: Job {submission_id} does not exist.")
        return self.jobs[submission_id]

    def submit_job(self, **what: Any) -> None:
        if what["submission_id"] in self.jobs:
            raise RuntimeError(f"Job with submission_id {what['submission_id']} already exists.")
        self.submitted.append(what)
        with zipfile.ZipFile(what["runtime_env"]["working_dir"]) as archive:
            self.archives.append(archive.namelist())
        self.jobs[what["submission_id"]] = Job(what["submission_id"], "RUNNING")

    def stop_job(self, submission_id: str) -> None:
        self.jobs[submission_id].status = "STOPPED"

    async def tail_job_logs(self, submission_id: str) -> Any:
        for index, chunk in enumerate(self.chunks):
            if index == 1 and self.num_cuts:
                self.num_cuts -= 1
                raise RuntimeError("WebSocket connection closed unexpectedly")
            yield chunk
        self.jobs[submission_id].status, self.jobs[submission_id].driver_exit_code = self.ends_as


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Client:
    standing_in = Client()
    monkeypatch.setattr(pipeline.cluster.jobs, "_connect", lambda address: standing_in)
    monkeypatch.setattr(pipeline.cluster.jobs, "POLL_INTERVAL_S", 0.0)
    for name in pipeline.cluster.jobs.ADDRESS_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return standing_in


def stem(*arguments: str) -> str:
    return submit.prepare(submit.parse([*arguments])).stem


def test_a_submission_is_the_job_s_own_command_with_the_clusters_ray_and_the_revision(client: Client) -> None:
    assert submit.main([*CAPTION, *ADDRESS, "--limit", "5", "job.name=my shards", "pool.slots=2"]) == submit.DONE
    (made,) = client.submitted
    overrides = ["source.path=/data", "sink.path=/out", "job.name=my shards", "pool.slots=2", "job.ray_address=auto"]
    assert shlex.split(made["entrypoint"]) == [
        *("python", "-m", "jobs.caption", "--config", "configs/jobs/zoo_caption.yaml", *overrides, "--limit", "5")
    ]
    assert made["submission_id"].startswith("my-shards-")
    assert made["submission_id"].endswith("-1")
    assert made["runtime_env"]["env_vars"] == OWN_VARIABLES
    assert set(made) == {"entrypoint", "submission_id", "runtime_env"}
    assert {"jobs/caption.py", "zoo/checkpoints/caption_target/config.json"} <= set(client.archives[0])


def test_an_installed_package_uploads_only_the_job_file_and_names_its_version(
    client: Client, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(submit, "IS_INSTALLED", True)
    monkeypatch.setattr(code_archive, "SHIPPED_FOLDERS", ())
    monkeypatch.setattr(code_archive, "SHIPPED_FILES", ())
    own = tmp_path / "mine.yaml"
    own.write_text(Path(CAPTION[1]).read_text())
    monkeypatch.chdir(tmp_path)
    for job_file, name in ((str(own), "submitted/mine.yaml"), ("zoo_caption", "zoo_caption")):
        assert submit.main(["--config", job_file, *CAPTION[2:], *ADDRESS, "--again"]) == submit.DONE
        words = shlex.split(client.submitted[-1]["entrypoint"])
        assert words[:4] == ["draftfleet", "caption", "--config", name]
        assert client.archives[-1] == ([name] if "/" in name else [])
    variables = {submit.STOP_WAIT_VARIABLE: str(CLUSTER_WAIT_S), submit.VERSION_VARIABLE: version()}
    assert client.submitted[-1]["runtime_env"]["env_vars"] == variables


def test_code_of_the_user_is_shipped_beside_the_job_file(client: Client, tmp_path: Path) -> None:
    own = tmp_path / "mine.yaml"
    own.write_text(Path(CAPTION[1]).read_text())
    (tmp_path / "mine_package").mkdir()
    (tmp_path / "mine_package/drafter.py").write_text("from mine_words import WORD\n")
    (tmp_path / "mine_words.py").write_text("WORD = 1\n")
    drafter = "method={drafter: {kind: 'mine_package.drafter:Mine'}}"
    assert submit.main(["--config", str(own), *CAPTION[2:], *ADDRESS, drafter]) == submit.DONE
    shipped = {name for name in client.archives[0] if name.startswith("submitted/")}
    assert shipped == {"submitted/mine.yaml", "submitted/mine_package/drafter.py", "submitted/mine_words.py"}


def test_a_missing_module_is_refused_before_the_submission(client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    drafter = "method={drafter: {kind: 'mine_nowhere:Mine'}}"
    assert submit.main([*CAPTION, *ADDRESS, drafter]) == submit.REFUSED
    assert "refused: method.drafter: mine_nowhere:Mine: there is no module" in capsys.readouterr().err
    assert not client.submitted


def test_a_job_file_by_name_is_not_added_to_the_archive(client: Client) -> None:
    assert submit.main(["zoo_caption", *CAPTION[2:], *ADDRESS]) == submit.DONE
    assert "python -m jobs.caption --config zoo_caption source.path=/data" in client.submitted[0]["entrypoint"]
    assert [name for name in client.archives[0] if name.startswith("submitted")] == []
    assert {"draftfleet/checkout.py", "configs/jobs/zoo_caption.yaml"} <= {*client.archives[0]}


def test_a_pilot_runs_where_the_gpus_are_under_a_name_of_its_own(client: Client) -> None:
    assert submit.main([*CAPTION, *ADDRESS, "--estimate", "400", "--price-per-hour", "2.5", "--retry-errors"]) == 0
    (made,) = client.submitted
    assert shlex.split(made["entrypoint"])[-5:] == ["--estimate", "400", "--price-per-hour", "2.5", "--retry-errors"]
    assert not made["submission_id"].startswith(stem(*CAPTION))


def test_every_kind_of_job_can_be_submitted_under_a_name_of_its_own(client: Client) -> None:
    images = ["--job", "synthesize", "--config", "configs/jobs/zoo_images_plain.yaml", "source.path=/p", "sink.path=/i"]
    training = ["--job", "train_drafter", *TRAINING]
    for arguments in (images, training):
        assert submit.main([*arguments, *ADDRESS]) == submit.DONE
    commands = [shlex.split(made["entrypoint"]) for made in client.submitted]
    assert [command[2] for command in commands] == ["jobs.synthesize", "jobs.train_drafter"]
    assert [command[-1] for command in commands] == ["job.ray_address=auto", "workers.ray_address=auto"]
    assert client.submitted[1]["submission_id"].startswith("train_drafter-")


def test_the_same_job_has_the_same_name_and_another_has_another() -> None:
    same = stem(*CAPTION)
    assert stem(*CAPTION, "pool.slots=3", "pool.max_size=9") == same  # how it runs is not what it does
    others = [["sink.path=/elsewhere"], ["job.seed=5"], ["--limit", "3"], ["source.path=/data2"]]
    assert len({same, *(stem(*CAPTION, *other) for other in others)}) == 1 + len(others)


def test_a_job_that_runs_already_is_not_submitted_twice(client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit.main([*CAPTION, *ADDRESS, "--detach"]) == submit.DONE
    assert submit.main([*CAPTION, *ADDRESS, "--detach"]) == submit.REFUSED
    assert f"this job is RUNNING already as {stem(*CAPTION)}-1" in capsys.readouterr().err
    assert len(client.submitted) == 1


@pytest.mark.parametrize("ended", ["FAILED", "STOPPED"])
def test_a_job_that_failed_or_was_stopped_is_submitted_under_the_next_number(client: Client, ended: str) -> None:
    name = stem(*CAPTION)
    client.jobs = {f"{name}-{number}": Job(f"{name}-{number}", ended) for number in (9, 10)}
    client.jobs["other-99"] = Job("other-99", "RUNNING")
    assert submit.main([*CAPTION, *ADDRESS]) == submit.DONE
    assert client.submitted[0]["submission_id"] == f"{name}-11"


def test_a_job_that_succeeded_is_submitted_again_only_when_asked(
    client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit.main([*CAPTION, *ADDRESS]) == submit.DONE
    assert submit.main([*CAPTION, *ADDRESS]) == submit.REFUSED
    assert "to run it once more add --again" in capsys.readouterr().err
    assert submit.main([*CAPTION, *ADDRESS, "--again"]) == submit.DONE
    assert [made["submission_id"][-2:] for made in client.submitted] == ["-1", "-2"]


def test_every_shard_is_a_submission_of_its_own_and_only_those_that_failed_are_repeated(
    client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    shards = [*CAPTION, *ADDRESS, "--shards", "3"]
    assert submit.main([*shards, "--detach"]) == submit.DONE
    commands = [shlex.split(made["entrypoint"])[-2:] for made in client.submitted]
    assert commands == [["--shard", "0/3"], ["--shard", "1/3"], ["--shard", "2/3"]]
    ids = [made["submission_id"] for made in client.submitted]
    assert len({submission_id.rpartition("-")[0] for submission_id in (*ids, f"{stem(*CAPTION)}-1")}) == 4
    assert submit.main([*shards, "--detach"]) == submit.REFUSED
    assert f"RUNNING already as {ids[0]}" in capsys.readouterr().err
    client.jobs[ids[0]].status, client.jobs[ids[1]].status = "SUCCEEDED", "FAILED"
    assert submit.main([*shards, "--detach"]) == submit.DONE
    assert [made["submission_id"] for made in client.submitted[3:]] == [f"{ids[1].removesuffix('-1')}-2"]
    assert submit.main([*shards, "--status"]) == submit.DONE
    assert capsys.readouterr().out.count("submission  ") == 3
    assert submit.main([*shards, "--stop"]) == submit.DONE
    assert [job.status for job in client.jobs.values()] == ["SUCCEEDED", "FAILED", "STOPPED", "STOPPED"]


def test_following_shards_shows_each_change_and_fails_if_one_fails(
    client: Client, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: dict[str, int] = {}

    def get_job_info(self: Client, submission_id: str) -> Job:
        asked[submission_id] = asked.get(submission_id, 0) + 1
        job = self.jobs[submission_id]
        if asked[submission_id] == 3:
            number = list(self.jobs).index(submission_id)
            job.status, job.driver_exit_code = ("FAILED", 3) if number == 1 else ("SUCCEEDED", 0)
        return job

    monkeypatch.setattr(Client, "get_job_info", get_job_info)
    assert submit.main([*CAPTION, *ADDRESS, "--shards", "2"]) == 3
    lines = [line.rpartition("-1: ")[2] for line in capsys.readouterr().out.splitlines() if "-1: " in line]
    assert lines == ["RUNNING", "RUNNING", "SUCCEEDED", "FAILED"]


def test_too_many_shards_and_shards_of_a_training_are_refused(
    client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit.main([*CAPTION, *ADDRESS, "--shards", "4097"]) == submit.REFUSED
    assert "--shards 4097: at most 4096" in capsys.readouterr().err
    assert submit.main(["--job", "train_drafter", *TRAINING, *ADDRESS, "--shards", "2"]) == submit.REFUSED
    assert "--shard: a training takes no such option" in capsys.readouterr().err
    assert client.submitted == []


def test_of_two_submitters_at_once_one_is_refused_with_a_reason(
    client: Client, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit.main([*CAPTION, *ADDRESS, "--detach"]) == submit.DONE
    monkeypatch.setattr(Client, "list_jobs", lambda self: [])  # as it was a moment ago
    assert submit.main([*CAPTION, *ADDRESS]) == submit.REFUSED
    assert "another submission of the same job was made just now" in capsys.readouterr().err


def test_the_log_is_shown_once_whole_also_when_the_connection_is_cut(
    client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    client.num_cuts = 2
    assert submit.main([*CAPTION, *ADDRESS]) == submit.DONE
    output = capsys.readouterr().out
    assert output.count("captioning 4 files\n") == 1
    assert output.endswith("captioning 4 files\ndone\n")


def test_following_ends_if_the_cluster_is_unreachable(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    client.num_cuts = 10**6
    monkeypatch.setattr(pipeline.cluster.jobs, "MAX_LOST_CONNECTIONS", 3)
    assert submit.main([*CAPTION, *ADDRESS]) == submit.FAILED


@pytest.mark.parametrize(
    ("ends_as", "status"),
    [
        (("SUCCEEDED", 0), 0),
        (("FAILED", 1), 1),
        (("FAILED", 2), 2),
        (("FAILED", 3), 3),
        (("FAILED", None), 1),
        (("STOPPED", None), 1),
    ],
)
def test_following_ends_with_the_job_s_own_exit_status(
    client: Client, ends_as: tuple[str, int | None], status: int
) -> None:
    client.ends_as = ends_as  # type: ignore[assignment]
    assert submit.main([*CAPTION, *ADDRESS]) == status


def test_the_last_submission_of_a_job_is_asked_for_and_stopped_by_its_file(
    client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    name = stem(*CAPTION)
    client.jobs = {f"{name}-1": Job(f"{name}-1", "FAILED"), f"{name}-2": Job(f"{name}-2", "RUNNING")}
    assert submit.main([*CAPTION, *ADDRESS, "--status"]) == submit.DONE
    assert submit.main([*CAPTION[:2], *ADDRESS, "--status", *CAPTION[2:]]) == submit.DONE, "values behind the option"
    output = capsys.readouterr().out
    assert f"submission  {name}-2\nstatus      RUNNING\n" in output
    assert submit.main([*CAPTION, *ADDRESS, "--stop"]) == submit.DONE
    assert (client.jobs[f"{name}-1"].status, client.jobs[f"{name}-2"].status) == ("FAILED", "STOPPED")
    assert submit.main([*ADDRESS, "--status", f"{name}-1"]) == submit.DONE
    assert "status      FAILED" in capsys.readouterr().out
    assert client.submitted == []


def test_requests_for_unknown_submissions_are_refused(client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    for asked in ("--status", "--follow", "--stop"):
        assert submit.main([*ADDRESS, asked, "gone-1"]) == submit.REFUSED, asked
    assert submit.main([*CAPTION, *ADDRESS, "--stop"]) == submit.REFUSED
    assert submit.main([*ADDRESS]) == submit.REFUSED
    assert submit.main([*CAPTION]) == submit.REFUSED
    output = capsys.readouterr().err
    assert "http://head:8265 knows no submission 'gone-1'" in output
    assert f"the first would be {stem(*CAPTION)}-1" in output
    assert "--config: name the job's YAML" in output
    assert "--address: give the address of the cluster's dashboard" in output


def test_jobs_that_cannot_run_on_a_cluster_are_refused_before_the_upload(
    client: Client, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    refusals = {
        (*CAPTION[:2], "sink.path=/out"): "source.path: out/demo/source/parquet is relative",
        ("--config", "configs/jobs/zoo_images_plain.yaml"): "give --job synthesize",
        ("--config", "gone.yaml"): "gone.yaml: cannot be read",
        (*CAPTION, "model.target.path=docs"): "model.target.path: docs is on this machine and is not uploaded",
        (*CAPTION, "--driver-resource", "head"): "--driver-resource head: must look like NAME=NUMBER",
        ("--job", "train_drafter", *TRAINING, "--retry-errors"): "--retry-errors: a training takes no such option",
        (*CAPTION, "sink.path=s3://key:secret@bucket/x"): "a URL must not hold credentials",
    }
    for arguments, result in refusals.items():
        assert submit.main([*arguments, *ADDRESS]) == submit.REFUSED
        assert result in capsys.readouterr().err
    assert client.submitted == []


def test_only_named_variables_are_submitted_and_no_credentials() -> None:
    mine = {
        "AWS_REGION": "x-1",
        "AWS_SECRET_ACCESS_KEY": "hush-1",
        "HF_TOKEN": "hush-2",
        "PROXY": "http://me:hush-3@proxy",
        "OTHER": "1",
    }
    assert submit.environment(["AWS_REGION"], mine) == {**OWN_VARIABLES, "AWS_REGION": "x-1"}
    for name in ("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "PROXY"):
        with pytest.raises(ConfigError, match=f"--env {name}: looks like a credential") as refused:
            submit.environment([name], mine)
        assert "hush" not in str(refused.value)
    with pytest.raises(ConfigError, match="--env GONE: there is no such variable"):
        submit.environment(["GONE"], mine)


def test_addresses_of_dashboards() -> None:
    assert dashboard_url("head:8265") == "http://head:8265"
    assert dashboard_url("https://head/ray/") == "https://head/ray"
    for wrong in ("ray://head:10001", "http://", "http://head:none", "s3://head"):
        with pytest.raises(ConfigError, match="is not the address of a dashboard"):
            dashboard_url(wrong)
    with pytest.raises(ConfigError, match="must not hold credentials") as refused:
        dashboard_url("http://me:pw@head:8265")
    assert "pw" not in str(refused.value)


def test_an_unreachable_address_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert submit.main([*CAPTION, "--address", "127.0.0.1:1"]) == submit.REFUSED
    assert "refused: --address: no server answers at http://127.0.0.1:1" in capsys.readouterr().err
