"""Every mistake of the reference of refusals: a dry run refuses it in one line per problem, with exit status 2, the
value's place, and neither a traceback nor Ray."""

from __future__ import annotations

import errno
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import s3fs
import yaml
from ray._private import services

from configs.load import apply_override
from configs.schema import CaptionJobConfig
from docgen.mistakes import GROUPS, MISTAKES
from docgen.mistakes import mistake as environments
from docgen.mistakes.mistake import Mistake
from jobs import caption, synthesize, train_drafter
from pipeline.cluster import ray_session
from pipeline.resources import machine, request_checks, resolve
from pipeline.storage import objects, retries
from tests import object_store
from tests.pipeline.resources.nodes import cluster, node
from tests.pipeline.storage.test_first_touch import answering, point_to

ROOT = Path(__file__).resolve().parents[2]
ZOO = ROOT / "zoo/checkpoints"
MAINS = {"caption": caption.main, "synthesize": synthesize.main, "train-drafter": train_drafter.main}


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No Ray, no GPU, no retry that waits, and drivers that read the environment again."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("Ray was started")

    monkeypatch.setattr(ray_session, "session", refuse)
    monkeypatch.setattr(ray, "init", refuse)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(retries, "DEFAULT_POLICY", retries.RetryPolicy(6, 0.0))
    monkeypatch.setattr(services, "find_gcs_addresses", frozenset)
    monkeypatch.setattr(services, "find_bootstrap_address", lambda folder: None)
    for name in ("CUDA_VISIBLE_DEVICES", "RAY_ADDRESS", ray_session.INSIDE_SUBMITTED_JOB):
        monkeypatch.delenv(name, raising=False)
    before = dict(s3fs.S3FileSystem._cache)
    s3fs.S3FileSystem._cache.clear()
    yield
    for file_system in s3fs.S3FileSystem._cache.values():
        if file_system._s3 is not None:
            s3fs.S3FileSystem.close_session(file_system.loop, file_system._s3)
    s3fs.S3FileSystem._cache.clear()
    s3fs.S3FileSystem._cache.update(before)


def caption_job(folder: Path) -> dict[str, Any]:
    (folder / "in").mkdir(exist_ok=True)
    (folder / "in/rows.txt").write_text("What is this?\nAnd this?\n")
    return {
        "source": {"kind": "text", "path": str(folder / "in")},
        "prompt": "{text}",
        "model": {"target": {"path": str(ZOO / "text_target")}, "drafter": {"path": str(ZOO / "text_drafter")}},
        "method": {"drafter": {"kind": "model"}},
        "sampling": {"max_new_tokens": 16},
        "pool": {"slots": 4, "max_context_tokens": 128},
        "sink": {"path": str(folder / "out")},
        "job": {"progress": False},
    }


def synthesis_job(folder: Path) -> dict[str, Any]:
    job: dict[str, Any] = yaml.safe_load((ROOT / "configs/jobs/zoo_images_plain.yaml").read_text())
    model = {name: {**section, "path": str(ROOT / section["path"])} for name, section in job["model"].items()}
    return {
        **job,
        "source": caption_job(folder)["source"],
        "prompt": "{text}",
        "model": model,
        "sink": {"path": f"{folder}/out"},
    }


def training_job(folder: Path) -> dict[str, Any]:
    job: dict[str, Any] = yaml.safe_load((ROOT / "configs/jobs/train_zoo_medusa.yaml").read_text())
    source = {"kind": "jsonl", "path": str(folder / "lines.jsonl")}
    (folder / "lines.jsonl").write_text('{"question": "a", "truth": "b"}\n' * 40)
    target = {**job["target"], "path": str(ZOO / "text_target")}
    return {**job, "source": source, "target": target, "output": {"path": str(folder / "head")}}


JOBS = {"caption": caption_job, "synthesize": synthesis_job, "train-drafter": training_job}


