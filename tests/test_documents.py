"""The documents say what the code is: fields, defaults, columns, codes, files, presets, links.

Reads Markdown and the schema; runs nothing.
"""

from __future__ import annotations

import inspect
import json
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

import pyarrow as pa
import pytest
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from configs.load import load_job
from configs.method import Method
from configs.schema import CaptionJob
from configs.synthesis import SynthesizeJob
from pipeline.rows.schemas import ERROR_CODES, STATUS_VALUES, TELEMETRY, result_schema
from pipeline.synthesis import rows as image_rows

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("configs", "jobs", "pipeline", "actors", "decoding", "models", "zoo", "benchmarks", "tests")
NOT_IN_GIT = {"out", "build", "dist"}


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def section(heading: str, text: str | None = None) -> str:
    """The README's text under one heading, up to the next of the same or a higher level."""
    text = read("README.md") if text is None else text
    level = heading.split(" ")[0]
    found = re.search(rf"^{re.escape(heading)}\n(.*?)(?=^#{{1,{len(level)}}} |\Z)", text, re.DOTALL | re.MULTILINE)
    assert found, f"no heading {heading!r}"
    return found[1]


def table_rows(text: str) -> list[list[str]]:
    """The cells of every table row whose first cell is one name in backticks."""
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in row] for row in rows]


def name_of(cell: str) -> str:
    return cell.strip("`")


# --- the job file --------------------------------------------------------------------------------------------------


def sections_in(annotation: Any) -> list[type[BaseModel]]:
    """The section classes that a field's type mentions."""
    if get_origin(annotation) is Annotated:
        return sections_in(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType, tuple):
        return [found for part in get_args(annotation) for found in sections_in(part)]
    return [annotation] if inspect.isclass(annotation) and issubclass(annotation, BaseModel) else []


def is_list(annotation: Any) -> bool:
    return get_origin(get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation) is tuple


def shown(default: Any) -> str:
    """A default as the README prints it: what one would write in the YAML."""
    if default is PydanticUndefined:
        return "required"
    return f"`{default}`" if isinstance(default, str) else f"`{json.dumps(default)}`"


def default_kinds() -> set[str]:
    method = Method()
    choices = (method.drafter, *method.contexts, method.tree, method.acceptance, method.controller)
    return {type(choice).__name__ for choice in choices}


def choice_of(model: type[BaseModel]) -> str:
    """The `kind` by which one of several sections is chosen; empty for a section that is no choice."""
    default = model.model_fields["kind"].default if "kind" in model.model_fields else None
    return default if isinstance(default, str) else ""


def walk(
    model: type[BaseModel], prefix: str = "", kind: str = "", above: tuple[type[BaseModel], ...] = ()
) -> Iterator[tuple[tuple[str, str], str]]:
    """A section inside itself is a field; what stands in it is told once."""
    for name, field in model.model_fields.items():
        found = [inner for inner in sections_in(field.annotation) if inner not in above]
        if name == "kind" and choice_of(model):
            yield (prefix + name, kind), "default" if model.__name__ in default_kinds() else ""
        elif not found:
            yield (prefix + name, kind), shown(field.default)
        for inner in found:
            below = prefix + name + ("[]." if is_list(field.annotation) else ".")
            yield from walk(inner, below, choice_of(inner) or kind, (*above, model))


def schema_fields(model: type[BaseModel] = CaptionJob) -> dict[tuple[str, str], str]:
    """(dotted path, kind of the choice it belongs to) → the default as text."""
    return dict(walk(model))


def documented_fields(text: str | None = None) -> dict[tuple[str, str], str]:
    fields = {}
    for row in table_rows(section("## The job file", text)):
        key = (name_of(row[0]), name_of(row[1]) if len(row) == 4 else "")
        assert key not in fields, f"{key} stands twice"
        assert row[-1], f"{key} has no meaning in the README"
        fields[key] = row[-2]
    return fields


def test_the_readme_names_every_field_of_the_schema_with_its_default_and_no_other() -> None:
    assert documented_fields() == schema_fields()


def test_the_page_on_synthesis_names_what_differs_from_captions_and_nothing_else() -> None:
    told, captions = documented_fields(read("docs/synthesis.md")), documented_fields()
    fields = schema_fields(SynthesizeJob)
    assert {key: default for key, default in told.items() if fields.get(key) != default} == {}
    assert {key: default for key, default in fields.items() if {**captions, **told}.get(key) != default} == {}


def test_the_readme_has_a_heading_for_every_section_of_the_schema() -> None:
    headings = re.findall(r"^### `([a-z]+)`", section("## The job file"), re.MULTILINE)
    assert headings == list(CaptionJob.model_fields)


