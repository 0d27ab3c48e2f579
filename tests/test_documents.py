"""Pages agree with the code: generated pages, links, paths, commands, methods, and the length of the README."""

from __future__ import annotations

import json
import re
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


# --- the README and the pages of methods ---------------------------------------------------------------------------


def test_the_readme_is_short() -> None:
    lines = read("README.md").splitlines()
    assert len(lines) <= MAX_README_LINES
    assert [line for line in lines if len(line) > LINE_WIDTH] == []


# --- links, paths, commands ----------------------------------------------------------------------------------------


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings: lower case, punctuation dropped, spaces replaced by hyphens."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(text: str, folder: Path) -> list[str]:
    """Return relative link targets of a page in `folder` whose file or heading does not exist; external URLs are
    skipped."""
    broken = []
    for found in LINK.finditer(CODE.sub("", text)):
        target = found[1] or found[2]
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
    found = re.findall(rf"`((?:{'|'.join([*PACKAGES, 'docs'])})/[\w./-]*)`", read(path))
    assert [name for name in found if not (ROOT / name).exists()] == []


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
