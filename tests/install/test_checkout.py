"""Imports in a checkout: `draftfleet.X` is `X`, and a foreign package with the name of ours is refused."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def python(program: str, cwd: Path, path: str, *options: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, *options, "-c", program], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("name", ["decoding", "decoding.types", "configs.load", "files", "pipeline.rows.schemas"])
def test_a_module_below_draftfleet_is_the_top_level_module(name: str) -> None:
    alias, module = importlib.import_module(f"draftfleet.{name}"), importlib.import_module(name)
    assert alias is module
    assert module.__spec__ is not None
    assert (module.__name__, module.__spec__.name) == (name, name)


def test_names_and_lazy_attributes_are_imported_through_the_alias() -> None:
    alias = importlib.import_module("draftfleet.decoding")
    from draftfleet.decoding.types import Request  # type: ignore[import-not-found]

    assert alias.Engine is importlib.import_module("decoding.engine").Engine  # imported by decoding.__getattr__
    assert Request is importlib.import_module("decoding").Request


def test_a_module_that_does_not_exist_is_named() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"draftfleet\.decoding\.gone"):
        importlib.import_module("draftfleet.decoding.gone")
    with pytest.raises(ModuleNotFoundError, match=r"draftfleet\.benchmarks"):
        importlib.import_module("draftfleet.benchmarks")


def test_a_module_that_fails_is_not_left_behind(tmp_path: Path) -> None:
    program = """
import sys, draftfleet, files
open(sys.argv[1] + "/broken.py", "w").write("raise ValueError('broken')")
files.__path__.append(sys.argv[1])
for _ in range(2):
    try:
        import draftfleet.files.broken
    except ValueError:
        assert "draftfleet.files.broken" not in sys.modules
    else:
        raise SystemExit("imported")
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_root_is_put_on_the_path_and_modules_run_by_their_alias(tmp_path: Path) -> None:
    program = f"""
import importlib.util, sys
folder = {str(ROOT / "draftfleet")!r}
places = {{"submodule_search_locations": [folder]}}
found = importlib.util.spec_from_file_location("draftfleet", folder + "/__init__.py", **places)
sys.modules["draftfleet"] = module = importlib.util.module_from_spec(found)  # as an editable install finds it
found.loader.exec_module(module)
import draftfleet.decoding.types, decoding.types
assert draftfleet.decoding.types is decoding.types
"""
    done = python(program, tmp_path, "")
    assert done.returncode == 0, done.stderr
    command = [sys.executable, "-m", "draftfleet.jobs.cli", "--version"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()[0]) == (0, "draftfleet"), done.stderr


@pytest.mark.parametrize("program", ["import jobs.cli", "import draftfleet", "import models, draftfleet"])
def test_a_foreign_package_that_comes_first_is_refused_with_both_paths(tmp_path: Path, program: str) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models/__init__.py").write_text("")
    done = python(program, tmp_path, f"{tmp_path}{os.pathsep}{ROOT}")
    assert done.returncode == 1
    line = done.stderr.strip().splitlines()[-1]
    assert line.startswith(f"ImportError: the package 'models' of {tmp_path}/models comes before {ROOT}/models on ")


def test_packages_of_folders_that_are_put_on_the_path_later_are_not_imported(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models/__init__.py").write_text("raise AssertionError")
    program = f"import sys, draftfleet; sys.path.insert(0, {str(tmp_path)!r}); import models; print(models.__file__)"
    done = python(program, tmp_path.parent, str(ROOT))
    assert done.stdout == f"{ROOT}/models/__init__.py\n", done.stderr


def test_a_folder_without_a_package_and_a_package_that_comes_later_change_nothing(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    program = f"import jobs.cli, models; assert models.__file__.startswith({str(ROOT)!r})"
    done = python(program, tmp_path, f"{tmp_path}{os.pathsep}{ROOT}")
    assert done.returncode == 0, done.stderr
    (tmp_path / "models/__init__.py").write_text("")
    done = python(program, ROOT, f"{ROOT}{os.pathsep}{tmp_path}")
    assert done.returncode == 0, done.stderr
