"""The layout of a wheel: imports are prefixed, nothing else changes, and what cannot be prefixed ends the build."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import wheel_layout
from draftfleet import checkout
from wheel_layout import LayoutError, prefixed

ROOT = Path(__file__).resolve().parents[2]
OWN = (*wheel_layout.PACKAGES, "zoo")
MAX_WHEEL_BYTES = 25 * 1024**2


def imported(source: bytes) -> list[str]:
    """The modules of all imports of a source, in order."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            names.append("." * node.level + (node.module or ""))
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return names


def expected(names: list[str]) -> list[str]:
    return [f"draftfleet.{name}" if name.partition(".")[0] in OWN else name for name in names]


MODULES = st.sampled_from(["pipeline.rows.schemas", "models", "jobs.caption", "numpy", "pipelines.x", "os.path"])
STATEMENTS = st.one_of(
    st.builds("from {} import a, b as c".format, MODULES),
    st.builds("from  {} import (\n    a,\n    b,\n)".format, MODULES),
    st.builds("import {} as a, {} as b".format, MODULES, MODULES),
    st.builds("é = 'from {} import x'; from {} import y".format, MODULES, MODULES),
    st.builds('"""import {} and from {} import x"""  # from models import y'.format, MODULES, MODULES),
    st.just("x = 1\n\n"),
)
BLOCKS = st.one_of(
    STATEMENTS,
    STATEMENTS.map(lambda text: "def f():\n    " + text.replace("\n", "\n    ")),
    STATEMENTS.map(lambda text: "if x:\n\tpass\nelse:\n\t" + text.replace("\n", "\n\t")),
)


@given(st.lists(BLOCKS, max_size=8))
def test_imports_of_any_source_are_prefixed_and_its_lines_and_other_text_stay(blocks: list[str]) -> None:
    source = "\n".join(blocks).encode()
    result = prefixed(source, "some.py")
    assert imported(result) == expected(imported(source))
    assert result.count(b"\n") == source.count(b"\n")
    number_of_edits = sum(name != old for name, old in zip(imported(result), imported(source), strict=True))
    assert len(result) == len(source) + number_of_edits * len("draftfleet.")
    assert prefixed(result, "some.py") == result


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    return dict(wheel_layout.wheel_files(ROOT))


def test_every_file_of_a_wheel_compiles_and_imports_nothing_of_the_checkout(files: dict[str, bytes]) -> None:
    modules = {path: content for path, content in files.items() if path.endswith(".py")}
    assert len(modules) > 250
    for path, content in modules.items():
        assert [name for name in imported(content) if name.partition(".")[0] in OWN] == [], path
        original = ROOT / path.removeprefix("draftfleet/")
        if original.is_file():
            assert content.count(b"\n") == original.read_bytes().count(b"\n"), path


def test_a_wheel_has_the_code_its_data_and_a_few_models_and_nothing_else(files: dict[str, bytes]) -> None:
    assert {path.split("/")[0] for path in files} == {"draftfleet"}
    assert {path.split("/")[1] for path in files} == {"__init__.py", "__main__.py", "py.typed", *OWN}
    for name in (
        *("configs/jobs/demo_folder.yaml", "configs/methods/sage.yaml", "pipeline/reports/templates/report.html.j2"),
        *("models/backends/cpu/gemm.cpp", "models/backends/cpu/vectors.h"),
        "zoo/checkpoints/caption_target/model.safetensors",
    ):
        assert f"draftfleet/{name}" in files
    assert not [path for path in files if "__pycache__" in path or path.startswith("draftfleet/zoo/real")]
    assert sum(map(len, files.values())) < MAX_WHEEL_BYTES


def test_the_packages_of_a_wheel_are_those_of_the_aliases_in_a_checkout() -> None:
    assert (*wheel_layout.PACKAGES, "zoo") == checkout.PACKAGES


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("x = 1\nimport pipeline.run\n", "x.py:2: `import pipeline.run` cannot be prefixed"),
        ("import os, models\n", "x.py:1: `import models` cannot be prefixed"),
        ("from pipeline.\\\n    run import x\n", "x.py:1: write the import of pipeline.run in one line"),
        ("from \\\n  models import x\n", "x.py:1: write the import of models in one line"),
        (
            "\nM = 'pipeline.media.video.child'\n",
            "x.py:2: the string 'pipeline.media.video.child' is the name of",
        ),
        ("f('jobs.caption')\n", "x.py:1: the string 'jobs.caption' is the name of a module"),
        ("x = f'{y}' 'models.backends'\n", "x.py:1: the string 'models.backends' is the name of a module"),
    ],
)
def test_what_cannot_be_prefixed_is_refused_with_its_file_and_line(source: str, reason: str) -> None:
    with pytest.raises(LayoutError) as refused:
        prefixed(source.encode(), "x.py")
    assert str(refused.value).startswith(reason)


def test_texts_that_resemble_modules_are_not_prefixed() -> None:
    source = b"a = 'source.path', 'model.target', 'jobs', 'pipeline.gone', 'models.target is one', 'files.'\n"
    assert prefixed(source, "x.py") == source


def test_a_missing_folder_ends_the_build(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match="jobs: the folder is missing or empty"):
        list(wheel_layout.sources(tmp_path))