def enter(environment: str, folder: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Put this process into the environment of a mistake."""
    if environment in (
        environments.NO_BUCKET,
        environments.DENIED,
        environments.OTHER_REGION,
        environments.CLOSED_PORT,
        environments.UNKNOWN_HOST,
    ):
        for name, value in object_store.running().environment.items():
            monkeypatch.setenv(name, value)
        object_store.make_bucket("mistakes")
    if environment == environments.NO_CREDENTIALS:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_ENDPOINT_URL"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
            monkeypatch.setenv(name, str(folder / "nothing"))
    elif environment == environments.CLOSED_PORT:
        with socket.create_server(("127.0.0.1", 0)) as server:
            point_to(f"http://127.0.0.1:{server.getsockname()[1]}", monkeypatch)
    elif environment == environments.UNKNOWN_HOST:

        def look_up(host: str, *_: Any, **__: Any) -> Any:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

        point_to("http://store.example", monkeypatch)
        monkeypatch.setattr(socket, "getaddrinfo", look_up)
    elif environment == environments.OTHER_REGION:
        answer = answering(301, "PermanentRedirect")
        point_to(answer.__enter__(), monkeypatch)
        request.addfinalizer(lambda: answer.__exit__(None, None, None))
    elif environment == environments.DENIED:

        def deny(*_: Any) -> None:
            raise PermissionError(errno.EACCES, "Access Denied")

        monkeypatch.setattr(objects, "create", deny)
    elif environment == environments.READ_ONLY:  # tests may run as root, which may write anywhere
        monkeypatch.setattr(os, "access", lambda path, mode: False)
    elif environment == environments.CLUSTER:
        nodes = cluster(node(0), node(4, count=2, exists=False, kind="small"))
        monkeypatch.setattr(resolve, "capacity_of", lambda job, dotted: nodes)
    elif environment == environments.SMALL_MACHINE:
        monkeypatch.setattr(request_checks, "memory_bytes", lambda: 2**25)
    elif environment == environments.SUBMITTED:
        monkeypatch.setenv(ray_session.INSIDE_SUBMITTED_JOB, "{}")
        monkeypatch.setattr(resolve, "capacity_of", lambda job, dotted: cluster(node(0)))


def write_job(mistake: Mistake, folder: Path, in_file: bool) -> list[str]:
    """Write the files of a mistake, and return the arguments of its command."""
    path, data = folder / "job.yaml", JOBS[mistake.command](folder)
    overrides = [text.replace("{folder}", str(folder)) for text in mistake.overrides]
    if in_file:
        for override in overrides:
            model = CaptionJobConfig if mistake.command == "caption" else None
            apply_override(data, override, model)
        overrides = []
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    for name, text in mistake.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return ["--config", str(path), *overrides, "--dry-run"]


def is_in_file(mistake: Mistake) -> bool:
    """Whether a YAML file can have the mistake."""
    return (
        bool(mistake.overrides)
        and all("=" in text for text in mistake.overrides)
        and "prompt.text=x" not in mistake.overrides
    )


CASES = [(name, False) for name in MISTAKES] + [(name, True) for name in MISTAKES if is_in_file(MISTAKES[name])]


@pytest.mark.parametrize(
    ("name", "in_file"), CASES, ids=[f"{name}{', in the file' * in_file}" for name, in_file in CASES]
)
def test_a_dry_run_refuses_the_mistake(
    name: str,
    in_file: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    mistake = MISTAKES[name]
    monkeypatch.setenv("RAY_OVERRIDE_RESOURCES", f'{{"GPU": {mistake.gpus}}}')
    monkeypatch.setattr(machine, "available_cpus", lambda: 2)
    monkeypatch.chdir(ROOT)
    arguments = write_job(mistake, tmp_path, in_file)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    enter(mistake.environment, tmp_path, monkeypatch, request)
    status = MAINS[mistake.command](arguments)
    monkeypatch.undo()
    output = capsys.readouterr()
    assert status == 2
    refusal = next(line for line in output.err.splitlines() if line.startswith("refused: "))
    print(refusal)
    text = refusal.removeprefix("refused: ").removeprefix(f"{tmp_path}/job.yaml: ").removeprefix("(whole file): ")
    assert text.startswith(mistake.message.replace("{folder}", str(tmp_path)))
    assert "Traceback" not in output.err + output.out
    assert output.err.count("\n") <= 2
    place = r"\((.*, )?line \d+\)$" if in_file else r"\((.*, )?line \d+\)$|\(command line\)$"
    assert (re.search(place, refusal) is not None) == mistake.has_place
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before, "it wrote files"


def test_every_kind_of_refusal_is_in_the_table() -> None:
    assert len(MISTAKES) == sum(map(len, GROUPS.values())) >= 50


IN_A_PROCESS = (
    "a misspelt key",
    "no context for a prompt",
    "an output with files of others",
    "a store whose port is closed",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_A_PROCESS)
def test_the_command_refuses_the_mistake_in_a_process_of_its_own(name: str, tmp_path: Path) -> None:
    mistake = MISTAKES[name]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    environment = os.environ | object_store.S3(port=port).environment
    words = [sys.executable, "-m", "jobs.caption", *write_job(mistake, tmp_path, in_file=True)]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert mistake.message.replace("{folder}", str(tmp_path)) in done.stderr


ACCEPTED = {
    "captions of text": ("caption", ()),
    "lookup": ("caption", ("method=lookup", "model.drafter=null", "prompt=What is it: {text}")),
    "images of text": ("synthesize", ("sampling.top_k=50",)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ACCEPTED)
def test_what_a_dry_run_accepts_starts_and_ends(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a process of its own, because this module refuses to start Ray."""
    command, overrides = ACCEPTED[name]
    arguments = write_job(Mistake(name, "", overrides, command=command), tmp_path, in_file=False)  # type: ignore[arg-type]
    assert MAINS[command](arguments) == 0, capsys.readouterr().err
    words = [sys.executable, "-m", f"jobs.{command}", *arguments[:-1], "--limit", "2"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "out/data").glob("*.parquet"))


@pytest.mark.slow
def test_a_training_that_a_dry_run_accepts_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quick = (
        "training.num_steps=2",
        "training.warmup_steps=1",
        "training.batch_rows=2",
        "acceptance.num_rows=0",
        "training.held_out_share=0.5",
        "training.held_out_rows=1",
        "workers.torch_threads=1",
    )
    arguments = write_job(Mistake("a training", "", quick, command="train-drafter"), tmp_path, in_file=False)
    assert train_drafter.main(arguments) == 0, capsys.readouterr().err
    assert "drafter  medusa, 2 steps of 2 rows" in capsys.readouterr().out
    assert not (tmp_path / "head").exists()
    assert train_drafter.main(arguments[:-1]) == 0
    assert train_drafter.main(arguments) == 2, "the head is finished"
