"""Pages agree with the code: generated pages, links, paths, commands, methods, and the length of the README."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest
import yaml
from pydantic import BaseModel

from configs.presets import method_names
from docgen import columns, config, methods
from docgen.__main__ import outdated
from docgen.markdown import LINE_WIDTH

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = ("configs", "files", "jobs", "pipeline", "actors", "decoding", "models")
PACKAGES = (*SHIPPED, "zoo", "benchmarks", "docgen", "tests")
MAX_README_LINES = 200
MAX_RECORD_LINES = 60
ARCHIVED = re.compile(r"^Measured at commit `\w+` by .*; that code was deleted since\.$", re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)|(?:src|srcset|href)=\"([^\"]+)\"")
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.DOTALL | re.MULTILINE)


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


# --- generated pages -----------------------------------------------------------------------------------------------


def test_generated_pages_are_up_to_date() -> None:
    assert list(map(str, outdated(ROOT))) == [], "run python -m docgen"


def test_an_outdated_page_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "ERROR_CODES", {"broken_image": "changed"})
    assert list(map(str, outdated(ROOT))) == ["docs/reference/error-codes.md"]


@pytest.mark.parametrize(("job", "model"), config.JOBS.items())
def test_every_field_has_a_meaning(job: str, model: type[BaseModel]) -> None:
    missing = [field.key for field in config.fields(model) if not field.meaning]
    assert missing == [], job


@pytest.mark.parametrize("path", sorted((ROOT / "configs/jobs").glob("*.yaml")), ids=lambda path: path.stem)
def test_job_files_are_valid_by_the_json_schema(path: Path) -> None:
    schema = json.loads(read(f"docs/reference/schema/{methods.job_kind(path)}.json"))
    jsonschema.Draft202012Validator(schema).validate(yaml.safe_load(path.read_text()))


def test_the_json_schema_refuses_unknown_keys_and_methods() -> None:
    validator = jsonschema.Draft202012Validator(json.loads(read("docs/reference/schema/caption.json")))
    job = yaml.safe_load(read("configs/jobs/zoo_caption.yaml"))
    assert validator.is_valid({**job, "method": "sage"})
    assert not validator.is_valid({**job, "method": "unknown"})
    assert not validator.is_valid({**job, "surprise": 1})
    assert not validator.is_valid({**job, "sampling": {"top_p": 2}})


# --- the version, the habits ---------------------------------------------------------------------------------------


def stated_versions(read: Callable[[str], str]) -> dict[str, set[str]]:
    """Return the versions of this project that each file states; `read` returns the text of a path."""
    images = dict.fromkeys(("deploy/Dockerfile", "deploy/cluster.yaml", "deploy/rayjob.yaml"), r"/draftfleet:([\w.]+)")
    patterns = {"pyproject.toml": r'^version = "(.*)"$', "CITATION.cff": r"^version: (.*)$", **images}
    stated = {path: set(re.findall(pattern, read(path), re.MULTILINE)) for path, pattern in patterns.items()}
    dated = re.findall(r"^## (\d[\w.]*) — \d{4}-\d\d-\d\d$", read("CHANGELOG.md"), re.MULTILINE)
    return {**stated, "CHANGELOG.md": set(dated[:1])}


def test_every_file_states_the_same_version() -> None:
    stated = stated_versions(read)
    version = tomllib.loads(read("pyproject.toml"))["project"]["version"]
    assert stated == {path: {version} for path in stated}


def test_a_file_with_another_version_is_found() -> None:
    stated = stated_versions(lambda path: read(path).replace("draftfleet:", "draftfleet:9."))
    assert [path for path, versions in stated.items() if versions != stated["pyproject.toml"]] == [
        "deploy/Dockerfile",
        "deploy/cluster.yaml",
        "deploy/rayjob.yaml",
    ]


def test_pre_commit_runs_the_checks_of_make_check() -> None:
    recipe = re.search(r"^check:.*\n((?:\t.*\n)+)", read("Makefile"), re.MULTILINE)
    assert recipe
    commands = [line.strip().replace("$(PY)", ".venv/bin/python") for line in recipe[1].splitlines()]
    repositories = yaml.safe_load(read(".pre-commit-config.yaml"))["repos"]
    assert [repository["repo"] for repository in repositories] == ["local"]
    assert [hook["entry"] for hook in repositories[0]["hooks"]] == commands


# --- the README and the pages of methods ---------------------------------------------------------------------------


def test_the_readme_is_short() -> None:
    lines = read("README.md").splitlines()
    assert len(lines) <= MAX_README_LINES
    assert [line for line in lines if len(line) > LINE_WIDTH] == []


# --- decision records ----------------------------------------------------------------------------------------------


def wide_lines(text: str) -> list[str]:
    """Return the lines wider than `LINE_WIDTH` outside tables and code blocks."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return [line for line in prose.splitlines() if len(line) > LINE_WIDTH and not line.startswith("|")]


