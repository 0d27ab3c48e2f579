"""Code that job files name: found, hashed, shipped and imported; shadowing and bounds are refused."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from ray import cloudpickle

from files import external_code
from files.external_code import MAX_FILES, ExternalCodeError, find, install, is_external, load


def write(folder: Path, **files: str) -> Path:
    """Writes files by dotted module name, `__` for a dot."""
    for name, text in files.items():
        path = folder.joinpath(*name.split("__")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def package(folder: Path) -> Path:
    write(folder, mine__parts="from .base import Base\nfrom mine_words import WORD\nclass Part(Base): word = WORD\n")
    write(folder, mine__base="class Base: pass\n", mine_words="WORD = 'a'\n", unrelated="raise RuntimeError\n")
    (folder / "mine/__init__.py").write_text("import numpy, json\n")
    return folder


@pytest.mark.parametrize("name", ["m:C", "a.b_1:make", "A:b"])
def test_names_of_external_code(name: str) -> None:
    assert is_external(name)


@pytest.mark.parametrize("name", ["model", "m:", ":C", "m:C.d", "/m:C", "m..n:C", "m:C ", "1m:C", "m:C\n"])
def test_other_names_are_not_names_of_external_code(name: str) -> None:
    assert not is_external(name)


def test_a_module_is_found_with_its_packages_and_the_modules_it_imports(tmp_path: Path) -> None:
    code = find(["mine.parts:Part"], [package(tmp_path)])
    assert sorted(code.files) == ["mine", "mine.base", "mine.parts", "mine_words"]
    install(code.files)
    part = load("mine.parts:Part")
    assert (part.word, part.__mro__[1].__name__, part.__module__) == ("a", "Base", "mine.parts")


def test_finding_code_does_not_run_it(tmp_path: Path) -> None:
    find(["m:C"], [write(tmp_path, m="raise SystemExit(1)\n")])


def test_the_text_that_was_hashed_is_imported_although_the_file_has_changed(tmp_path: Path) -> None:
    code = find(["m:VALUE"], [write(tmp_path, m="VALUE = 1\n")])
    write(tmp_path, m="VALUE = 2\n")
    install(code.files)
    assert load("m:VALUE") == 1
    install(find(["m:VALUE"], [tmp_path]).files)
    assert load("m:VALUE") == 2


def test_the_digest_changes_with_every_needed_file_and_with_no_other(tmp_path: Path) -> None:
    package(tmp_path)
    digests = [find(["mine.parts:Part"], [tmp_path]).digests["mine.parts:Part"]]
    write(tmp_path, unrelated="1\n")
    assert find(["mine.parts:Part"], [tmp_path]).digests["mine.parts:Part"] == digests[0]
    for name in ("mine__parts", "mine__base", "mine____init__", "mine_words"):
        path = tmp_path.joinpath(*name.replace("____", "__").split("__", 1)).with_suffix(".py")
        path = tmp_path / "mine/__init__.py" if name == "mine____init__" else path
        path.write_text(path.read_text() + "# changed\n")
        digests.append(find(["mine.parts:Part"], [tmp_path]).digests["mine.parts:Part"])
    assert len(set(digests)) == len(digests)


def test_an_installed_module_is_hashed_and_not_shipped() -> None:
    code = find(["pydantic.fields:Field"], [])
    assert not code.files
    assert len(code.digests["pydantic.fields:Field"]) == 64


def test_a_folder_without_init_is_a_package(tmp_path: Path) -> None:
    install(
        find(["space.m:VALUE"], [write(tmp_path, space__m="from space.n import VALUE\n", space__n="VALUE = 3\n")]).files
    )
    assert load("space.m:VALUE") == 3


@pytest.mark.parametrize(
    ("files", "name", "reason"),
    [
        ({}, "nowhere_x:C", "there is no module 'nowhere_x'"),
        ({"mine__a": ""}, "mine.b:C", "there is no module 'mine.b'"),
        ({"m": ""}, "m.py:C", "there is no module 'm.py' in .*; write 'm'"),
        ({"models__own": ""}, "models.own:C", "would shadow the package 'models' of draftfleet"),
        ({"m": "import json\n", "json": ""}, "m:C", "json.py has the name of a module of Python; rename it"),
        ({"m": "import configs\n", "configs": ""}, "m:C", "configs.py has the name of a module of draftfleet"),
        ({"random": ""}, "random:C", "would shadow the module 'random' of Python"),
        ({"pydantic": ""}, "pydantic:C", "would shadow the installed module"),
        ({"m": "def broken(:\n"}, "m:C", "m.py, line 1 is no valid Python"),
        ({"m": "import n\n", "n": "1 +\n"}, "m:C", "n.py, line 1 is no valid Python"),
        ({}, "sys:path", "'sys' has no file"),
    ],
)
def test_code_that_cannot_be_taken_is_refused(tmp_path: Path, files: dict[str, str], name: str, reason: str) -> None:
    with pytest.raises(ExternalCodeError, match=reason):
        find([name], [write(tmp_path, **files)])


def test_the_number_of_shipped_files_is_bounded(tmp_path: Path) -> None:
    names = [f"mine_{number}" for number in range(MAX_FILES)]
    imports = "".join(f"import {name}\n" for name in names[1:])
    write(tmp_path, **{**dict.fromkeys(names, ""), "mine_0": imports})
    assert len(find(["mine_0:C"], [tmp_path]).files) == MAX_FILES
    write(tmp_path, mine_0=imports + "import mine_more\n", mine_more="")
    with pytest.raises(ExternalCodeError, match=f"more than {MAX_FILES} files"):
        find(["mine_0:C"], [tmp_path])


def test_a_module_that_raises_and_a_missing_name_are_refused(tmp_path: Path) -> None:
    install(find(["m:C", "n:C"], [write(tmp_path, m="1 / 0\n", n="first = second = 1\n")]).files)
    with pytest.raises(ExternalCodeError, match="'m' cannot be imported: ZeroDivisionError"):
        load("m:C")
    with pytest.raises(ExternalCodeError, match="'n' has no 'C'; it has first, second"):
        load("n:C")


def test_another_process_imports_the_shipped_text(tmp_path: Path) -> None:
    install(find(["mine.parts:Part"], [package(tmp_path / "here")]).files)
    made = pickle.dumps(load("mine.parts:Part")())
    (tmp_path / "hook").write_bytes(cloudpickle.dumps(external_code.shipping()))
    (tmp_path / "made").write_bytes(made)
    script = (
        "import pickle, sys, traceback; pickle.load(open('hook', 'rb'))(); part = pickle.load(open('made', 'rb'));"
        "print(part.word, 'mine_words' in sys.modules)"
    )
    root = str(Path(external_code.__file__).parents[1])
    environment = {"PYTHONPATH": root, "PATH": ""}
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["a", "True"], done.stderr
