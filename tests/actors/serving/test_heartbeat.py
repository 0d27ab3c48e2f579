"""Tests that the heartbeat reader kills a stopped process, and ends when its process ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.deaths import children_of
from tests.waiting import PATIENCE_S, until

ROOT = Path(__file__).resolve().parents[3]

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc"), pytest.mark.slow]


@pytest.fixture
def guarded(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A guarded process that runs until its input ends."""
    imports = "import sys; from actors.serving import heartbeat"
    program = f"{imports}; heartbeat.start({request.param}); print('up', flush=True)"
    with (tmp_path / "stderr").open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-c", f"{program}; sys.stdin.read()"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            start_new_session=True,
        )
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stdout.readline() == "up\n"
    yield process
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


@pytest.mark.parametrize("guarded", [5.0], indirect=True)
@pytest.mark.parametrize("is_group", [False, True], ids=["process", "group"])
def test_a_stopped_process_is_killed(guarded: subprocess.Popen[str], is_group: bool, tmp_path: Path) -> None:
    if is_group:
        os.killpg(guarded.pid, signal.SIGSTOP)
    else:
        os.kill(guarded.pid, signal.SIGSTOP)
    assert guarded.wait(PATIENCE_S) == -signal.SIGKILL
    until(lambda: f"process {guarded.pid} sent no heartbeat for 5 s" in (tmp_path / "stderr").read_text())


@pytest.mark.parametrize("guarded", [3600.0], indirect=True)
def test_a_guard_ends_with_its_process_and_is_replaced_when_it_dies(guarded: subprocess.Popen[str]) -> None:
    first = until(lambda: set(children_of(guarded.pid)))
    os.kill(first.copy().pop(), signal.SIGKILL)
    second = until(lambda: set(children_of(guarded.pid)) - first)
    assert len(second) == 1
    assert guarded.poll() is None
    assert guarded.stdin is not None
    guarded.stdin.close()
    assert guarded.wait(PATIENCE_S) == 0
    until(lambda: not Path(f"/proc/{second.copy().pop()}").exists() or None)


@pytest.mark.parametrize("guarded", [None], indirect=True)
def test_without_a_limit_there_is_no_guard(guarded: subprocess.Popen[str]) -> None:
    assert children_of(guarded.pid) == {}
