"""The table of methods, from the heads of the pages in docs/methods, and the table of presets, from the YAML files.

A method's page begins with its title, one sentence, and a line `**Mode:** lossless` or `lossy`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from configs.load import load_job
from configs.schema import CaptionJob
from configs.synthesis import SynthesizeJob
from configs.training import TrainDrafterJob
from docgen.markdown import page, table

FOLDER = Path("docs/methods")
_HEAD = re.compile(r"# (?P<title>.+)\n\n(?P<summary>.+?)\n\n\*\*Mode:\*\* (?P<mode>[^\n]+?)\.?\n", re.DOTALL)
KINDS = {"synthesize": SynthesizeJob, "train": TrainDrafterJob, "caption": CaptionJob}


@dataclass(frozen=True)
class MethodPage:
    """The head of one page."""

    file: str
    title: str
    summary: str
    mode: str


def read(root: Path) -> list[MethodPage]:
    """The pages of methods, lossless ones first, then by title.

    Raises:
        ValueError: a page has no head.
    """
    found = []
    for path in sorted((root / FOLDER).glob("*.md")):
        if path.name == "index.md":
            continue
        head = _HEAD.match(path.read_text())
        if head is None:
            raise ValueError(f"{path.name} does not begin with a title, a sentence and a line **Mode:**")
        found.append(MethodPage(path.name, head["title"], " ".join(head["summary"].split()), head["mode"]))
    return sorted(found, key=lambda method: (method.mode.startswith("lossy"), method.title.lower()))


def short_table(root: Path) -> str:
    """Name and mode, for the README."""
    rows = [[f"[{method.title}](docs/methods/{method.file})", method.mode] for method in read(root)]
    return table(("method", "mode"), rows)


def long_table(root: Path) -> str:
    """Name, mode and summary, for the index of methods."""
    return table(
        ("method", "mode", "summary"),
        [[f"[{method.title}]({method.file})", method.mode, method.summary] for method in read(root)],
    )


def presets_page(root: Path) -> str:
    """The four choices and the mode of every job file in `configs`."""
    rows = []
    for path in sorted((root / "configs").glob("*.yaml")):
        model = KINDS[job_kind(path)]
        job = load_job(model, path)
        name = f"`{path.relative_to(root).as_posix()}`"
        if isinstance(job, TrainDrafterJob):
            rows.append([name, "train_drafter", f"`{job.head.kind}` head", "", "", "", ""])
            continue
        method = job.method
        if method.auto is not None:
            rows.append([name, job_kind(path), "`auto`", "", "", "", "lossless"])
            continue
        contexts = ", ".join(f"`{context.kind}`" for context in method.contexts) if method.drafter.kind == "model" else ""
        drafted = method.drafter.kind != "none"
        rows.append(
            [
                name,
                job_kind(path),
                f"`{method.drafter.kind}`",
                contexts,
                f"`{method.tree.kind}`" if drafted else "",
                f"`{method.acceptance.kind}`",
                method.verify_mode,
            ]
        )
    return page(
        "Presets",
        "Every shipped job file and the method it selects. `caption_*`, `synthesize_*` and `train_llamagen_*` name the "
        "published models of a paper and have not been run here. `demo_*`, `zoo_*` and `train_zoo_*` use the shipped "
        "models and the data that `make demo` writes.",
        table(("file", "job", "drafter", "contexts", "tree", "acceptance", "mode"), rows),
    )


def job_kind(path: Path) -> str:
    """The kind of job that a preset is, by its name."""
    if path.stem.startswith("train_"):
        return "train"
    return "synthesize" if re.match(r"synthesize_|zoo_images_", path.stem) else "caption"