# --- the output ----------------------------------------------------------------------------------------------------


def test_the_readme_explains_every_error_code_and_no_other() -> None:
    codes = {name_of(row[0]): row[1] for row in table_rows(section("### Error codes"))}
    assert codes == ERROR_CODES


def test_the_readme_explains_every_output_column_in_order() -> None:
    names = [name_of(row[0]) for row in table_rows(section("### Columns"))]
    telemetry = [f"telemetry.{field.name}" for field in TELEMETRY]
    assert names == [name for name in result_schema().names if name != "telemetry"] + telemetry


def test_the_readme_names_the_type_of_every_output_column() -> None:
    types = {field.name: field.type for field in result_schema()}
    types |= {f"telemetry.{field.name}": field.type for field in TELEMETRY}
    told = {name_of(row[0]): row[1] for row in table_rows(section("### Columns"))}
    assert told == {name: type_name(kind) for name, kind in types.items() if name != "telemetry"}


def test_the_page_on_synthesis_explains_every_output_column_in_order() -> None:
    listed = table_rows(section("## What comes out", read("docs/synthesis.md")))
    schema = image_rows.result_schema()
    assert [(name_of(row[0]), row[1]) for row in listed] == [
        (field.name, "struct" if field.name == "telemetry" else type_name(field.type)) for field in schema
    ]


def type_name(kind: pa.DataType) -> str:
    return f"list of {kind.value_type}" if pa.types.is_list(kind) else str(kind)


def test_the_readme_names_every_status() -> None:
    row = next(row for row in table_rows(section("### Columns")) if row[0] == "`status`")
    assert set(re.findall(r"`([a-z]+)`", row[2])) == set(STATUS_VALUES)


# --- files ---------------------------------------------------------------------------------------------------------


def listed_files() -> dict[str, str]:
    """Path → caption of the README's file tree; a folder's path ends in a slash."""
    block = re.search(r"```text\n(.*?)```", section("## Files"), re.DOTALL)
    assert block, "the section Files has no tree"
    found: dict[str, str] = {}
    folders: list[str] = []
    for line in block[1].splitlines():
        parts = re.fullmatch(r"((?:    )*)(\S+)(?: {2,}(\S.*))?", line)
        assert parts, f"not a line of the tree: {line!r}"
        depth = len(parts[1]) // 4
        path = "".join(folders[:depth]) + parts[2]
        assert path not in found, f"{path} is listed twice"
        if parts[2].endswith("/"):
            folders[depth:] = [parts[2]]
        found[path] = parts[3] or ""
    return found


def test_every_file_in_the_tree_exists_and_has_a_caption() -> None:
    listed = listed_files()
    assert [path for path in listed if not (ROOT / path).exists()] == []
    assert [path for path, caption in listed.items() if not caption] == []


def test_every_folder_of_the_repository_is_in_the_tree() -> None:
    hidden_or_made = re.compile(r"\..*|__pycache__|.*\.egg-info")
    there = {path.name for path in ROOT.iterdir() if path.is_dir() and not hidden_or_made.fullmatch(path.name)}
    assert sorted(there - NOT_IN_GIT - {path.split("/")[0] for path in listed_files()}) == []


def uncaptioned(modules: list[str], listed: set[str]) -> list[str]:
    """Modules without a line of their own whose folder is not listed as a whole.

    A folder that shows one of its modules has to show them all; one that shows none stands for everything below it.
    """
    opened = {path.rpartition("/")[0] + "/" for path in listed if path.endswith(".py")}
    lost = []
    for module in modules:
        folders = [f"{folder}/" for folder in Path(module).parents if folder != Path()]
        nearest = next((folder for folder in folders if folder in listed), None)
        if module not in listed and (nearest is None or nearest in opened):
            lost.append(module)
    return lost


def test_every_module_is_captioned_or_lies_in_a_captioned_folder() -> None:
    modules = [
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        if path.name != "__init__.py"
    ]
    assert uncaptioned(modules, set(listed_files())) == []


def test_a_module_beside_captioned_ones_needs_a_caption_of_its_own() -> None:
    listed = {"a/", "a/one.py", "a/b/"}
    assert uncaptioned(["a/one.py", "a/two.py", "a/b/three.py", "c/four.py"], listed) == ["a/two.py", "c/four.py"]


# --- methods and links ---------------------------------------------------------------------------------------------


def test_every_preset_is_named_where_a_reader_looks() -> None:
    methods = [read(path.relative_to(ROOT).as_posix()) for path in sorted((ROOT / "docs").rglob("*.md"))]
    named = set(re.findall(r"configs/[a-z0-9_]+\.yaml", "\n".join([read("README.md"), *methods])))
    there = {f"configs/{path.name}" for path in (ROOT / "configs").glob("*.yaml")}
    assert (sorted(there - named), sorted(named - there)) == ([], [])


