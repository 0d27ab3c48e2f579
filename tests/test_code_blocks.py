"""Every code block of the README, the front page and the guides runs, or has a reason right before it why it does not.

`bash` blocks run as commands, `python` blocks are executed, `sql` blocks are queried with duckdb, `yaml` blocks are
validated as the part of a job file that they are. `text` is output that is shown. Names of the pages are replaced by
small data: OUT is a finished output, JOB.yaml a job of the shipped text pair, PICTURES a folder of images, and `out/`
a temporary folder. Lines that install packages are left out; `tests/install` installs.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import duckdb
import pytest
import yaml
from PIL import Image

from configs.load import validate
from configs.output import ExportJobConfig
from configs.presets import named_method
from configs.schema import CaptionJobConfig
from configs.synthesis import SynthesizeJobConfig
from configs.training import TrainDrafterJobConfig
from pipeline.reports.summary import count
from pipeline.storage.output_dir import as_json
from tests.pipeline import attempts
from tests.pipeline.image_jobs import image_synthesis, run_images
from zoo.text import held_out_questions
from zoo.world import listing

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "docs/index.md", *(f"docs/guides/{path.name}" for path in (ROOT / "docs/guides").glob("*.md")))
LANGUAGES = ("bash", "python", "sql", "yaml", "text")
FENCE = re.compile(r"^( *)(```+)(.*)$")
NOT_RUN = re.compile(r"^ *<!-- not run: (\S.*) -->$")
INSTALLS = re.compile(r"^(pip|\S*python3? -m pip) install |^python3 -m venv ", re.MULTILINE)
NUM_ROWS = 24
TIMEOUT_S = 900


@dataclass(frozen=True)
class CodeBlock:
    """A code block by page and line; `reason` is why it is not run; empty if it is."""

    page: str
    line: int
    language: str
    text: str
    reason: str = ""

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: str, text: str) -> list[CodeBlock]:
    """Return the code blocks of a Markdown page; AssertionError for one without a language, or an unknown one."""
    lines, blocks, index = text.splitlines(), [], 0
    while index < len(lines):
        start = FENCE.match(lines[index])
        if start is None:
            # An indented block after a blank line has no language; lists are indented less, or follow their marker.
            is_first = index > 0 and not lines[index - 1].strip() and lines[index].startswith("    ")
            before = next((line for line in reversed(lines[:index]) if line.strip()), "")
            in_list = re.match(r" *([-*+]|\d+\.) ", before) or before.startswith("  ")
            assert in_list or not is_first, f"{page}:{index + 1}: an indented block has no language; use a fence"
            index += 1
            continue
        end = next(number for number in range(index + 1, len(lines)) if lines[number].strip() == start[2])
        language = start[3].strip()
        assert language in LANGUAGES or language.startswith("{"), f"{page}:{index + 1}: language {language!r}"
        found = NOT_RUN.match(lines[index - 1]) if index else None
        body = "\n".join(line.removeprefix(start[1]) for line in lines[index + 1 : end])
        blocks.append(CodeBlock(page, index + 1, language, body, found[1] if found else ""))
        index = end + 1
    return blocks


BLOCKS = [block for page in PAGES for block in blocks_of(page, (ROOT / page).read_text(encoding="utf-8"))]


def chosen(*languages: str) -> list[Any]:
    """Return the blocks of these languages that run, as parameters of a test."""
    return [pytest.param(block, id=block.name) for block in BLOCKS if block.language in languages and not block.reason]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the data of the names of the pages."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "PICTURES").mkdir()
    for number in range(3):
        Image.new("RGB", (96, 96), (60 * number, 90, 120)).save(tmp_path / f"PICTURES/{number}.png")
    (tmp_path / "src").mkdir()
    prompts = [listing.write_prompt(*asked) for asked in held_out_questions(NUM_ROWS, 5)]
    (tmp_path / "src/a.txt").write_text("".join(f"{prompt}\n" for prompt in prompts))
    pair = ROOT / "zoo/checkpoints"
    job = {
        "source": {"kind": "text", "path": str(tmp_path / "src")},
        "prompt": "{text}",
        "model": {name: {"path": str(pair / f"text_{name}"), "dtype": "float32"} for name in ("target", "drafter")},
        "method": "sd_chain_text",
        "sampling": {"max_new_tokens": 16},
        "pool": {"slots": 8, "max_context_tokens": 256},
        "sink": {"path": str(tmp_path / "captions")},
        "job": {"progress": False},
    }
    (tmp_path / "JOB.yaml").write_text(yaml.safe_dump(job))
    (tmp_path / "exports.yaml").write_text(yaml.safe_dump({"exports": [{"kind": "tars", "path": str(tmp_path / "t")}]}))
    return tmp_path


def finished_captions(folder: Path) -> None:
    """Make OUT the output of a finished caption job."""
    plan = attempts.run(
        attempts.job({"kind": "text", "path": str(folder / "src")}, folder / "OUT", prompt={"text": "{text}"})
    )
    (folder / "OUT/_job/summary.json").write_bytes(as_json(count(plan.output, plan.empty_summary(1.0)).to_json()))


def finished_images(folder: Path, *names: str) -> None:
    """Make outputs of finished synthesis jobs."""
    for name in names:
        run_images(image_synthesis(folder, ["a red cat", "snow"], name))


@pytest.mark.parametrize("block", chosen("python"))
def test_python_blocks_run(block: CodeBlock, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finished_images(folder, "OUT") if '"image"' in block.text else finished_captions(folder)
    shown: list[Any] = []
    monkeypatch.setattr(Image.Image, "show", lambda image: shown.append(image.size))
    exec(compile(block.text, block.name, "exec"), {"__name__": "block"})
    assert bool(shown) == (".show()" in block.text)


@pytest.mark.parametrize("block", chosen("sql"))
def test_queries_run(block: CodeBlock, folder: Path) -> None:
    finished_captions(folder)
    (folder / "OUT/errors").mkdir(exist_ok=True)
    if not list((folder / "OUT/errors").glob("*.parquet")):
        part = next((folder / "OUT/data").glob("*.parquet"))
        (folder / "OUT/errors/part-000000.parquet").write_bytes(part.read_bytes())
    results = [duckdb.sql(query).fetchall() for query in block.text.split(";") if query.strip()]
    assert all(results)


@pytest.mark.parametrize("block", chosen("yaml"))
def test_yaml_blocks_are_valid_parts_of_job_files(block: CodeBlock, folder: Path) -> None:
    data = yaml.safe_load(block.text)
    if data is None:  # a comment for editors, whose schema is a file of the documents
        [path] = re.findall(r"\$schema=(?:\.\./)*(\S+)", block.text)
        assert (ROOT / path).is_file()
        return
    if "exports" in data:
        validate(ExportJobConfig, data, block.name)
    elif (data.get("source") or {}).get("kind") == "job_output":
        validate(TrainDrafterJobConfig, data, block.name)
    else:
        kind = SynthesizeJobConfig if "image" in data or "vq" in data else CaptionJobConfig
        base = yaml.safe_load((folder / "JOB.yaml").read_text())
        if isinstance(data.get("source"), dict):
            base["source"] = {}
        whole = base | data
        if isinstance(whole["method"], str):
            whole["method"] = named_method(whole["method"], block.name)
        validate(kind, whole, block.name)


@pytest.mark.slow
@pytest.mark.parametrize("block", chosen("bash"))
def test_commands_run(block: CodeBlock, folder: Path) -> None:
    if "sheet" in block.text:
        finished_images(folder, "out/lantern", "out/plain")
    else:
        finished_captions(folder)
    tools = folder / "bin"
    tools.mkdir()
    for name, words in (("draftfleet", "-m draftfleet"), ("python", "")):
        (tools / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
        (tools / name).chmod(0o755)
    text = "\n".join(line for line in block.text.splitlines() if not INSTALLS.match(line))
    assert text.strip(), "every line installs packages: say why the block is not run"
    # The job files name the shipped models relative to the checkout, so that is the working directory.
    for word in ("PICTURES", "JOB.yaml", "exports.yaml", "OUT", "out", "sheet.html"):
        text = re.sub(rf"(?<![\w/.-]){re.escape(word)}(?![\w.-])", str(folder / word), text)
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{text}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    assert "Traceback" not in done.stderr


def test_blocks_that_are_not_run_have_a_reason_and_most_blocks_run() -> None:
    runnable = [block for block in BLOCKS if block.language in ("bash", "python", "sql", "yaml")]
    left_out = [block.name for block in runnable if block.reason]
    assert len(left_out) < len(runnable) / 2, left_out
    assert all(len(block.reason.split()) >= 3 for block in runnable if block.reason)
    named = [path for block in BLOCKS for path in re.findall(r"tests/[\w/.]+\w", block.reason)]
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("```\nls\n```\n", "page:1: language ''"),
        ("words\n\n    ls\n", "page:3: an indented block has no language"),
        ("```ruby\nputs 1\n```\n", "page:1: language 'ruby'"),
    ],
)
def test_blocks_without_a_language_are_refused(text: str, reason: str) -> None:
    with pytest.raises(AssertionError, match=re.escape(reason)):
        blocks_of("page", text)


def test_blocks_are_found_with_their_reasons() -> None:
    page = "<!-- not run: it needs a cluster -->\n```bash\nray list\n```\n- item\n\n  ```text\n  x\n  ```\n\n"
    page += "```yaml\na: 1\n```\n"
    found = [(block.line, block.language, block.text, block.reason) for block in blocks_of("page", page)]
    assert found == [(2, "bash", "ray list", "it needs a cluster"), (7, "text", "x", ""), (11, "yaml", "a: 1", "")]
    stale = "<!-- not run: it needs a cluster -->\n\n```bash\nray list\n```\n"
    assert blocks_of("page", stale)[0].reason == ""
