"""A job submitted to a real cluster of this machine, tokens switched on; the checkout is not installed there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.dataset as ds
import pytest
from PIL import Image

from actors.metrics import METRICS
from jobs import submit
from pipeline.cluster.provenance import code_revision
from tests.jobs.cluster import LocalCluster, local_cluster

ROOT = Path(__file__).resolve().parents[2]
NUM_PICTURES = 6
pytestmark = [pytest.mark.timeout(1800), pytest.mark.slow]


@dataclass(frozen=True)
class Submitted:
    """One job that was submitted and followed to its end."""

    cluster: LocalCluster
    arguments: list[str]
    output: Path
    done: subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def submitted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Submitted]:
    folder = tmp_path_factory.mktemp("job")
    pictures = folder / "pictures"
    pictures.mkdir()
    for index in range(NUM_PICTURES):
        Image.fromarray(np.full((40, 60, 3), 40 * index, np.uint8)).save(pictures / f"{index}.png")
    (pictures / "broken.png").write_bytes(b"no picture")
    job_file = folder / "mine.yaml"
    job_file.write_text((ROOT / "configs/jobs/zoo_caption.yaml").read_text())
    arguments = [
        *("--config", str(job_file), "source={kind: images, path: " + str(pictures) + "}", f"sink.path={folder}/out"),
        *("sink.keep_columns=[]", "prompt=Describe the image.", "sampling.max_new_tokens=5", "job.name=six pictures"),
        "job.log=json",
        "pool={slots: 4, batch_rows: 4, max_context_tokens: 256}",
    ]
    with local_cluster() as cluster:
        command = [sys.executable, "-m", "jobs.submit", "--address", cluster.address, *arguments]
        # The token is in the HOME of the client and of the cluster; there is no other setting for it.
        mine = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**mine, "HOME": str(cluster.home), "RAY_ADDRESS": "127.0.0.1:1"},
            capture_output=True,
            text=True,
            timeout=1500,
            check=False,
        )
        yield Submitted(cluster, arguments, folder / "out", done)


@pytest.fixture
def as_client(submitted: Submitted, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """This process as a client of the cluster that knows its token."""
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(submitted.cluster.home))
    return monkeypatch


def test_a_submitted_job_captions_pictures_on_a_cluster_that_asks_for_a_token(submitted: Submitted) -> None:
    done = submitted.done
    assert done.returncode == 0, done.stdout + done.stderr + submitted.cluster.log()
    assert "submitted six-pictures-" in done.stdout
    assert "--config submitted/mine.yaml" in done.stdout
    assert "captioning 7 files into" in done.stdout  # the driver's own lines, followed from here
    assert "SUCCEEDED" in done.stderr
    rows = rows_of(submitted.output / "data")
    assert {row["sample_id"] for row in rows} == {f"{index}.png#0" for index in range(NUM_PICTURES)}
    assert {row["num_generated_tokens"] for row in rows} == {5}
    errors = rows_of(submitted.output / "errors")
    assert [(row["sample_id"], row["error_type"]) for row in errors] == [("broken.png#0", "not_an_image")]


def test_the_revision_is_submitted_with_the_job(submitted: Submitted) -> None:
    versions = json.loads((submitted.output / "_job/versions.json").read_text())
    assert versions["code_revision"] == code_revision()


def test_the_clusters_job_details_contain_neither_the_token_nor_the_users_variables(
    submitted: Submitted, as_client: pytest.MonkeyPatch
) -> None:
    from pipeline.cluster.jobs import Cluster

    results = [str(job) for job in Cluster(submitted.cluster.address)._client.list_jobs()]
    assert len(results) == 1
    assert code_revision() in results[0]
    assert submitted.cluster.token not in results[0]
    assert str(submitted.cluster.home) not in results[0]


def test_a_submitted_job_is_identified_by_its_file_and_not_run_again(
    submitted: Submitted, as_client: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--address", submitted.cluster.address, *submitted.arguments]
    assert submit.main([*arguments, "--status"]) == submit.DONE
    assert "status      SUCCEEDED\n" in capsys.readouterr().out
    assert submit.main(arguments) == submit.REFUSED
    assert "to run it once more add --again" in capsys.readouterr().err


@pytest.mark.parametrize("token", ["", "0123456789abcdef" * 4], ids=["none", "another"])
def test_a_client_without_the_right_token_gets_instructions(
    submitted: Submitted,
    as_client: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    token: str,
) -> None:
    as_client.setenv("HOME", str(tmp_path))
    if token:
        as_client.setenv("RAY_AUTH_TOKEN", token)
    assert submit.main(["--address", submitted.cluster.address, *submitted.arguments]) == submit.REFUSED
    output = capsys.readouterr().err
    assert "refuses this client (Authentication" in output
    assert "`ray get-auth-token` on its head prints it: RAY_AUTH_MODE=token" in output
    assert not token or token not in output


def test_the_log_has_json_events_with_job_attempt_and_sample(submitted: Submitted) -> None:
    lines = [json.loads(line) for line in submitted.done.stdout.splitlines() if line.startswith('{"time"')]
    assert [line["event"] for line in lines if line["event"] != "progress"] == ["job_began", "job_done"]
    job_id = json.loads((submitted.output / "_job/summary.json").read_text())["job_id"]
    logs = submitted.cluster.folder / "ray" / "session_latest" / "logs"
    results = [
        line for path in logs.glob("worker-*.err") for line in path.read_text().splitlines() if "row_failed" in line
    ]
    (failed,) = [json.loads(line) for line in results]
    assert (failed["sample_id"], failed["code"]) == ("broken.png#0", "not_an_image")
    assert {(line["job_id"], line["attempt"]) for line in [*lines, failed]} == {(job_id, 1)}
    assert submitted.cluster.token not in submitted.done.stdout + submitted.done.stderr


def test_prometheus_scrapes_the_metrics_of_engines_and_documented_names_only(submitted: Submitted) -> None:
    values = submitted.cluster.metrics("draftfleet", until="ray_draftfleet_samples_total")
    rows = [row for folder in ("data", "errors") for row in rows_of(submitted.output / folder)]
    telemetries = [row["telemetry"] for row in rows]
    assert values["ray_draftfleet_samples_total", "truncated"] == NUM_PICTURES
    assert values["ray_draftfleet_errors_total", "not_an_image"] == 1
    assert values["ray_draftfleet_tokens_total", ""] == sum(row["num_generated_tokens"] for row in rows)
    assert values["ray_draftfleet_steps_total", ""] == sum(telemetry["num_spec_steps"] for telemetry in telemetries)
    accepted = sum(telemetry["num_accepted_draft_tokens"] for telemetry in telemetries)
    assert values["ray_draftfleet_accepted_draft_tokens_total", ""] == accepted
    assert values["ray_draftfleet_acceptance_length_count", ""] == NUM_PICTURES
    spent_s = sum(values["ray_draftfleet_phase_seconds_total", phase] for phase in ("prefill", "draft", "verify"))
    assert spent_s == pytest.approx(
        sum(telemetry[f"{phase}_ms"] for telemetry in telemetries for phase in ("prefill", "draft", "verify")) / 1000,
        rel=0.01,
    )
    known = {metric.exported(name) for name, metric in METRICS.items()}
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name, _ in values} <= known


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return ds.dataset(folder, format="parquet").to_table().to_pylist()
