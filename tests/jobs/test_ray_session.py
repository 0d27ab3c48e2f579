"""Local runs are isolated: no foreign Ray, no files in HOME or in the temporary folder, no extra output."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from configs.pool import JobSectionConfig
from pipeline.cluster import ray_session

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.usefixtures("local_ray")
def test_a_ray_that_this_process_runs_already_is_used_and_left_running() -> None:
    import ray

    node = ray.get_runtime_context().get_node_id()
    with ray_session.session(JobSectionConfig()):
        assert ray.get_runtime_context().get_node_id() == node
    assert ray.is_initialized()


def test_the_environment_is_restored_also_if_the_block_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)

    def fail_inside() -> None:
        with ray_session.environment({"RAY_ADDRESS": None, "RAY_AUTH_TOKEN": "t"}):
            assert "RAY_ADDRESS" not in os.environ
            assert os.environ["RAY_AUTH_TOKEN"] == "t"
            raise KeyError

    with pytest.raises(KeyError):
        fail_inside()
    assert os.environ["RAY_ADDRESS"] == "10.0.0.1:6379"
    assert "RAY_AUTH_TOKEN" not in os.environ


def test_a_small_shared_memory_moves_the_object_store_to_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 64 * 1024**2

    monkeypatch.setattr(ray_session.shutil, "disk_usage", lambda path: Usage)
    monkeypatch.setattr(ray_session.sys, "platform", "linux")
    assert ray_session._object_store(tmp_path)["_plasma_directory"] == str(tmp_path)


def test_a_job_from_the_command_line_is_quiet_and_leaves_nothing_behind(tmp_path: Path) -> None:
    pictures, home = tmp_path / "pictures", tmp_path / "home"
    pictures.mkdir()
    home.mkdir()
    for index in range(3):
        Image.fromarray(np.full((40, 60, 3), 80 * index, np.uint8)).save(pictures / f"{index}.png")
    short = Path(tempfile.mkdtemp(prefix="t-", dir="/tmp"))  # sockets below it: pytest's own folder is too deep
    program = (
        "import sys; from jobs import caption; from pipeline.cluster import ray_session; "
        f"ray_session._short_temporary_root = lambda: {str(short)!r}; sys.exit(caption.main())"
    )
    pair = ROOT / "zoo/checkpoints"
    command = [
        *(sys.executable, "-c", program, "--config", "configs/jobs/caption_folder.yaml"),
        *(f"source.path={pictures}", f"sink.path={tmp_path}/out"),
        f"model.target={{path: {pair}/caption_target}}",
        f"model.drafter={{path: {pair}/caption_drafter}}",
        *("pool={slots: 4, max_context_tokens: 256}", "sampling.max_new_tokens=5"),
    ]
    environment = {**os.environ, "HOME": str(home), "RAY_ADDRESS": "127.0.0.1:1", "PYTHONPATH": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stderr
    assert "3 (3 truncated)" in done.stdout
    for word in ("WARNING", "ERROR", "Warning", " W ", " E ", "Traceback"):
        assert word not in done.stderr + done.stdout
    progress = ("rows/s", "loading weights", "measuring the memory", "building the engine", "waiting for the first")
    assert [line for line in done.stderr.splitlines() if not any(words in line for words in progress)] == []
    assert [path.name for path in home.iterdir() if path.name == ".ray"] == []
    short.rmdir()  # which fails unless the run has left it empty
