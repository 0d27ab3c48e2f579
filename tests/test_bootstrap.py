"""`make` before an environment exists: its choice of interpreter and torch, and its error messages."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import bootstrap


def put_program(folder: Path, name: str, body: str) -> None:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def pretend_version(folder: Path, name: str, version: str) -> None:
    put_program(folder, name, f"echo {version}")


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty PATH, and an own interpreter that is too old."""
    folder = tmp_path / "bin"
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(bootstrap.sys, "executable", "")
    monkeypatch.delenv("PYTHON", raising=False)
    return folder


def test_the_newest_interpreter_that_really_runs_comes_first(programs: Path) -> None:
    put_program(programs, "python3.13", "echo 'pyenv: python3.13: command not found' >&2; exit 127")
    pretend_version(programs, "python3.12", "3 12")
    pretend_version(programs, "python3.11", "3 11")
    pretend_version(programs, "python3", "3 15")
    assert bootstrap.interpreters() == [str(programs / "python3.12"), str(programs / "python3.11")]


def test_a_named_interpreter_is_the_only_candidate(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_version(programs, "python3.12", "3 12")
    pretend_version(programs, "python3.11", "3 11")
    monkeypatch.setenv("PYTHON", "python3.11")
    assert bootstrap.interpreters() == [str(programs / "python3.11")]
    monkeypatch.setenv("PYTHON", "python3.10")
    with pytest.raises(bootstrap.Refused, match=r"PYTHON=python3\.10 is not a Python from 3\.11 to below 3\.15"):
        bootstrap.interpreters()


def test_without_a_supported_interpreter_the_supported_versions_are_printed(programs: Path) -> None:
    pretend_version(programs, "python3", "3 9")
    with pytest.raises(bootstrap.Refused, match=r"needs Python 3\.11 or newer, below 3\.15, and found none"):
        bootstrap.interpreters()


def test_a_missing_venv_module_is_named_with_its_package(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_program(programs, "python3.12", '[ "$1" = -c ] && { echo 3 12; exit 0; }; echo "No module named venv"; exit 1')
    monkeypatch.setattr(bootstrap, "VENV", tmp_path / ".venv")
    with pytest.raises(bootstrap.Refused, match=r"`apt install python3\.12-venv`[^$]*No module named venv"):
        bootstrap.make_venv(str(programs / "python3.12"))
    assert not (tmp_path / ".venv").exists()


def test_a_cpu_machine_takes_the_newest_interpreter_that_has_a_cpu_build(
    programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_version(programs, "python3.13", "3 13")
    pretend_version(programs, "python3.11", "3 11")
    made: list[str] = []
    monkeypatch.setattr(bootstrap, "make_venv", lambda interpreter: made.append(Path(interpreter).name))
    monkeypatch.setattr(bootstrap, "resolves", lambda *arguments: made[-1] == "python3.11")
    monkeypatch.setattr(bootstrap, "cpu_only_linux", lambda: True)
    pin = bootstrap.torch_pin()
    assert bootstrap.choose_torch("") == [f"{pin}+cpu"]
    assert made == ["python3.13", "python3.11"]


def test_a_given_index_decides(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_version(programs, "python3.12", "3 12")
    monkeypatch.setattr(bootstrap, "make_venv", lambda interpreter: None)
    pin = bootstrap.torch_pin()
    assert bootstrap.choose_torch("https://example.org/whl") == [pin, "--extra-index-url", "https://example.org/whl"]


def test_the_pin_is_the_one_of_the_project_file() -> None:
    import torch

    assert bootstrap.torch_pin() == f"torch=={torch.__version__.split('+')[0]}"
    assert bootstrap.version_of(sys.executable) == sys.version_info[:2]
