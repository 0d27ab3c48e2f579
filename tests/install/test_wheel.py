"""A wheel in an environment of its own, used outside the checkout: jobs, kills, and a cluster without a checkout."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import wheel_layout
from tests.jobs.cluster import local_cluster
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]
NUM_PICTURES = 10
TIMEOUT_S = 1500
pytestmark = [pytest.mark.timeout(3600), pytest.mark.slow]


@dataclass(frozen=True)
class Installed:
    """An environment with the wheel, and an empty working directory elsewhere."""

    python: Path
    work: Path

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        """Start `draftfleet` in the working directory."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHONPATH", "RAY_"))}
        command = [str(self.python.with_name("draftfleet")), *arguments]
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        environment = {**kept, "OMP_NUM_THREADS": "1", **variables}
        return subprocess.Popen(command, cwd=self.work, env=environment, **options)  # type: ignore[call-overload,no-any-return]

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run `draftfleet` to its end."""
        process = self.start(*arguments, **variables)
        out, err = process.communicate(timeout=TIMEOUT_S)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def pythons(self, program: str) -> str:
        """The output of a program in the working directory."""
        command = [str(self.python), "-c", program]
        return subprocess.run(command, cwd=self.work, capture_output=True, text=True, check=True).stdout.strip()


def build(folder: Path) -> Path:
    """The wheel of a source distribution of this checkout, which is not written to."""
    assert importlib.util.find_spec("setuptools"), "building a wheel needs setuptools: pip install 'setuptools>=77'"
    copy = folder / "checkout"
    for path in (*wheel_layout.sources(ROOT), *(ROOT / "draftfleet").iterdir()):
        if path.is_file():
            copied = copy / path.relative_to(ROOT)
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copied)
    for name in ("pyproject.toml", "wheel_layout.py", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, copy / name)
    packed = "import setuptools.build_meta as backend; backend.build_sdist('.')"
    subprocess.run([sys.executable, "-c", packed], cwd=copy, check=True, capture_output=True)
    (archive,) = copy.glob("draftfleet-*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(folder / "source", filter="data")
    (source,) = (folder / "source").iterdir()
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-w",
        str(folder),
    ]
    subprocess.run([*command, str(source)], check=True, capture_output=True)
    (wheel,) = folder.glob("draftfleet-*.whl")
    return wheel


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheel in a new environment, which takes the dependencies, and only these, from the one of the tests."""
    folder = tmp_path_factory.mktemp("install")
    wheel = build(folder)
    venv.create(folder / "venv", symlinks=True)
    python, work = folder / "venv/bin/python", folder / "work"
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(command, check=True, capture_output=True)
    (packages,) = (folder / "venv/lib").glob("python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    for name in ("models", "configs"):  # the user's own packages
        (work / name).mkdir(parents=True)
        (work / name / "__init__.py").write_text("raise AssertionError('imported')")
    (work / "pictures").mkdir()
    for index in range(NUM_PICTURES):
        picture = np.full((40, 60, 3), 20 * index, np.uint8)
        Image.fromarray(picture).save(work / f"pictures/{index}.png")
    return Installed(python, work)


def test_the_package_is_the_one_of_the_wheel(installed: Installed) -> None:
    output = installed.pythons(
        "import draftfleet, draftfleet.decoding as d; print(draftfleet.__file__); print(d.__name__)"
    )
    assert output.splitlines()[0].startswith(str(installed.python.parents[1]))
    assert output.splitlines()[1] == "draftfleet.decoding"
    assert installed.pythons("import sys, draftfleet.jobs.cli; print({'ray', 'torch'} & {*sys.modules})") == "set()"


def test_the_command_shows_help_completion_and_its_version(installed: Installed) -> None:
    assert "caption " in installed.run("--help").stdout
    shown = installed.run("caption", "--help").stdout
    assert "example: draftfleet caption demo_folder" in shown
    assert "python -m jobs" not in shown
    script = installed.run("completion", "bash").stdout
    program = f"{script}\nCOMP_WORDS=(draftfleet caption demo_f); COMP_CWORD=2; _draftfleet; echo $COMPREPLY"
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "demo_folder\n"
    assert installed.run("--version").stdout.startswith("draftfleet ")
    wrong = installed.run("captoin")
    assert (wrong.returncode, wrong.stderr) == (2, "draftfleet: there is no command 'captoin'; did you mean caption?\n")


JOB = (
    *("demo_folder", "source.path=pictures", "sink.path=out", "sampling.max_new_tokens=12"),
    *("sink.rows_per_file=2", "sink.max_unsaved_seconds=0", "pool={slots: 2, batch_rows: 2, max_context_tokens: 256}"),
)


def test_a_job_beside_foreign_packages_is_killed_resumed_checked_and_verified(installed: Installed) -> None:
    output = installed.work / "out"
    with installed.start("caption", *JOB) as process:
        until(lambda: process.poll() is not None or list(output.glob("data/*.parquet")))
        process.send_signal(signal.SIGKILL)
        out, err = process.communicate()
    assert process.returncode == -signal.SIGKILL, out + err
    assert installed.run("check", "out").returncode == 1
    done = installed.run("caption", *JOB)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{NUM_PICTURES} success" in done.stdout or f"{NUM_PICTURES} truncated" in done.stdout
    assert "run it again  draftfleet caption --config demo_folder" in done.stdout
    checked = installed.run("check", "out")
    assert checked.returncode == 0, checked.stdout
    assert f"rows      {NUM_PICTURES} in data/, 0 in errors/" in checked.stdout
    verified = installed.run("verify", "out", "--share", "1")
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert f"{NUM_PICTURES} equal" in verified.stdout
    versions = (output / "_job/versions.json").read_text()
    assert '"code_revision": "version:' in versions
    assert str(installed.python.parents[1]) not in versions


def test_a_model_that_only_a_checkout_has_is_refused(installed: Installed) -> None:
    done = installed.run("caption", "zoo_caption_medusa", "source={kind: images, path: pictures}", "sink.path=other")
    assert done.returncode == 2
    assert "model.drafter: zoo/checkpoints/caption_medusa: this model is part of a checkout only" in done.stderr


@pytest.fixture(scope="module")
def cluster_run(installed: Installed) -> Iterator[subprocess.CompletedProcess[str]]:
    """The same job, submitted to a cluster whose processes know no checkout."""
    with local_cluster(str(installed.python)) as cluster:
        here = str(installed.work)
        job = [word.replace("=pictures", f"={here}/pictures").replace("=out", f"={here}/far") for word in JOB]
        yield installed.run("submit", *job, "--address", cluster.address, HOME=str(cluster.home))


def test_a_cluster_whose_nodes_have_the_wheel_runs_a_submitted_job(
    installed: Installed, cluster_run: subprocess.CompletedProcess[str]
) -> None:
    assert cluster_run.returncode == 0, cluster_run.stdout + cluster_run.stderr
    assert "draftfleet caption --config demo_folder" in cluster_run.stdout
    assert installed.run("check", "far").returncode == 0