def unknown_names(text: str) -> list[str]:
    """Return dotted names in backticks that begin with a package of this repository and name neither a module nor
    a class, function or variable of a module, or a member of its classes."""
    names = re.findall(rf"`((?:{'|'.join(PACKAGES)})(?:\.\w+)+)(?:\([^`]*\))?`", text)
    return [name for name in names if not is_known(name)]


def is_known(name: str) -> bool:
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:length])
        file = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
        if file.is_file():
            return contains(ast.parse(file.read_text(encoding="utf-8")), parts[length:])
    return False


def contains(node: ast.AST, names: list[str]) -> bool:
    """Whether the body of a module or class defines the first name, the body of that the next, and so on."""
    if not names:
        return True
    for child in getattr(node, "body", []):
        targets = [*getattr(child, "targets", []), *([child.target] if isinstance(child, ast.AnnAssign) else [])]
        if names[0] in (getattr(child, "name", None), *map(ast.unparse, targets)):
            return contains(child, names[1:])
    return False


@pytest.mark.parametrize("path", sorted((ROOT / "docs/design/decisions").glob("*.md")), ids=lambda path: path.stem)
def test_a_decision_record_is_one_page_and_names_only_what_exists(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_RECORD_LINES
    assert wide_lines(text) == []
    assert unknown_names(text) == []


def test_a_wide_line_and_an_unknown_name_of_a_record_are_found() -> None:
    wide = "word " * 30
    text = f"{wide}\n```\n{wide}\n```\n| {wide} |\n- {wide}\n"
    assert wide_lines(text) == [wide, f"- {wide}"]
    known = "`pipeline.run.graph` `pipeline.run.graph.MAX_TASK_RETRIES` `decoding.engine.Engine.step()` `source.kind`"
    assert unknown_names(f"{known} `pipeline.sources` `pipeline.run.graph.GONE` `decoding.engine.Engine.gone()`") == [
        "pipeline.sources",
        "pipeline.run.graph.GONE",
        "decoding.engine.Engine.gone",
    ]


# --- links, paths, commands ----------------------------------------------------------------------------------------


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings: lower case, punctuation dropped, spaces replaced by hyphens."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(text: str, folder: Path) -> list[str]:
    """Return relative link targets of a page in `folder` whose file or heading does not exist; external URLs are
    skipped."""
    broken = []
    for match in LINK.finditer(CODE.sub("", text)):
        target = match[1] or match[2]
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", path):
            continue
        page = folder / path if path else None
        if page is not None and not page.exists():
            broken.append(path)
        elif anchor and anchor not in anchors(page.read_text(encoding="utf-8") if page else text):
            broken.append(f"{path}#{anchor}")
    return broken


def documents() -> list[str]:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "zoo").glob("*.md")]
    # The changelog is history: it names files that are gone.
    return sorted(path.relative_to(ROOT).as_posix() for path in pages if path.name != "CHANGELOG.md")


@pytest.mark.parametrize("path", documents())
def test_links_between_pages_are_valid(path: str) -> None:
    assert broken_links(read(path), (ROOT / path).parent) == []


def test_the_link_check_finds_a_missing_page_and_a_missing_heading(tmp_path: Path) -> None:
    (tmp_path / "there.md").write_text("# A heading, with a comma\n")
    text = "[a](there.md) [b](there.md#a-heading-with-a-comma) [c](there.md#other) [d](gone.md) [e](https://x.test/#y)"
    assert broken_links(text, tmp_path) == ["there.md#other", "gone.md"]


@pytest.mark.parametrize("path", [*documents(), "docs/design/graph.svg"])
def test_documents_name_only_paths_that_exist(path: str) -> None:
    """Paths in backticks that begin with a folder of this repository."""
    names = re.findall(rf"`((?:{'|'.join([*PACKAGES, 'docs'])})/[\w./-]*)`", read(path))
    assert [name for name in names if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("path", documents())
def test_commands_in_the_documents_exist(path: str) -> None:
    """Commands of deleted benchmarks are named below their tables only, with the commit that has them."""
    text = ARCHIVED.sub("", read(path))
    verbs = {verb for pair in re.findall(r"^ *make ([a-z-]+)|`make ([a-z-]+)`", text, re.MULTILINE) for verb in pair}
    targets = set(re.findall(r"^([a-z-]+):", read("Makefile"), re.MULTILINE))
    assert verbs - {""} <= targets
    modules = [ROOT / name.replace(".", "/") for name in re.findall(r"python -m ([a-z_]+(?:\.[a-z_]+)+)\b", text)]
    runs = [module.with_suffix(".py").is_file() or (module / "__main__.py").is_file() for module in modules]
    assert [str(module) for module, is_runnable in zip(modules, runs, strict=True) if not is_runnable] == []


@pytest.mark.parametrize("path", documents())
def test_methods_in_commands_exist(path: str) -> None:
    named = set(re.findall(r"(?<![\w.])method=(\w+)", read(path)))
    assert named - {*method_names(), "NAME"} == set()