def method_rows() -> list[list[str]]:
    """The README's table of methods: name, drafter, contexts, tree, acceptance, mode, paper, presets."""
    lines = [line for line in section("## Methods").splitlines() if re.match(r"\| (?!method |---)\S", line)]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def job_of(preset: str) -> type[CaptionJob] | type[SynthesizeJob]:
    """The kind of job that a preset is, by its name."""
    return SynthesizeJob if re.match(r"configs/(synthesize|zoo_images)_", preset) else CaptionJob


def in_backticks(cell: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", cell))


@pytest.mark.parametrize("row", method_rows(), ids=lambda row: re.sub(r"\[(.*)\].*", r"\1", row[0]))
def test_a_row_of_the_method_table_says_what_its_presets_do(row: list[str]) -> None:
    _, drafter, contexts, tree, acceptance, mode, _, presets = row
    named = re.findall(r"configs/\w+\.yaml", presets)
    assert named, "no preset"
    for preset in named:
        method = load_job(job_of(preset), ROOT / preset).method
        assert method.drafter.kind in in_backticks(drafter), preset
        assert method.acceptance.kind in in_backticks(acceptance), preset
        assert method.verify_mode in re.split(r"[ ,]+", mode), preset
        if method.drafter.kind != "none":
            assert method.tree.kind in in_backticks(tree), preset
        if contexts:
            assert {context.kind for context in method.contexts} <= in_backticks(contexts), preset


def test_every_page_of_a_method_is_in_the_index() -> None:
    linked = set(re.findall(r"\(methods/([a-z0-9_]+\.md)\)", read("docs/methods.md")))
    assert linked == {path.name for path in (ROOT / "docs" / "methods").glob("*.md")}


def documents() -> list[str]:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "zoo").glob("*.md")]
    return sorted(path.relative_to(ROOT).as_posix() for path in pages)


def broken_links(text: str, folder: Path) -> list[str]:
    """Targets of relative links that are no file, or no heading of one."""
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)|src(?:set)?=\"([^\"]+)\"", text):
        path, _, anchor = (target[0] or target[1]).partition("#")
        if re.match(r"[a-z]+:", path):
            continue
        page = folder / path if path else None
        if page is not None and not page.exists():
            broken.append(path)
        elif anchor and anchor not in anchors(page.read_text(encoding="utf-8") if page else text):
            broken.append(f"{path}#{anchor}")
    return broken


def anchors(text: str) -> set[str]:
    """The anchors that a page's headings get: lower case, punctuation dropped, spaces to hyphens."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", documents())
def test_every_link_between_documents_leads_somewhere(path: str) -> None:
    assert broken_links(read(path), (ROOT / path).parent) == []


def test_the_link_check_sees_a_missing_page_and_a_missing_heading(tmp_path: Path) -> None:
    (tmp_path / "there.md").write_text("# A heading, with a comma\n")
    text = "[a](there.md) [b](there.md#a-heading-with-a-comma) [c](there.md#other) [d](gone.md) [e](https://x.test/#y)"
    assert broken_links(text, tmp_path) == ["there.md#other", "gone.md"]


@pytest.mark.parametrize("path", [*documents(), "docs/graph.svg"])
def test_documents_name_only_paths_that_exist(path: str) -> None:
    """Paths in backticks that begin with a folder of this repository."""
    found = re.findall(rf"`((?:{'|'.join([*PACKAGES, 'docs'])})/[\w./-]*)`", read(path))
    assert [name for name in found if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("path", documents())
def test_commands_in_the_documents_exist(path: str) -> None:
    text = read(path)
    verbs = {verb for pair in re.findall(r"^ *make ([a-z-]+)|`make ([a-z-]+)`", text, re.MULTILINE) for verb in pair}
    targets = set(re.findall(r"^([a-z-]+):", read("Makefile"), re.MULTILINE))
    assert verbs - {""} <= targets
    modules = [ROOT / name.replace(".", "/") for name in re.findall(r"python -m ([a-z_]+(?:\.[a-z_]+)+)\b", text)]
    assert [str(module) for module in modules if not module.with_suffix(".py").is_file()] == []


def test_generated_tables_have_a_place_in_the_readme() -> None:
    marks = re.findall(r"<!-- table: ([a-z_]+) -->\n.*?<!-- end -->", read("README.md"), re.DOTALL)
    assert set(marks) >= {"acceptance", "cost", "claims"}
