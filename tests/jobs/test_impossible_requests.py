"""Jobs that request what this machine's Ray can never give are refused, in a dry run and in a run; `num_gpus: auto` is
resolved for it. GPUs are those that the environment gives to Ray; no test starts one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from ray._private import services

from jobs import caption, synthesize, train_drafter
from pipeline.cluster import ray_session
from pipeline.resources import machine

ROOT = Path(__file__).resolve().parents[2]
ZOO = ROOT / "zoo/checkpoints"


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("Ray was started")

    monkeypatch.setattr(ray_session, "session", refuse)
    monkeypatch.setattr(ray, "init", refuse)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(machine, "available_cpus", lambda: 2)
    for name in ("CUDA_VISIBLE_DEVICES", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    gpus(monkeypatch, 0)


def gpus(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setenv("RAY_OVERRIDE_RESOURCES", f'{{"GPU": {number}}}')


@pytest.fixture
def captions(tmp_path: Path) -> list[str]:
    """Arguments of a valid job on lines of text."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in/rows.txt").write_text("What is this?\nAnd this?\n")
    job = {
        "source": {"kind": "text", "path": str(tmp_path / "in")},
        "prompt": "{text}",
        "model": {"target": {"path": str(ZOO / "text_target")}},
        "sampling": {"max_new_tokens": 16},
        "pool": {"slots": 4, "max_context_tokens": 128},
        "sink": {"path": str(tmp_path / "out")},
        "job": {"progress": False},
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    return ["--config", str(tmp_path / "job.yaml")]


REFUSED = [
    (0, ("pool.num_gpus=1",), "pool.num_gpus: 1 GPU for each actor, and this machine has no GPU; leave it out (auto)"),
    (1, ("pool.num_gpus=2",), "pool.num_gpus: 2 GPUs for each actor, and this machine has 1 GPU"),
    (1, ("pool.num_gpus=1", "pool.min_size=2", "pool.max_size=2"), "pool.num_gpus: 1 GPU for each of 2 actors"),
    (1, ("pool.num_gpus=1", "job.num_cpus=1"), "job.num_cpus: one reading task takes 1 CPU, and"),
    (0, ("pool.accelerator_type=H100",), "pool.accelerator_type: H100, and no Ray on this machine has it"),
    (0, ("pool.label_selector={pool: gpu}",), "pool.label_selector: {pool: gpu}, and no Ray on this machine has"),
    (0, ("pool.decode_label_selector={pool: cpu}",), "pool.decode_label_selector: {pool: cpu}, and no Ray on this"),
    (0, ("pool.decode_cpus=3",), "pool.decode_cpus: one decoding task takes 3 CPUs, and a Ray on this machine has 2"),
    (0, ("model.target.device=cuda",), "model.target.device: 'cuda', and pool.num_gpus (auto) is 0, because this"),
    (0, ("job.ray_address=auto",), "job.ray_address: auto cannot be reached: "),
]


@pytest.mark.parametrize("runs", [False, True])
@pytest.mark.parametrize(("number", "overrides", "message"), REFUSED)
def test_a_request_that_cannot_be_met_is_refused(
    number: int,
    overrides: tuple[str, ...],
    message: str,
    runs: bool,
    captions: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    gpus(monkeypatch, number)
    monkeypatch.setattr(services, "find_gcs_addresses", frozenset)
    monkeypatch.setattr(services, "find_bootstrap_address", lambda folder: None)
    status = caption.main([*captions, *overrides, *([] if runs else ["--dry-run"])])
    captured = capsys.readouterr()
    assert (status, captured.out) == (caption.REFUSED, "")
    assert captured.err.startswith(f"refused: {message}")
    assert captured.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("number", "line", "device"),
    [
        (0, "pool.num_gpus 0 (auto): this machine has no GPU; models run on the CPU", "CPU"),
        (1, "pool.num_gpus 1 (auto): this machine has 1 GPU", "1 GPU"),
    ],
)
def test_a_dry_run_shows_the_gpus_that_auto_has_chosen(
    number: int,
    line: str,
    device: str,
    captions: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    gpus(monkeypatch, number)
    assert caption.main([*captions, "--dry-run"]) == caption.DONE
    out = capsys.readouterr().out
    assert f"\ngpus     {line}\n" in out
    assert f"actors   1 × 4 slots on {device}, " in out


def test_the_job_file_for_own_folders_needs_no_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The README's command, with the shipped models in place of downloads."""
    (tmp_path / "pictures").mkdir()
    picture = next((ROOT / "docs").rglob("*.png"))
    (tmp_path / "pictures/a.png").write_bytes(picture.read_bytes())
    models = [f"model.{name}={{path: {ZOO}/caption_{name}}}" for name in ("target", "drafter")]
    own = [f"source.path={tmp_path}/pictures", f"sink.path={tmp_path}/out", "--limit", "20"]
    job = ["--config", str(ROOT / "configs/jobs/caption_folder.yaml")]
    assert caption.main([*job, *own, *models, "--dry-run"]) == caption.DONE
    out = capsys.readouterr().out
    assert "pool.num_gpus 0 (auto): this machine has no GPU; models run on the CPU" in out
    assert "\nwarning  the shipped models were trained on drawn scenes: their captions of other images are" in out


def test_only_images_of_users_that_shipped_models_describe_have_a_warning(
    captions: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert caption.main([*captions, "--dry-run"]) == caption.DONE, "text"
    scenes = tmp_path / "demo/source/pictures"
    scenes.mkdir(parents=True)
    (scenes / "a.png").write_bytes(next((ROOT / "docs").rglob("*.png")).read_bytes())
    own = ["--config", "demo_folder", f"source.path={scenes}", f"sink.path={tmp_path}/out", "--dry-run"]
    assert caption.main(own) == caption.DONE, "scenes of the demo"
    assert "warning" not in capsys.readouterr().out
    scenes.rename(tmp_path / "pictures")
    own[2] = f"source.path={tmp_path}/pictures"
    assert caption.main(own) == caption.DONE
    assert capsys.readouterr().out.count("warning  the shipped models") == 1


@pytest.mark.parametrize(
    ("number", "overrides", "line"),
    [
        (0, (), "pool.num_gpus 0, vq.num_gpus 0 (auto): this machine has no GPU; models run on the CPU"),
        (1, (), "pool.num_gpus 0.9, vq.num_gpus 0.1 (auto): this machine has 1 GPU"),
        (1, ("pool.num_gpus=1",), "vq.num_gpus 0 (auto): this machine has 1 GPU"),
        (1, ("sink.images=false",), "pool.num_gpus 1 (auto): this machine has 1 GPU"),
    ],
)
def test_engines_and_vq_decoders_are_resolved_together(
    number: int,
    overrides: tuple[str, ...],
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    gpus(monkeypatch, number)
    (tmp_path / "in.txt").write_text("a red circle\n")
    job = yaml.safe_load((ROOT / "configs/jobs/zoo_images_plain.yaml").read_text())
    job["source"], job["prompt"] = {"kind": "text", "path": str(tmp_path / "in.txt")}, "{text}"
    job["sink"] = {"path": str(tmp_path / "out")}
    job["model"] = {name: {**section, "path": str(ROOT / section["path"])} for name, section in job["model"].items()}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    assert synthesize.main(["--config", str(tmp_path / "job.yaml"), *overrides, "--dry-run"]) == 0
    assert f"\ngpus     {line}\n" in capsys.readouterr().out


def test_a_training_follows_the_same_rule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = ["--config", str(ROOT / "configs/jobs/train_zoo_medusa.yaml"), f"output.path={tmp_path}/out"]
    for number, overrides, message in (
        (0, ("workers.num_gpus=1",), "workers.num_gpus: 1 GPU for each actor, and this machine has no GPU"),
        (1, ("workers.count=2",), "workers.num_gpus: 1 GPU (auto) for each of 2 actors (workers.count), and this"),
        (0, ("target.device=cuda",), "target.device: 'cuda', and workers.num_gpus (auto) is 0, because this machine"),
    ):
        gpus(monkeypatch, number)
        assert train_drafter.main([*job, *overrides]) == train_drafter.REFUSED
        assert capsys.readouterr().err.startswith(f"refused: {message}")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="child processes are found in /proc")
def test_a_dry_run_starts_no_process_of_ray(captions: list[str], tmp_path: Path) -> None:
    """In a process of its own, which fails if anything of Ray is started or CUDA is initialised."""
    program = (
        "import os, sys, torch, ray\n"
        "ray.init = None\n"
        "from jobs import caption\n"
        "status = caption.main(sys.argv[1:])\n"
        "children = open(f'/proc/self/task/{os.getpid()}/children').read().split()\n"
        "assert not any('ray' in open(f'/proc/{one}/cmdline').read() for one in children), children\n"
        "assert not torch.cuda.is_initialized()\n"
        "sys.exit(status)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *captions, "--dry-run"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "gpus     pool.num_gpus " in done.stdout
