"""Generates the table of methods from the pages in docs/methods, and the table of presets from the YAML files.

A method's page begins with its title, one sentence, and a line `**Mode:** lossless` or `lossy`.
"""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from configs.load import load_job
from configs.method import MethodConfig
from configs.presets import method_names, named_method
from configs.schema import CaptionJobConfig
from configs.synthesis import SynthesizeJobConfig
from configs.training import TrainDrafterJobConfig
from docgen.config import JOBS
from docgen.markdown import item, page, table

FOLDER = Path("docs/methods")
_HEAD = re.compile(r"# (?P<title>.+)\n\n(?P<summary>.+?)\n\n\*\*Mode:\*\* (?P<mode>[^\n]+?)\.?\n", re.DOTALL)


@dataclass(frozen=True)
class MethodPage:
    """File, title, summary and mode of a method's page."""

    file: str
    title: str
    summary: str
    mode: str


def read(root: Path) -> list[MethodPage]:
    """Return the pages of methods, lossless methods first, then by title.

    Raises:
        ValueError: a page does not begin with title, summary and mode.
    """
    pages = []
    for path in sorted((root / FOLDER).glob("*.md")):
        if path.name == "index.md":
            continue
        head = _HEAD.match(path.read_text())
        if head is None:
            raise ValueError(f"{path.name} does not begin with a title, a sentence and a line **Mode:**")
        pages.append(MethodPage(path.name, head["title"], " ".join(head["summary"].split()), head["mode"]))
    return sorted(pages, key=lambda method: (method.mode.startswith("lossy"), method.title.lower()))


def short_list(root: Path) -> str:
    """Render the names of methods by mode as a list, for the README."""
    links: dict[str, list[str]] = {}
    for method in read(root):
        links.setdefault(method.mode, []).append(f"[{method.title}](docs/methods/{method.file})")
    return "\n".join(item(f"{mode}: {', '.join(names)}") for mode, names in links.items())


def long_table(root: Path) -> str:
    """Render name, mode and summary, for the index of methods."""
    rows = [[f"[{method.title}]({method.file})", method.mode, method.summary] for method in read(root)]
    return table(("method", "mode", "summary"), rows)


def presets_page(root: Path) -> str:
    """Render the job files of `configs/jobs` and the methods of `configs/methods`."""
    jobs = []
    for path in sorted((root / "configs/jobs").glob("*.yaml")):
        kind = job_kind(path)
        job: Any = load_job(JOBS[kind], path)
        named = yaml.safe_load(path.read_text()).get("method", "")
        if isinstance(job, TrainDrafterJobConfig):
            named, mode = f"`{job.head.kind}` head", ""
        else:
            assert isinstance(job, CaptionJobConfig | SynthesizeJobConfig)
            named, mode = f"`{named}`" if isinstance(named, str) else "its own", job.method.verify_mode
        jobs.append([f"`{path.relative_to(root).as_posix()}`", kind, named, mode, comment_of(path)])
    methods = []
    for name in method_names():
        method = MethodConfig.model_validate_json(json.dumps(named_method(name, "docgen")))
        drafted = method.drafter.kind != "none"
        contexts = ", ".join(context.kind for context in method.contexts) if method.drafter.kind == "model" else ""
        kinds = ", ".join(each.drafter.kind for each in method.methods)
        choices = [kinds, contexts, method.tree.kind if drafted else "", method.acceptance.kind]
        comment = comment_of(root / f"configs/methods/{name}.yaml")
        methods.append([f"`{name}`", *choices, method.verify_mode, comment])
    return page(
        "Job files and methods",
        "A job file of `configs/jobs` names a method of `configs/methods`; `method=NAME` on the command line selects "
        "another one, and `method.tree.length=3` changes it. `caption_*`, `synthesize_*` and `train_llamagen_*` name "
        "the published models of a paper and are unmeasured. `demo_*`, `zoo_*` and `train_zoo_*` use the shipped "
        "models and the data that `make demo` writes.",
        "## Job files",
        table(("file", "job", "method", "mode", "content"), jobs),
        "## Methods",
        table(("method", "drafter", "contexts", "tree", "acceptance", "mode", "content"), methods),
    )


def comment_of(path: Path) -> str:
    """Return the leading comment of a YAML file, without indented example commands."""
    comment = itertools.takewhile(lambda line: line.startswith("#"), path.read_text().splitlines())
    return " ".join(line.removeprefix("# ") for line in comment if not line.startswith("#  ")).rstrip(":")


def job_kind(path: Path) -> str:
    """Return the kind of a job file, by its name."""
    if path.stem.startswith("train_"):
        return "train"
    return "synthesize" if re.match(r"synthesize_|zoo_images", path.stem) else "caption"
