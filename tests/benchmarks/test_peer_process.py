"""A peer process answers in order and can be paused; its failures are reported with the end of its log."""

from __future__ import annotations

import ast
import os
import sys
import time
from pathlib import Path

import pytest

from benchmarks.harness.process import ROOT, Outcome, Peer, PeerError, Work, group_members

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
WORK = Work("target", "drafter", "float32", 1, 5, 8, 64, 4, False, ["a", "b", "c"], [[1, 2], [3], [4, 5, 6]])


def start(folder: Path, mode: str, work: Work = WORK) -> Peer:
    work.write(folder / "work.json")
    command = [sys.executable, "-m", "tests.benchmarks.toy_peer", str(folder / "work.json"), mode]
    return Peer(mode, command, os.environ, folder / "logs" / f"{mode}.log")


def test_output_printed_by_libraries_does_not_disturb_the_answers_of_a_peer(tmp_path: Path) -> None:
    with start(tmp_path, "echo") as peer:
        peer.wait_ready()
        assert peer.versions == {"toy": "1"}
        assert peer.ask("warm", 2, 3) == Outcome(0.5, [[2, 1], [3]], 4, 6)
        assert peer.ask("run", 1, 3) == Outcome(0.5, [[2, 1], [3], [6, 5, 4]], 4, 6)
    log = (tmp_path / "logs" / "echo.log").read_text()
    assert log.count("noise between the answers") == 2


def test_a_paused_peer_does_not_run_until_it_is_resumed(tmp_path: Path) -> None:
    with start(tmp_path, "echo") as peer:
        peer.wait_ready()
        peer.pause()
        with pytest.raises(PeerError, match="no answer within 0 s"):
            peer.ask("run", 1, 3, limit_s=0.2)
        (pid,) = group_members(peer._process.pid)
        assert Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        peer.resume()
        assert peer._receive(900.0)["outcome"]["seconds"] == 0.5


@pytest.mark.parametrize(("mode", "message"), [("fail", "RuntimeError: out of toys"), ("die", "it has ended")])
def test_a_failing_peer_is_reported_with_its_error_and_log(tmp_path: Path, mode: str, message: str) -> None:
    with start(tmp_path, mode) as peer:
        peer.wait_ready()
        with pytest.raises(PeerError) as caught:
            peer.ask("run", 1, 3)
        assert f"{mode}: {message}" in str(caught.value)
        assert "noise between the answers" in str(caught.value)


def test_a_peer_that_hangs_is_killed_also_while_it_is_paused(tmp_path: Path) -> None:
    with start(tmp_path, "hang") as peer:
        peer.wait_ready()
        with pytest.raises(PeerError, match="no answer within"):
            peer.ask("run", 1, 1, limit_s=0.2)
        peer.pause()
        begun = time.monotonic()
    assert time.monotonic() - begun < 900
    assert group_members(peer._process.pid) == []
    peer.close()


def test_modules_for_peer_environments_import_no_dependency_of_this_project() -> None:
    for name, allowed in {
        "harness/process": set(),
        "peers/vllm_peer": {"torch", "transformers", "vllm", "benchmarks.harness.process"},
    }.items():
        tree = ast.parse((ROOT / "benchmarks" / f"{name}.py").read_text())
        named = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        named |= {part.name for node in ast.walk(tree) if isinstance(node, ast.Import) for part in node.names}
        foreign = {module for module in named if module and module.split(".")[0] not in sys.stdlib_module_names}
        assert foreign == allowed
